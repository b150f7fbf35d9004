"""A sample of every campaign; the whole is `make hostile`."""

from itertools import chain

import pytest

from tests.hostile import files, kernels, kill, models, others, threads, uploads


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_harmed_cache_files(seed):
    counts, failures = files.run(40, seed)
    assert not failures
    assert counts["contradicting", "refused"] > 12 and counts["raw", "refused"] > 3


def test_threads_on_one_model(tmp_path):
    counts, wrong = threads.run(4, 4, 1, tmp_path)
    assert not wrong
    assert sum(counts.values()) > 4


def test_harmed_adapters_gates_checkpoints_stores_data_and_grids():
    counts, failures = others.run(80, 1)
    assert not failures
    assert len({kind for kind, _, _ in counts}) == len(others.KINDS)
    assert sum(number for (_, _, verdict), number in counts.items() if verdict == "refused") > 30


@pytest.mark.filterwarnings("ignore")
def test_random_configs_of_decoders():
    counts, failures = models.run(6, 2)
    assert not failures
    assert sum(counts.values()) == 6 and counts["not built"] < 3


@pytest.mark.slow
def test_uploads(tmp_path):
    counts, failures = uploads.run(
        tmp_path, lambda: chain(uploads.texts(), uploads.caches(tmp_path, 10, 1))
    )
    assert not failures
    assert counts["a cache", "processed"] == 1 and sum(counts.values()) > 40


def test_sudden_death():
    counts, failures = kill.run(["save"], 2, 1, disks=1)
    assert not failures
    assert counts["save", "moment", "right"] == 2


def test_broken_kernels():
    counts, failures = kernels.run(10, 3)
    assert not failures
    assert sum(number for (_, verdict), number in counts.items() if verdict == "caught") > 3
    _, failures = kernels.harm_files(200, 1)
    assert not failures
