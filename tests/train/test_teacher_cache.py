"""What is kept between steps and runs changes no loss, and nothing stale is read."""

import copy
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tokenizers import normalizers

from restorekv import seal
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.evictors import EVICTORS
from restorekv.evictors.base import Evictor
from restorekv.model.load import load_model
from restorekv.model.shape import CacheShape
from restorekv.train import teacher_cache as cache_module
from restorekv.train.examples import make_tiny_examples
from restorekv.train.loop import train_adapter
from restorekv.train.teacher_cache import TeacherCache, describe_teacher
from tests.helpers.models import build_model
from tests.helpers.training import CONFIG, EXAMPLES, losses

LIVE = replace(CONFIG, keep=0)


def files(store: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(store.rglob("*.safetensors"))}


@pytest.mark.parametrize(
    ("evictor", "prefills"),
    [
        ("kvzip", True),
        pytest.param("kvzip", False, marks=pytest.mark.slow),
        pytest.param("snapkv", True, marks=pytest.mark.slow),
        pytest.param("snapkv", False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_cached_equals_uncached(tiny_tokenizer, tmp_path, evictor, prefills, family):
    config = replace(LIVE, evictor=evictor, hidden_weight=0.1, attention_weight=0.1)
    train_adapter(build_model(family), tiny_tokenizer, EXAMPLES, config, tmp_path / "live")
    for run in ("filling", "filled"):
        train_adapter(
            build_model(family),
            tiny_tokenizer,
            EXAMPLES,
            config,
            tmp_path / run,
            store=tmp_path / "store",
            store_prefill=prefills,
        )
    assert losses(tmp_path / "filling") == losses(tmp_path / "filled") == losses(tmp_path / "live")
    parts = {path.name: len(list(path.iterdir())) for path in (tmp_path / "store").iterdir()}
    assert parts == {"scores": 5, "teacher": 5} | ({"prefill": 5} if prefills else {})


@dataclass(frozen=True)
class Pinning(Evictor):
    """Somebody's evictor: float64, and infinity for what it pins."""

    name: ClassVar[str] = "pinning"

    def score(self, model, tokenizer, context, full, observer=None):
        shape = CacheShape.from_model(model)
        scores = torch.arange(float(context.text_tokens), dtype=torch.float64)
        scores = scores.repeat(shape.layers, shape.heads, 1)
        scores[..., 3] = torch.inf
        scores[..., 5] = -torch.inf
        return scores


def test_scores_of_any_evictor_can_be_stored(tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(EVICTORS, "pinning", Pinning)
    config = replace(LIVE, evictor="pinning", steps=2 * len(EXAMPLES))
    train_adapter(build_model("qwen3"), tiny_tokenizer, EXAMPLES, config, tmp_path / "live")
    for run in ("filling", "filled"):
        train_adapter(
            build_model("qwen3"),
            tiny_tokenizer,
            EXAMPLES,
            config,
            tmp_path / run,
            store=tmp_path / "store",
        )
    assert losses(tmp_path / "filling") == losses(tmp_path / "filled") == losses(tmp_path / "live")


@pytest.mark.slow
def test_fifty_steps_from_the_cache_are_those_without_it(tmp_path):
    model, tokenizer = load_model("tiny")
    examples = make_tiny_examples(tokenizer, 3, 0, 100, 160)
    config = replace(LIVE, steps=50, contexts=1, restore_tokens=3, lr=4e-3, max_new_tokens=16)
    train_adapter(model, tokenizer, examples, config, tmp_path / "live")
    train_adapter(model, tokenizer, examples, config, tmp_path / "cached", store=tmp_path / "store")
    assert (
        losses(tmp_path / "cached") == losses(tmp_path / "live")
        and len(losses(tmp_path / "live")) == 50
    )


def test_the_second_run_prefills_but_neither_scores_nor_asks_the_teacher(
    tiny_tokenizer, tmp_path, monkeypatch
):
    model = build_model("llama")
    train_adapter(model, tiny_tokenizer, EXAMPLES, LIVE, tmp_path / "one", store=tmp_path / "store")
    before = files(tmp_path / "store")

    def refuse(*_: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(cache_module.Teacher, "make_targets", refuse)
    monkeypatch.setattr("restorekv.compression.eviction.Eviction.prepare", refuse)
    train_adapter(
        model,
        tiny_tokenizer,
        EXAMPLES,
        replace(LIVE, seed=1),
        tmp_path / "two",
        store=tmp_path / "store",
    )
    assert files(tmp_path / "store") == before


@pytest.mark.parametrize(
    "change", [{"model": 1}, {"evictor": "knorm"}, {"max_new_tokens": 3}, {"text": "another"}]
)
def test_nothing_stale_is_read(tiny_tokenizer, tmp_path, change):
    store = tmp_path / "store"
    TeacherCache(build_model("qwen3"), tiny_tokenizer, EXAMPLES, LIVE, store).get_context(0)
    model = build_model("qwen3", seed=change.get("model", 0))
    examples = [replace(EXAMPLES[0], context=EXAMPLES[0].context + change.get("text", ""))]
    config = replace(
        LIVE, **{key: value for key, value in change.items() if key not in ("model", "text")}
    )
    prepared, targets = TeacherCache(model, tiny_tokenizer, examples, config, store).get_context(0)
    fresh, expected = TeacherCache(model, tiny_tokenizer, examples, config).get_context(0)
    assert torch.equal(prepared.scores, fresh.scores)
    for one, other in zip(targets, expected, strict=True):
        assert torch.equal(one.ids, other.ids) and torch.equal(one.hidden, other.hidden)


@pytest.mark.parametrize("change", ["stop ids", "tokenizer", "config"])
def test_whatever_the_answers_and_scores_depend_on_is_in_the_key(tiny_tokenizer, tmp_path, change):
    first = describe_teacher(build_model("qwen3"), tiny_tokenizer)
    model, tokenizer = (
        build_model("qwen3", **({"rms_norm_eps": 0.3} if change == "config" else {})),
        tiny_tokenizer,
    )
    if change == "stop ids":
        model.generation_config.eos_token_id = [2, 7]
    elif change == "tokenizer":
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace("e", "a")
    other = describe_teacher(model, tokenizer)
    assert first != other and first == describe_teacher(build_model("qwen3"), tiny_tokenizer)


def test_answers_of_this_very_model_are_taken_as_they_are(tiny_model, tiny_tokenizer):
    own = TeacherCache(tiny_model, tiny_tokenizer, EXAMPLES, LIVE).get_context(2)[1]
    ids = tuple(tuple(target.ids[-target.answer_length :].tolist()) for target in own)
    given = replace(EXAMPLES[2], drafts=(None, None), answer_ids=ids)
    again = TeacherCache(tiny_model, tiny_tokenizer, [given], LIVE).get_context(0)[1]
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(own, again, strict=True))
    other = replace(given, answer_ids=((5, 6, 2), (7, 2)))
    assert [
        x.ids[-x.answer_length :].tolist()
        for x in TeacherCache(tiny_model, tiny_tokenizer, [other], LIVE).get_context(0)[1]
    ] == [
        [5, 6, 2],
        [7, 2],
    ]


def test_a_damaged_entry_is_named(tiny_tokenizer, tmp_path):
    model = build_model("qwen3")
    TeacherCache(model, tiny_tokenizer, EXAMPLES, LIVE, tmp_path).get_context(0)
    path = next((tmp_path / "scores").iterdir())
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(
        RestoreKVError, match=f"{path.name} is cut short .*; delete it to have it computed again"
    ):
        TeacherCache(model, tiny_tokenizer, EXAMPLES, LIVE, tmp_path).get_context(0)


@pytest.mark.parametrize("part", ["scores", "prefill", "teacher"])
def test_entries_that_cannot_be_are_refused(tiny_tokenizer, tmp_path, part):
    model = build_model("qwen3")

    def read():
        return TeacherCache(
            model, tiny_tokenizer, EXAMPLES, LIVE, tmp_path, store_prefill=True
        ).get_context(0)

    read()
    path = next((tmp_path / part).iterdir())
    raw = path.read_bytes()
    _, good = seal.read_sealed(path, cache_module.KIND)
    bad = [
        dict(list(good.items())[1:]),
        {**good, "surplus": torch.ones(1)},
    ]
    for name, value in good.items():
        bad += [
            {**good, name: change}
            for change in (value[None].clone(), value.double(), value.float() * torch.nan)
        ]
    for tensors in bad:
        seal.write_sealed(path, cache_module.KIND, tensors)
        with pytest.raises(
            RestoreKVError, match=f"{path.name} (is damaged|has numbers in .* not finite)"
        ):
            read()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(RestoreKVError, match="checksum"):
        read()


@pytest.mark.slow
def test_a_disk_that_runs_full_ends_the_writing_and_not_the_training(
    tiny_tokenizer, tmp_path, monkeypatch
):
    model, store = build_model("qwen3"), tmp_path / "store"
    train_adapter(model, tiny_tokenizer, EXAMPLES, LIVE, tmp_path / "live")
    TeacherCache(model, tiny_tokenizer, EXAMPLES, LIVE, store).get_context(0)
    before, usage, reads = files(store), shutil.disk_usage(tmp_path), []
    read = cache_module.seal.read_sealed
    monkeypatch.setattr(
        cache_module.shutil,
        "disk_usage",
        lambda path: usage._replace(free=cache_module.SPARE_BYTES),
    )
    reading = lambda path, *rest, **more: (reads.append(str(path)), read(path, *rest, **more))[1]  # noqa: E731
    monkeypatch.setattr(cache_module.seal, "read_sealed", reading)
    with pytest.warns(RestoreKVWarning) as told:
        train_adapter(model, tiny_tokenizer, EXAMPLES, LIVE, tmp_path / "full", store=store)
    assert [
        f"the {cache_module.SPARE_BYTES:,} that stay free" in str(each.message) for each in told
    ] == [True]
    assert losses(tmp_path / "full") == losses(tmp_path / "live")
    assert files(store) == before and set(reads) == before.keys()
