"""The progress of a compression: phases in order, a growing share, and only for the own thread."""

import threading

import pytest

from restorekv import compress
from restorekv.evictors import EVICTORS
from restorekv.model.prefill import prefill
from restorekv.model.shape import get_backbone
from tests.helpers.compressing import TEXT, compress_with, make_adapter
from tests.helpers.models import build_model

LONG = TEXT * 8
# Those that read the context again, and two that do not.
READ = ["kvzip", "kvzip+", "contrastkv", "snapkv", "knorm"]


@pytest.mark.parametrize("evictor", READ)
def test_share_grows_with_what_is_read(evictor, tiny_tokenizer):
    model = build_model("qwen3")
    told = []
    compress(
        model,
        tiny_tokenizer,
        LONG,
        ratio=0.4,
        evictor=evictor,
        adapter=make_adapter(model),
        progress=lambda phase, share: told.append((phase, share)),
    )
    phases = list(dict.fromkeys(phase for phase, _ in told))
    shares = [share for _, share in told]
    assert phases == ["prefill", "score", "restore", "evict"]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] < 1
    # Every layer's pass is seen, and at the end nearly all was read that was expected.
    layers = len(get_backbone(model).layers)
    assert len(set(shares)) > layers * EVICTORS[evictor].rereads
    assert shares[-1] >= 0.9
    end_of_prefill = max(share for phase, share in told if phase == "prefill")
    assert end_of_prefill == pytest.approx(1 / (1 + EVICTORS[evictor].rereads), abs=0.02)


def test_parts_of_a_stream_are_told(tiny_tokenizer):
    told = []
    compress_with(
        build_model("qwen3"),
        tiny_tokenizer,
        LONG,
        ratio=0.4,
        evictor="kvzip",
        adapter=None,
        streaming_chunk=128,
        progress=lambda phase, share: told.append((phase, share)),
    )
    phases = list(dict.fromkeys(phase for phase, _ in told))
    shares = [share for _, share in told]
    assert phases[0].startswith("part 1 of ") and len(phases) > 1
    assert shares == sorted(shares) and shares[-1] >= 0.9


def test_passes_of_other_threads_do_not_count(tiny_tokenizer):
    model = build_model("qwen3")
    told = []

    def tell(phase: str, share: float) -> None:
        told.append(share)
        if len(told) == 2:
            ids = tiny_tokenizer(LONG, return_tensors="pt").input_ids
            other = threading.Thread(target=prefill, args=(model, ids))
            other.start()
            other.join()

    options = {"ratio": 0.4, "evictor": "knorm", "adapter": None}
    compress(model, tiny_tokenizer, LONG, progress=tell, **options)
    alone = []
    compress(model, tiny_tokenizer, LONG, progress=lambda _, share: alone.append(share), **options)
    assert told == alone


def test_nothing_stays_on_the_model(tiny_tokenizer):
    model = build_model("qwen3")

    def fail(phase: str, share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(model, tiny_tokenizer, TEXT, ratio=0.4, adapter=None, progress=fail)
    assert not any(layer._forward_hooks for layer in get_backbone(model).layers)
