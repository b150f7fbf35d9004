"""exact_top against sorting: the count is exact and ties go to the lower index."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from restorekv.allocate import exact_top
from restorekv.errors import RestoreKVError

# A few values only, so that most cases tie; pinned and hopeless pairs among them.
VALUES = st.sampled_from([0.0, -0.0, 0.25, 0.5, 1.0, float("inf"), float("-inf"), 1e-30])


@settings(deadline=None, max_examples=200)
@given(
    data=st.data(), shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 12)), fraction=st.floats(0, 1)
)
def test_the_best_and_of_equals_the_first(data, shape, fraction):
    count = shape[0] * shape[1] * shape[2]
    values = data.draw(st.lists(VALUES, min_size=count, max_size=count))
    pairs = round(fraction * count)
    keep = exact_top(torch.tensor(values).view(shape), pairs)
    order = sorted(range(count), key=lambda index: (-values[index], index))
    assert keep.shape == shape and keep.dtype == torch.bool
    assert keep.flatten().nonzero().flatten().tolist() == sorted(order[:pairs])


def test_float32_neighbours_are_told_apart():
    scores = torch.rand(4, 4, 1000, generator=torch.Generator().manual_seed(0))
    keep = exact_top(scores, 777)
    assert keep.sum() == 777 and scores[keep].min() >= scores[~keep].max()


def test_impossible_counts_and_scores_are_refused():
    with pytest.raises(ValueError):
        exact_top(torch.zeros(1, 1, 4), 5)
    with pytest.raises(ValueError):
        exact_top(torch.zeros(1, 1, 4), -1)
    with pytest.raises(RestoreKVError, match="NaN"):
        exact_top(torch.tensor([[[0.0, float("nan")]]]), 1)
