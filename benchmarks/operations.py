"""The number of operations that a compression needs: a lower bound of its time on a machine that
runs matrix products at full speed.

Counted are multiplications and additions of the matrix products of a decoder with L layers, width
d, F columns of the MLP, H KV heads, G query heads each and head dim D. R rows that each read P
pairs cost

    2 L R (d H G D + 2 d H D + H G D d + 3 d F)    linear layers
    4 L R P H G D                                  attention: queries by keys, weights by values

A prefill of T tokens reads (T + 1) / 2 pairs a row on average. KVzip repeats every chunk, and its Q
rows (instruction included) read the whole cache and themselves: T + (Q + 1) / 2 pairs a row.
Scoring can reuse none of the prefill's products, because its rows are different.
"""

from collections.abc import Mapping

from restorekv.evictors.kvzip import FIRST_PROMPT, HINT_LENGTH, LATER_PROMPT, KVzip


def count_pass(shape: Mapping[str, int], rows: int, pairs: float) -> float:
    """Return the operations of a pass of `rows` rows, which read `pairs` pairs each on average.

    `shape` has the fields of `workload.SHAPE`.
    """
    width = shape["hidden_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    linear = 2 * width * (queries + keys) + 3 * width * shape["intermediate_size"]
    return 2 * shape["num_hidden_layers"] * rows * (linear + 2 * pairs * queries)


def count_prefill(shape: Mapping[str, int], tokens: int) -> float:
    return count_pass(shape, tokens, (tokens + 1) / 2)


def count_kvzip(shape: Mapping[str, int], tokens: int, chunk: int = KVzip.chunk) -> float:
    """Return the operations of all of KVzip's passes.

    A character of the instruction counts as a token, as with the benchmark's tokenizer.
    """
    total = 0.0
    for start in range(0, tokens, chunk):
        rows = min(chunk, tokens - start) + (
            len(LATER_PROMPT) + HINT_LENGTH if start else len(FIRST_PROMPT)
        )
        total += count_pass(shape, rows, tokens + (rows + 1) / 2)
    return total
