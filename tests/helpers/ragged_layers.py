"""Ragged layers of every shape, and the reference for attention over them."""

import torch
from hypothesis import strategies as st

from restorekv.cache.ragged import RaggedLayer
from restorekv.model.attention import reference

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@st.composite
def cases(draw):
    queries = draw(st.sampled_from([1, 1, 2, 7]))
    return {
        "seed": draw(st.integers(0, 2**20)),
        "dtype": draw(st.sampled_from(list(TOLERANCE))),
        "lengths": draw(
            st.lists(st.sampled_from([0, 1, 2, 5, 31, 64, 90]), min_size=1, max_size=4)
        ),
        "groups": draw(st.integers(1, 8)),
        "dim": draw(st.sampled_from([32, 64, 80, 128, 256])),
        "batch": draw(st.integers(1, 3)),
        "queries": queries,
        "tail": queries + draw(st.integers(0, 5)),
        "bias": draw(st.booleans()),
        "mask": draw(st.sampled_from(["none", "one", "each"])),
        "threads": draw(st.sampled_from([1, 2, 5])),
        "room": draw(st.integers(0, 3)),
    }


def build(case):
    """Return a layer with a tail that is the beginning of a larger buffer, a query and a mask."""
    generator = torch.Generator().manual_seed(case["seed"])

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case["dtype"])

    heads, dim, batch, tail = len(case["lengths"]), case["dim"], case["batch"], case["tail"]
    offsets = torch.tensor([0, *case["lengths"]]).cumsum(0).int()
    kept = int(offsets[-1])
    bias = (
        draw(kept).to(torch.promote_types(case["dtype"], torch.float32)) if case["bias"] else None
    )
    nothing = draw(1, heads, 0, dim)
    context = draw(kept, dim), draw(kept, dim)
    layer = RaggedLayer(
        *context, offsets, torch.zeros(kept, dtype=torch.int32), 99, nothing, nothing, bias
    )
    layer.keys, layer.values = (
        draw(batch, heads, tail + case["room"], dim)[:, :, :tail] for _ in range(2)
    )
    mask, queries = None, case["queries"]
    if case["mask"] != "none":
        mask = reference.make_causal_mask(queries, tail, offsets.device).expand(
            1 if case["mask"] == "one" else batch, 1, -1, -1
        )
        mask = mask.clone()
        # A column that no query needs, unless it is all that the first one sees.
        mask[0, :, :, 0] = tail == queries
    return draw(batch, heads, case["groups"], queries, dim) * 2, layer, mask


def defined(query, layer, mask):
    """Return attention by its definition in float64; gradients pass through it."""
    exact = RaggedLayer(
        layer.context_keys.double(),
        layer.context_values.double(),
        layer.offsets,
        layer.positions,
        99,
        layer.restore_keys.double(),
        layer.restore_values.double(),
        layer.bias,
    )
    exact.keys, exact.values = layer.keys.double(), layer.values.double()
    every = None if mask is None else mask.expand(len(query), -1, -1, -1)
    return reference.attend_ragged(query.double(), exact, every, query.shape[-1] ** -0.5)
