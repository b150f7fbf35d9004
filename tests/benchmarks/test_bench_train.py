"""The training benchmark on a tiny shape: every phase of every variant is measured, and a store
spares what it says.
"""

import gc

import pytest
import torch

from benchmarks.training import PHASES, VARIANTS, Options, format_table, run_training
from restorekv.errors import RestoreKVError
from restorekv.model.attention import dispatch

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 320,
}


@pytest.fixture
def young_heap():
    """What is imported already is left out of the collections before every phase, which else take
    most of the time.
    """
    gc.freeze()
    yield
    gc.unfreeze()


def test_every_phase_of_every_variant_is_measured(young_heap):
    heard, bound = [], dispatch.MAX_COPY_BYTES
    result = run_training(
        Options(tokens=300, questions=2, answer=5, shape=TINY, threads=torch.get_num_threads()),
        heard.append,
    )
    assert [row["variant"] for row in result["rows"]] == list(VARIANTS)
    assert bound == dispatch.MAX_COPY_BYTES
    for row in result["rows"]:
        assert set(row["seconds"]) == set(PHASES)
        assert row["step"] == pytest.approx(sum(row["seconds"].values()))
        assert row["peak"] is None or row["peak"] == max(row["peaks"].values())
        assert f"| {row['variant']} |" in format_table(result)
    rows = {row["variant"]: row for row in result["rows"]}
    assert min(rows["copied"]["seconds"]["score"], rows["anew"]["seconds"]["score"]) > 0
    assert (
        rows["scores stored"]["seconds"]["score"] == rows["prefill stored"]["seconds"]["score"] == 0
    )
    assert rows["anew"]["stored"] == 0 < rows["scores stored"]["stored"]
    # Layers, keys and values, heads, tokens, dim, bytes of bfloat16.
    full = 2 * 2 * 2 * 300 * 16 * 2
    assert rows["prefill stored"]["stored"] - rows["scores stored"]["stored"] > full
    assert heard[0] == "making the model" and len(heard) == 1 + len(VARIANTS)


@pytest.mark.parametrize(
    "bad", [{"tokens": 3}, {"ratio": 0.0}, {"questions": 0}, {"answer": 0}, {"threads": -1}]
)
def test_wrong_options_are_refused(bad):
    with pytest.raises(RestoreKVError):
        Options(**bad)
