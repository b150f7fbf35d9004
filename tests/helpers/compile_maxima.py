"""Compile the kernels of triton_maxima.py for sm_80 and sm_90 without a GPU, and print what each
needs as JSON.
"""

import json

import triton

from restorekv.evictors import triton_maxima
from restorekv.model.attention import triton_attend
from tests.helpers import compile_kernels
from tests.helpers.compile_kernels import TORCH, TYPES, build

ROWS = 2048


def build_both(width: int, kind: str, arch: int) -> list[dict]:
    block_d = triton.next_power_of_2(width)
    m, warps, stages = triton_attend.choose_resources(TORCH[kind], block_d, ROWS)
    constants = {
        "G": 2,
        "D": width,
        "M": m,
        "N": triton_attend.count_pairs_at_once(block_d, TORCH[kind]),
    }
    constants |= {"BLOCK_D": block_d, "FACTOR": TYPES[kind]}
    pointers = dict.fromkeys("query own_keys own_values keys values output".split(), kind) | {
        "lse": "fp32"
    }
    options = {"num_warps": warps, "num_stages": stages}
    made = [build(triton_maxima.attend_kernel, pointers, constants, arch, options)]
    pointers = {"query": kind, "keys": kind, "lse": "fp32", "best": "fp32"}
    for own in (True, False):
        made.append(
            build(triton_maxima.highest_kernel, pointers, constants | {"OWN": own}, arch, options)
        )
    return [{"width": width, "dtype": kind, **each} for each in made]


if __name__ == "__main__":
    compile_kernels.VARYING = triton_maxima.VARYING
    cases = [(128, "bf16"), (256, "bf16"), (80, "fp16"), (64, "bf16"), (128, "fp32")]
    print(
        json.dumps(
            [made for arch in (80, 90) for case in cases for made in build_both(*case, arch)]
        )
    )
