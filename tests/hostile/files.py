"""The campaign against cache files: `python -m tests.hostile.files --count 10000 --seed 0`.

Every case is one damaged file, which a separate process loads, asks and inspects. A signal, a hang,
an exception other than a sentence for the user, or accepting wrong contents is a failure, and is
printed with its number.
"""

import contextlib
import io
import json
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.helpers.compressing import compress_with
from tests.hostile.campaign import finish, read_options
from tests.hostile.damage import CONTRADICTING, NEUTRAL, PLAUSIBLE, RAN, RAW, File, evil_model
from tests.hostile.judge import Judge, bound_memory

GROUPS = {"raw": RAW, "contradicting": CONTRADICTING, "plausible": PLAUSIBLE, "neutral": NEUTRAL}
ALLOWED = {
    "raw": {"refused", "equal"},
    "contradicting": {"refused", "equal"},
    "plausible": {"refused", "equal", "different"},
    "neutral": {"equal"},
}
TEXT = "The red house belongs to Ada. The code of the blue house is 482. " * 12
SPARE = 2 << 30  # bytes of address space beyond what is in use


def case(seed: int, number: int, good: list[bytes]) -> tuple[str, str, bytes]:
    """Return the group, way and bytes of a case, which its number determines."""
    rng = random.Random(f"{seed}/{number}")
    group = rng.choices(list(GROUPS), (3, 5, 1, 1))[0]
    way = rng.choice(GROUPS[group])
    return group, way.__name__, way(rng, File.of(rng.choice(good)))


def made(folder: Path) -> list[bytes]:
    """Make good files with every kind of contents that the format has, and return their bytes."""
    from restorekv import load_model

    model, tokenizer = load_model("tiny")
    kinds = (
        {},
        {"adapter": None, "evictor": "snapkv"},
        {"kv_dtype": "int8"},
        {"allocation": "per-head"},
        {"adapter": None, "evictor": "am-fast"},
        {"prefix_policy": "counted", "evictor": "h2o"},
    )
    found = []
    for number, options in enumerate(kinds):
        path = folder / f"good{number}.rkv"
        compress_with(model, tokenizer, TEXT, ratio=0.2, **options).save(path)
        found.append(path.read_bytes())
    return found


def serve(connection, place: str) -> None:
    """Judge files until there are no more.

    A folder in `place` asks for its code to be run, and standard input would always agree.
    """
    import torch

    from restorekv import CompressedContext, RestoreKVError, load_model
    from restorekv.cli import execute

    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    os.chdir(place)
    sys.stdin = io.StringIO("y\n" * 1_000_000)
    model, tokenizer = load_model("tiny")
    bound_memory(SPARE)
    known = set()
    while message := connection.recv():
        path, good = message
        try:
            loaded = CompressedContext.load(path, model, tokenizer)
            loaded.ask("Who owns the red house?", 2)
            loaded.ask("Who owns the red house?", 2, temperature=1.0, logprobs=2)
            loaded.generate("Who owns it?", max_new_tokens=1)
            with contextlib.suppress(RestoreKVError):  # what made it may be unable to go on
                loaded.append("The green house belongs to Bo. " * 12)
            known = known or {
                contents(CompressedContext.load(each, model, tokenizer)) for each in good
            }
            verdict = "equal" if contents(loaded) in known else "different"
        except RestoreKVError as error:
            verdict = (
                "refused"
                if str(error).strip() and "\n" not in str(error)
                else f"not a sentence: {error!r}"
            )
        except BaseException as error:
            verdict = f"{type(error).__name__}: {str(error)[:200]}"
        try:  # it knows no model, so it may show what only a model contradicts
            code = execute(["inspect", str(path)])
            verdict = verdict if code in (0, 1) else f"inspect ended with {code}"
        except BaseException as error:
            verdict = f"inspect: {type(error).__name__}: {str(error)[:200]}"
        if os.path.exists(RAN):
            verdict = "a stranger's code ran"
            os.remove(RAN)
        connection.send(verdict)


def contents(loaded) -> str:
    """Return everything that decides an answer, as text that can be compared."""
    import hashlib

    digest = hashlib.sha256(
        json.dumps([loaded.context.suffix_text, loaded.context.separator]).encode()
    )
    for tensor in (
        loaded.context.ids,
        loaded.context.suffix_ids,
        *(x for y in loaded.cache.layers for x in y.list_tensors()),
    ):
        digest.update(
            repr((tensor.dtype, tuple(tensor.shape))).encode()
            + tensor.contiguous().view(-1).numpy(force=True).tobytes()
        )
    return digest.hexdigest()


def run(count: int, seed: int, only: int | None = None) -> tuple[Counter, list[str]]:
    """Run the cases; return counts by group and verdict, and the failures."""
    from restorekv.model.names import tiny_path

    counts, failures = Counter(), []
    with tempfile.TemporaryDirectory(prefix="restorekv-hostile-") as name:
        folder = Path(name)
        good = made(folder)
        evil_model(folder, tiny_path("model"))
        os.mkfifo(folder / "fifo")
        judge = Judge("spawn", serve, name)
        paths = sorted(str(path) for path in folder.glob("good*.rkv"))
        for number in range(count) if only is None else (only,):
            group, way, raw = case(seed, number, good)
            path = folder / "case.rkv"
            path.write_bytes(raw)
            try:
                verdict = judge(str(path), paths)
            except KeyboardInterrupt:  # what was counted so far is told
                print(f"interrupted before case {number}", flush=True)
                break
            counts[
                group, verdict if verdict in ("refused", "equal", "different") else "FAILED"
            ] += 1
            if verdict not in ALLOWED[group]:
                failures.append(f"case {number} ({group}, {way}): {verdict}")
                print(failures[-1], flush=True)
            if number % 1000 == 999:
                print(f"{number + 1} of {count}, {len(failures)} failures", flush=True)
        judge.end()
    return counts, failures


def main() -> None:
    options = read_options(__doc__, 10_000)
    finish(*run(options.count, options.seed, options.case))


if __name__ == "__main__":
    main()
