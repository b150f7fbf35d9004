"""The scorer benchmark on a tiny shape: every method is measured, and what it tells adds up."""

import pytest
import torch

from benchmarks.scorers import Options, format_table, run_scorers
from restorekv.errors import RestoreKVError
from restorekv.evictors import EVICTORS
from tests.helpers.shapes import TINY


@pytest.mark.slow
def test_every_method_is_measured():
    heard = []
    result = run_scorers(
        Options(tokens=96, shape=TINY, threads=torch.get_num_threads()), heard.append
    )
    assert {row["method"] for row in result["rows"]} == {*EVICTORS, "am-fast"} - {"kvpress"}
    for row in result["rows"]:
        added = row["own_prefill"] + row["score"] - row["prefill"]
        assert row["multiple"] == pytest.approx(added / row["prefill"])
        assert f"| {row['method']} |" in format_table(result)
    assert heard[0] == "making the model" and len(heard) == 1 + len(result["rows"])
    assert result["model"]["hidden_size"] == 32 and result["tokens"] == 96


@pytest.mark.parametrize(
    "bad", [{"methods": ("best",)}, {"tokens": 3}, {"ratio": 0.0}, {"threads": -1}]
)
def test_wrong_options_are_refused(bad):
    with pytest.raises(RestoreKVError):
        Options(**bad)
