"""Attention Matching (arXiv:2602.16284) for one layer: what the compact pairs must reproduce, and
the two fits.

With the reference queries q_i, i < n, and the article's keys and values k_j, v_j, j < T, of one KV
head,

    l_ij = f(q_i k_j * scale)  m_i = max_j l_ij     A_ij = softmax_j(l_ij)
    y_i = sum_j exp(l_ij - m_i)     Y_i = sum_j A_ij v_j     score_j = sqrt(mean_i A_ij^2)

are the mass y, the output Y and the score of the full cache. f(l) = l, or the capped logit in a
model with a cap (attention/caps.py). For kept keys c_1 ... c_t, which stay as they are,

    bias    min_B |M B - y|^2,  M_is = exp(f(q_i c_s * scale) - m_i),  bias = log B,
            e^-box <= B_s <= e^box
    values  min_C |X C - Y|^2,  X = softmax_s(f(q_i c_s * scale) + bias_s)

Everything is float32 of model-dtype queries and keys. On the tiny model double precision changes
neither fit (condition numbers up to 2e4), so it is left to the fallback.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from restorekv.evictors.attend import BLOCK
from restorekv.model.attention.caps import cap_logits
from restorekv.size_limits import LARGEST_NUMBER

POWER_STEPS = 3
RIDGE = 1e-6


@dataclass(frozen=True)
class Targets:
    """One layer's n reference queries a KV head and what they get from the full article.

    query (H, n, D) in the model's dtype; highest m and mass y (H, n), output Y (H, n, D), float32.
    """

    query: Tensor
    highest: Tensor
    mass: Tensor
    output: Tensor
    scale: float
    cap: float | None = None


def observe_layer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    block: int = BLOCK,
    cap: float | None = None,
) -> tuple[Targets, Tensor]:
    """Return targets and scores (H, T) of query (H, n, D), key and value (H, T, D), `block` logits
    at a time.
    """
    heads, count, _ = query.shape
    keys = key.float()
    values = value.float()
    # The peak of every row, which is subtracted before exp, and the sum of exp over all columns.
    highest, mass = (
        torch.empty(heads, count, dtype=torch.float32, device=key.device) for _ in range(2)
    )
    output = torch.empty(query.shape, dtype=torch.float32, device=key.device)
    squares = torch.zeros(key.shape[:2], dtype=torch.float32, device=key.device)
    # As many rows at once as keep a block of logits at the size of a scoring block.
    step = max(block // (heads * key.shape[1]), 1)
    for rows in (slice(low, low + step) for low in range(0, count, step)):
        logits = cap_logits(query[:, rows].float() @ keys.transpose(1, 2) * scale, cap)
        highest[:, rows] = logits.amax(-1)
        raised = (logits - highest[:, rows, None]).exp()
        mass[:, rows] = raised.sum(-1)
        # Rows of A, whose squares are summed over all reference queries.
        weights = raised / mass[:, rows, None]
        output[:, rows] = weights @ values
        squares += weights.square().sum(1)
    return Targets(query, highest, mass, output, scale, cap), (squares / count).sqrt()


def fit_head(
    targets: Targets, head: int, key: Tensor, steps: int, box: float
) -> tuple[Tensor, Tensor]:
    """Return bias (t,) and values (t, D) for kept keys (t, D) of one head, both in the keys'
    dtype.

    The values are fitted to the bias as it is stored, so rounding the bias costs them nothing.
    """
    # Only the kept columns of the full matrix, with the full matrix's own peak: M of the
    # definition.
    logits = targets.query[head].float() @ key.float().T * targets.scale
    logits = cap_logits(logits, targets.cap)
    raised = (logits - targets.highest[head, :, None]).exp()
    bias = solve_in_box(raised, targets.mass[head], steps, box).log().to(key.dtype)
    # The bias as it is stored: rounding it costs the fitted values nothing.
    weights = (logits + bias.float()).softmax(-1)
    output = targets.output[head]
    values = solve_least_squares(weights, output)
    # Where all queries attend almost alike, X has almost not full rank, and numbers of C may be
    # larger than those of a cache file.
    if values.abs().amax() > LARGEST_NUMBER:
        values = _solve_ridge(weights, output)
    return bias, values.to(key.dtype)


def solve_in_box(matrix: Tensor, target: Tensor, steps: int, box: float) -> Tensor:
    """Return B (t,), about the minimum of |M B - y| with e^-box <= B <= e^box, for M (n, t) and y
    (n,).

    The unconstrained solution is clamped, then improved by projected gradient steps of length 1 /
    sigma_max(M)^2. M is positive, so the power iteration for sigma_max may start from ones.
    """
    low, high = (matrix.new_tensor(bound).exp() for bound in (-box, box))
    factors = solve_least_squares(matrix, target[:, None])[:, 0].clamp(low, high)
    # Power iteration: the vector turns toward the largest singular direction of M.
    vector = torch.ones_like(factors)
    for _ in range(POWER_STEPS):
        vector = matrix.T @ (matrix @ vector)
        vector = vector / vector.norm()
    # 1 / sigma_max^2, the longest step for which a gradient step cannot overshoot.
    step = 1 / (matrix @ vector).square().sum()
    for _ in range(steps):
        # M^T (M B - y) is half the gradient of |M B - y|^2; clamping projects onto the box.
        factors = (factors - step * (matrix.T @ (matrix @ factors - target))).clamp(low, high)
    return factors


def solve_least_squares(matrix: Tensor, target: Tensor) -> Tensor:
    """Return the C (t, d) of min |X C - Y|, X (n, t), Y (n, d), by QR; by `ridge` where X has not
    full rank.
    """
    try:
        # "gels" assumes full rank and may return anything without it.
        solution = torch.linalg.lstsq(matrix, target, driver="gels").solution
    # A GPU returns NaN instead. PyTorch documents the name, but imports it from a private module.
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        return _solve_ridge(matrix, target)
    if solution.isfinite().all():
        return solution
    return _solve_ridge(matrix, target)


def _solve_ridge(matrix: Tensor, target: Tensor) -> Tensor:
    """Return (X^T X + RIDGE)^-1 X^T Y, or the same by X X^T where that is smaller; RIDGE is lost
    below float64.
    """
    exact = matrix.double()
    wanted = target.double()
    wide = len(exact) < exact.shape[1]
    # The smaller of X^T X (t, t) and X X^T (n, n), both of which give the same solution:
    # (X^T X + r)^-1 X^T = X^T (X X^T + r)^-1.
    if wide:
        factor = _factorize(exact @ exact.T)
        return (exact.T @ torch.cholesky_solve(wanted, factor)).to(matrix.dtype)
    factor = _factorize(exact.T @ exact)
    return torch.cholesky_solve(exact.T @ wanted, factor).to(matrix.dtype)


def _factorize(gram: Tensor) -> Tensor:
    """Return Cholesky's factor of gram + RIDGE, in place; RIDGE > 0 makes it positive definite."""
    gram.diagonal().add_(RIDGE)
    return torch.linalg.cholesky(gram)
