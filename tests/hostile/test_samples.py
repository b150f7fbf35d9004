"""A sample of every campaign; the whole is `make hostile`."""

import pytest

from tests.hostile import files


@pytest.mark.parametrize(("key", "seed"), [(None, 1), (files.KEY, 2)])
def test_harmed_cache_files(key, seed):
    counts, failures = files.run(60, seed, key=key)
    assert not failures
    assert counts["contradicting", "refused"] > 20 and counts["raw", "refused"] > 5
