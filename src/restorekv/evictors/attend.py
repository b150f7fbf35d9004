"""Causal attention weights in blocks of rows, for scorers that reduce them: a whole Q x K matrix
never exists.

On a device that is not a CPU, code that computes them answers only after it has passed its
self-test there (self_tests.py).
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from restorekv.cache.tail import KeysValues
from restorekv.evictors import pass_self_test
from restorekv.model.attention import blocked, reference, self_tests
from restorekv.model.attention.caps import cap_logits
from restorekv.model.attention.sinks import compute_weights

try:
    from restorekv.evictors import triton_maxima
except ImportError:  # an extra: pip install 'restorekv[triton]'
    triton_maxima = None

BLOCK = 1 << 22  # weights in a block
REDUCTIONS = ("max", "mean")


def iterate_attention_blocks(
    query: Tensor,
    key: Tensor,
    scale: float,
    block: int = BLOCK,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (low, high, weights) for blocks of the rows of query (H, G, Q, D) over key (H, K, D),
    whose last Q columns are the queries' own.

    weights (H, G, high - low, K - Q + high) float32 are the softmax of the rows [low, high) over
    every key that any of them sees. Logits are multiplied by the model's `scale` and then capped by
    its `cap`, if it has one; `sinks` (H, G) are its learned sinks or None. Rows are independent, so
    one pass over the blocks is exact.
    """
    heads, groups, rows, _ = query.shape
    before = key.shape[1] - rows
    # Dividing by sqrt(D) and multiplying by its inverse differ in the last bit; figures were made
    # with the first.
    divisor = 1 / scale
    key = key.float()
    # Rows per block, so that a block of all heads and columns has about `block` weights.
    step = max(block // (heads * groups * key.shape[1]), 1)
    for low in range(0, rows, step):
        high = min(low + step, rows)
        part = query[:, :, low:high].float().flatten(1, 2)  # (H, G * rows, D)
        # Keys beyond the block's last row are seen by none of its rows.
        logits = part @ key[:, : before + high].transpose(1, 2) / divisor
        logits = cap_logits(logits, cap).unflatten(1, (groups, -1))
        # Causal among the block's own columns; it sees all earlier ones.
        later = torch.ones(high - low, high - low, dtype=torch.bool, device=logits.device).triu(1)
        logits[..., before + low :].masked_fill_(later, float("-inf"))
        yield low, high, compute_weights(logits, sinks)


def can_use_kernels(query: Tensor, sinks: Tensor | None = None, cap: float | None = None) -> bool:
    """Return whether triton_maxima.py is installed, can take this query (H, G, Q, D) and has
    passed its self-test on the query's device.

    Otherwise `attend_pass` is used. The kernels have no learned sinks and no cap.
    """
    if sinks is not None or cap is not None:
        return False
    if triton_maxima is None or not triton_maxima.supports_query(query):
        return False
    return self_tests.passed_self_test("maxima", *self_tests.get_self_test_key(query))


def attend_pass(
    query: Tensor,
    own: KeysValues,
    cached: Callable[[int], KeysValues],
    scale: float,
    inside: Sequence[slice],
    on_weights: blocked.OnWeights,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return the attention of a pass, (Q, H * G, D), and show its weights to `on_weights`.

    Args:
        query: (H, G, Q, D).
        own: Keys and values (H, Q, D) of the pass itself, which are seen causally.
        cached: Returns the cached keys and values (K, D) of a head.
        scale: The factor of the logits.
        inside: The cached columns that share a softmax with the pass's own.
        on_weights: Gets the weights of that softmax in blocks; see blocked.py.
        sinks: (H, G), logits that the model adds to every softmax, or None.
        cap: The model's cap on the logits, or None.
    """
    # On a CPU the operations are known. On another device the blocked ones have to pass their
    # self-test first, and those of reference.py are used where they fail it.
    is_trusted = not self_tests.needs_self_test(query.device) or self_tests.passed_self_test(
        "blocked", *self_tests.get_self_test_key(query)
    )
    attend = blocked.attend_pass if is_trusted else reference.attend_pass
    return attend(query, own, cached, scale, inside, on_weights, sinks, cap)


def reduce_groups(values: Tensor, reduction: str) -> Tensor:
    """Reduce (H, G, ...) to (H, ...) by the "max" or "mean" over the query heads that share a KV
    head.
    """
    if reduction == "max":
        return values.amax(1)
    return values.mean(1)


# Registered when this module is imported, so that whoever asks for the self-test finds it.
pass_self_test.register_scoring(triton_maxima)
