"""A sample of every campaign; the whole is `make hostile`."""

import pytest

from tests.hostile import files, threads


@pytest.mark.parametrize(("key", "seed"), [(None, 1), (files.KEY, 2)])
def test_harmed_cache_files(key, seed):
    counts, failures = files.run(60, seed, key=key)
    assert not failures
    assert counts["contradicting", "refused"] > 20 and counts["raw", "refused"] > 5


def test_threads_on_one_model(tmp_path):
    counts, wrong = threads.run(4, 4, 1, tmp_path)
    assert not wrong
    assert sum(counts.values()) > 4
