"""The campaign of broken kernels: `python -m tests.hostile.kernels --count 300 --seed 0`.

A backend of attention gets a random fault: what is wrong, by how much, and when. The backend's
self-test must catch the fault, or the fault must be harmless: on new inputs of many sizes, at least
ACTING of them ones on which the fault acts, no number may be off by more than rounding explains. A
fault that does harm and is not caught is missed. After a caught fault, answers must be those of the
plain path. Stored outcomes of self-tests are damaged at random too: a damaged file must be ignored,
or still state the same outcome.
"""

import argparse
import json
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from restorekv.model import attention
from restorekv.model.attention import (
    autograd,
    backend_self_test,
    cascade,
    dispatch,
    self_test_files,
    self_tests,
)
from restorekv.model.attention.backend_self_test import AttentionCase, CaseInputs
from restorekv.model.attention.self_tests import SelfTest, Target
from tests.helpers import fake_device

SHAPES = ((2, 2, 16), (3, 3, 64), (1, 4, 32))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FRESH = 8  # inputs on which harm is measured, at least
ACTING = 5  # of these, inputs on which a fault acts
RIGHT = cascade.attend_ragged
Fault = Callable[[Tensor, object, Tensor | None, float], Tensor]


def draw_fault(rng: random.Random) -> tuple[str, str, Fault]:
    """Return a kind of fault, when it acts, and a backend with this fault."""
    kind, when = rng.choice(list(KINDS)), rng.choice(list(WHEN))
    size, place = 10 ** rng.uniform(-6, 0), rng.randrange(1 << 16)

    def broken(query, layer, mask, scale, *sinks):
        # The faults are those of models without sinks.
        if sinks or not WHEN[when](query, layer, mask):
            return RIGHT(query, layer, mask, scale, *sinks)
        return KINDS[kind](query, layer, mask, scale, size, place)

    return kind, when, broken


def scaled(query, layer, mask, scale, size, place):
    return RIGHT(query, layer, mask, scale) * (1 + size)


def wrong_scale(query, layer, mask, scale, size, place):
    return RIGHT(query, layer, mask, scale * (1 + size))


def noisy(query, layer, mask, scale, size, place):
    found = RIGHT(query, layer, mask, scale)
    noise = torch.randn(
        found.shape, generator=torch.Generator().manual_seed(place), dtype=torch.float32
    )
    return found + (size * noise).to(found.dtype)


def one_wrong_number(query, layer, mask, scale, size, place):
    found = RIGHT(query, layer, mask, scale).contiguous()
    found.view(-1)[place % found.numel()] = size * 10
    return found


def last_number(query, layer, mask, scale, size, place):
    """Change the last dimension of the last row of the last head."""
    found = RIGHT(query, layer, mask, scale).contiguous()
    found.view(-1)[-1] += size
    return found


def last_head(query, layer, mask, scale, size, place):
    found = RIGHT(query, layer, mask, scale).contiguous()
    found[:, -1] *= 1 + size
    return found


def not_a_number(query, layer, mask, scale, size, place):
    found = RIGHT(query, layer, mask, scale).contiguous()
    found.view(-1)[place % found.numel()] = float("nan")
    return found


