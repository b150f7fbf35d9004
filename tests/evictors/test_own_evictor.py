"""An evictor that somebody writes: what it returns is checked where it is returned."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from restorekv.compression.eviction import Eviction
from restorekv.errors import RestoreKVError
from restorekv.evictors import EVICTORS, Evictor
from restorekv.model.prompt import make_context
from restorekv.pipeline import compress
from tests.helpers.decoding import TEXT


@dataclass(frozen=True)
class Own(Evictor):
    """Returns what the test gives it, after it did what the test asks."""

    name: ClassVar[str] = "own"
    result: Any = None
    harm: Any = None

    def score(self, model, tokenizer, context, full, observer=None):
        if self.harm:
            self.harm(full)
        layers, heads = len(full.layers), full.layers[0].keys.shape[1]
        return self.result(layers, heads, context)


def right(layers, heads, context):
    return torch.rand(layers, heads, context.text_tokens)


WRONG = {
    "with the prefix": lambda layers, heads, c: torch.rand(
        layers, heads, c.prefix_length + c.text_tokens
    ),
    "too short": lambda layers, heads, c: torch.rand(layers, heads, c.text_tokens - 3),
    "transposed": lambda layers, heads, c: torch.rand(heads + 1, layers, c.text_tokens),
    "with a batch": lambda layers, heads, c: torch.rand(layers, 1, heads, c.text_tokens),
    "whole numbers": lambda layers, heads, c: torch.arange(c.text_tokens).expand(layers, heads, -1),
    "nothing": lambda layers, heads, c: None,
    "a list": lambda layers, heads, c: torch.rand(layers, heads, c.text_tokens).tolist(),
}


def prepare(model, tokenizer, evictor):
    return Eviction(evictor).prepare(model, tokenizer, make_context(tokenizer, TEXT))


@pytest.mark.parametrize("fault", WRONG)
def test_scores_of_another_form_are_refused(tiny_model, tiny_tokenizer, fault):
    with pytest.raises(RestoreKVError, match=r"The evictor own returned .*\(L, H, T\) = ") as error:
        prepare(tiny_model, tiny_tokenizer, Own(WRONG[fault]))
    assert "\n" not in str(error.value)


def test_scores_that_are_no_numbers_are_said_to_be_the_evictors(tiny_model, tiny_tokenizer):
    def half(layers, heads, context):
        scores = right(layers, heads, context)
        scores[0, 0, :3] = torch.nan
        return scores

    with pytest.raises(RestoreKVError, match=r"^3 of [\d,]+ scores of the evictor own are not"):
        prepare(tiny_model, tiny_tokenizer, Own(half))


@pytest.mark.parametrize("part", ["keys", "values"])
def test_an_evictor_that_changes_the_full_cache_is_refused(tiny_model, tiny_tokenizer, part):
    """Everything else reads it again: the full cache's own answers would be wrong."""
    harm = lambda full: getattr(full.layers[0], part).mul_(2)  # noqa: E731
    with pytest.raises(RestoreKVError, match="own wrote into the full cache"):
        prepare(tiny_model, tiny_tokenizer, Own(right, harm))


def test_right_scores_are_taken(tiny_model, tiny_tokenizer):
    prepared = prepare(tiny_model, tiny_tokenizer, Own(right))
    assert prepared.evict(0.5).pairs_held


@dataclass(frozen=True)
class Ready(Own):
    name: ClassVar[str] = "ready"

    def score(self, model, tokenizer, context, full, observer=None):
        return right(len(full.layers), full.layers[0].keys.shape[1], context)


@pytest.mark.parametrize("given", [Ready, Ready()])
def test_an_evictor_itself_is_told_to_be_registered(tiny_model, tiny_tokenizer, given, monkeypatch):
    said = (
        r"^The evictor is named by its spec, which cache files record, not by Ready itself; "
        r"register your own with restorekv\.evictors\.EVICTORS\['ready'\] = Ready, or as an entry "
        r"point of restorekv\.evictors, and pass its spec, such as 'ready'\.$"
    )
    with pytest.raises(RestoreKVError, match=said):
        compress(tiny_model, tiny_tokenizer, TEXT, evictor=given)
    # What the sentence says works.
    monkeypatch.setitem(EVICTORS, "ready", Ready)
    small = compress(tiny_model, tiny_tokenizer, TEXT, evictor="ready", adapter=None, ratio=0.5)
    assert small.manifest.evictor.startswith("ready")


def test_infinity_pins(tiny_model, tiny_tokenizer):
    def pinned(layers, heads, context):
        scores = right(layers, heads, context)
        scores[..., [5, 9]] = torch.inf
        return scores

    context = make_context(tiny_tokenizer, TEXT)
    cache = prepare(tiny_model, tiny_tokenizer, Own(pinned)).evict(0.1)
    held = cache.mark_held(context.num_tokens)[..., context.prefix_length :]
    assert held[..., [5, 9]].all() and not held.all()