def lost_row(query, layer, mask, scale, size, place):
    found = RIGHT(query, layer, mask, scale).contiguous()
    found.view(-1, found.shape[-1])[place % (found.numel() // found.shape[-1])] = 0
    return found


def swapped_questions(query, layer, mask, scale, size, place):
    return RIGHT(query, layer, mask, scale).roll(1, place % 4)


def lost_pair(query, layer, mask, scale, size, place):
    """Ignore one pair of every head: its first, its last, or one at the edge of a tile."""
    bias = torch.zeros(layer.bounds[-1]) if layer.bias is None else layer.bias.clone()
    for start, end in zip(layer.bounds, layer.bounds[1:], strict=False):
        at = (start, end - 1, start + 63, start + 64)[place % 4]
        if start <= at < end:
            bias[at] = -1e4
    return RIGHT(query, with_bias(layer, bias), mask, scale)


def lost_tile(query, layer, mask, scale, size, place):
    """Ignore the last tile of every head."""
    bias = torch.zeros(layer.bounds[-1]) if layer.bias is None else layer.bias.clone()
    for start, end in pairwise(layer.bounds):
        if end > start:
            bias[start + (end - start - 1) // 64 * 64 : end] = -1e4
    return RIGHT(query, with_bias(layer, bias), mask, scale)


def lost_bias(query, layer, mask, scale, size, place):
    return RIGHT(query, with_bias(layer, None), mask, scale)


def wrong_bias(query, layer, mask, scale, size, place):
    return RIGHT(
        query,
        with_bias(layer, None if layer.bias is None else layer.bias * (1 + size)),
        mask,
        scale,
    )


def lost_column(query, layer, mask, scale, size, place):
    mask = visible(query, layer, mask).clone()
    mask[..., (0, -1)[place % 2]] = layer.columns == 1
    return RIGHT(query, layer, mask, scale)


def early_column(query, layer, mask, scale, size, place):
    """Let a query attend to what comes after it."""
    mask = visible(query, layer, mask)
    return RIGHT(query, layer, mask | mask.roll(1, -1).logical_or(mask.roll(-1, -2)), scale)


def lost_mask(query, layer, mask, scale, size, place):
    return RIGHT(query, layer, None, scale)


def mixed_values(query, layer, mask, scale, size, place):
    """Replace some of the values by those of another pair."""
    plain = with_bias(layer, layer.bias)
    count = max(int(len(plain.context_values) * size), 1)
    values = plain.context_values.clone()
    values[:count] = values[:count].roll(1, 0)
    plain.context_values = values
    return RIGHT(query, plain, mask, scale)


def failing(query, layer, mask, scale, size, place):
    raise RuntimeError("an error of a kernel")


def with_bias(layer, bias):
    return backend_self_test.make_layer(
        layer.context_keys, layer.context_values, list(layer.bounds), *layer.keys_and_values, bias
    )


def visible(query, layer, mask):
    if mask is not None:
        return mask
    own = torch.ones(query.shape[3], layer.columns, dtype=torch.bool).tril(
        layer.columns - query.shape[3]
    )
    return own.expand(len(query), 1, -1, -1)


KINDS = {
    each.__name__: each
    for each in (
        scaled,
        wrong_scale,
        noisy,
        one_wrong_number,
        last_number,
        last_head,
        not_a_number,
        lost_row,
        swapped_questions,
        lost_pair,
        lost_tile,
        lost_bias,
        wrong_bias,
        lost_column,
        early_column,
        lost_mask,
        mixed_values,
        failing,
    )
}
WHEN = {
    "always": lambda query, layer, mask: True,
    "for one question": lambda query, layer, mask: len(query) == 1,
    "for several questions": lambda query, layer, mask: len(query) > 1,
    "for one token": lambda query, layer, mask: query.shape[3] == 1,
    "for several tokens": lambda query, layer, mask: query.shape[3] > 1,
    "under a mask": lambda query, layer, mask: mask is not None,
    "without a mask": lambda query, layer, mask: mask is None,
    "with a bias": lambda query, layer, mask: layer.bias is not None,
    "with a bias, without a mask": lambda query, layer, mask: (
        layer.bias is not None and mask is None
    ),
    "for one token of one question": lambda query, layer, mask: len(query) == query.shape[3] == 1,
    "for several tokens of one question": lambda query, layer, mask: (
        len(query) == 1 < query.shape[3]
    ),
    "for the first tokens": lambda query, layer, mask: layer.columns == query.shape[3],
    "for tails of whole tiles": lambda query, layer, mask: layer.columns % 64 == 0,
    "for heads of whole tiles": lambda query, layer, mask: any(
        end > start and (end - start) % 64 == 0 for start, end in pairwise(layer.bounds)
    ),
    "for long tails": lambda query, layer, mask: layer.columns > 64,
    "for many pairs": lambda query, layer, mask: layer.bounds[-1] > 120,
}


def fresh_samples(rng: random.Random, target: Target, when: str) -> list[CaseInputs]:
    """Return inputs that no self-test uses; faults that act at `when` act on at least ACTING of
    them.
    """
    made, acting = [], 0
    while len(made) < FRESH or acting < ACTING:
        sample = backend_self_test.make_sample(target, fresh_case(rng), seed=rng.randrange(1 << 32))
        acts = WHEN[when](sample.query, sample.layer, sample.mask)
        if acts or len(made) < FRESH - ACTING:
            made.append(sample)
            acting += acts
    return made


def fresh_case(rng: random.Random) -> AttentionCase:
    """Draw a case; a third of the tails ends at the edge of a tile, and some begin with the
    question.
    """
    queries = rng.choice([1, 1, 3, 40])
    tail = queries + rng.choice([0, 1, 5, 70])
    if rng.random() < 1 / 3:
        tail += -tail % 64
    return AttentionCase(
        "fresh",
        batch=rng.randint(1, 4),
        queries=queries,
        tail=tail,
        first_length=rng.randrange(8),
        masked=rng.random() < 0.5 and tail > queries,
        bias=rng.random() < 0.5,
    )


def harm(fault: Fault, samples: list[CaseInputs], dtype: torch.dtype) -> float:
    """Return the largest error on inputs, as a multiple of what rounding explains."""
    worst = 0.0
    for each in samples:
        try:
            error = each.measure_error(
                fault(each.query, each.layer, each.mask, each.scale), each.compute_definition()
            )
        except RuntimeError:
            return float("inf")
        share = error / self_tests.compute_tolerance(dtype, each.largest)
        worst = max(worst, share if share == share else float("inf"))
    return worst


def judge(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> tuple[str, str, str]:
    """Break the backend; return the fault, the verdict, and what is wrong ("" if nothing is)."""
    kind, when, fault = draw_fault(rng)
    target = Target(torch.device("cpu"), *rng.choice(SHAPES), rng.choice(DTYPES))
    name = f"{kind}, {when}"
    with monkeypatch.context() as broken, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fake_device.install(broken, folder)
        broken.setattr(dispatch, "BACKENDS_BY_SPEED", {"cascade": cascade, "autograd": autograd})
        broken.setattr(cascade, "attend_ragged", fault)
        samples = fresh_samples(rng, target, when)
        answers = (
            [
                attention.choose_backend(each.query, each.layer)(
                    each.query, each.layer, each.mask, each.scale
                )
                for each in samples
            ]
            if not self_tests.run_self_test("cascade", target).passed
            else None
        )
        if answers is not None:
            plain = [
                autograd.attend_ragged(each.query, each.layer, each.mask, each.scale)
                for each in samples
            ]
            same = all(ours.equal(theirs) for ours, theirs in zip(answers, plain, strict=True))
            return kind, "caught", "" if same else f"{name}: caught, and another answer"
        multiple = harm(fault, samples, target.dtype)
    assert told is not None
    if multiple <= 1:
        return kind, "harmless", ""
    return kind, "missed", f"{name} on {target}: {multiple:.1f} times what rounding explains"


def run(count: int, seed: int) -> tuple[Counter, list[str]]:
    """Judge `count` faults; return counts by fault and verdict, and the failures."""
    rng, counts, failures = random.Random(seed), Counter(), []
    monkeypatch = pytest.MonkeyPatch()
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="restorekv-kernels-") as folder:
            kind, verdict, problem = judge(rng, monkeypatch, Path(folder))
        counts[kind, verdict] += 1
        if problem:
            failures.append(f"{number}: {problem}")
    self_tests.forget_self_tests()
    return counts, failures


def harm_files(count: int, seed: int) -> tuple[Counter, list[str]]:
    """Damage self-test files; return counts of whether they are ignored or unchanged in meaning,
    and the failures.
    """
    rng, counts, failures = random.Random(seed), Counter(), []
    monkeypatch = pytest.MonkeyPatch()
    with (
        tempfile.TemporaryDirectory(prefix="restorekv-kernels-") as folder,
        monkeypatch.context() as here,
    ):
        here.setenv("RESTOREKV_CACHE", folder)
        key = {"component": "triton", "heads": 3, "kind": "cuda"}
        self_test = SelfTest("triton", False, 3, "one token", 0.5, 1e-4, "", 0.1)
        self_test_files.save_self_test(key, self_test)
        path = self_test_files.locate_self_test(key)
        good = path.read_bytes()
        for number in range(count):
            path.write_bytes(harmed(rng, good))
            try:
                found = self_test_files.load_self_test(key, SelfTest)
            except Exception as error:  # any at all is a failure
                failures.append(f"file {number}: {type(error).__name__}: {error}")
                continue
            counts["a self-test file", "refused" if found is None else "the same"] += 1
            if found not in (None, self_test):
                failures.append(f"file {number}: {found}")
    return counts, failures


def harmed(rng: random.Random, good: bytes) -> bytes:
    """Return a file with some bytes changed, cut, repeated or inserted, or with a field of another
    kind.
    """
    raw, at = bytearray(good), rng.randrange(len(good))
    how = rng.randrange(6)
    if how == 0:
        raw[at] ^= 1 << rng.randrange(8)
    elif how == 1:
        raw = raw[:at]
    elif how == 2:
        raw[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 9)))
    elif how == 3:
        raw += raw[at:]
    elif how == 4:
        raw = bytearray(good.replace(b"false", b"true"))
    else:
        record = json.loads(good)
        field = rng.choice(list(record["self_test"]))
        record["self_test"][field] = rng.choice([None, 1, "x", [], {}, -1e300, True])
        record.pop("sum")
        record["sum"] = self_test_files.digest_record(record) if rng.random() < 0.3 else "0" * 64
        if record["self_test"] != json.loads(good)["self_test"] and record["sum"] != "0" * 64:
            record["self_test"].pop(field)  # with a right checksum, an outcome of another form
            record["sum"] = self_test_files.digest_record(
                {name: each for name, each in record.items() if name != "sum"}
            )
        raw = bytearray(json.dumps(record).encode())
    return bytes(raw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    counts, failures = run(given.count, given.seed)
    of_files, more = harm_files(given.files, given.seed)
    for (kind, verdict), number in sorted((counts + of_files).items()):
        print(f"{kind:20} {verdict:10} {number}")
    totals = Counter()
    for (_, verdict), number in counts.items():
        totals[verdict] += number
    print(", ".join(f"{number} {verdict}" for verdict, number in sorted(totals.items())))
    print("\n".join(failures + more))
    sys.exit(bool(failures or more))


if __name__ == "__main__":
    main()
