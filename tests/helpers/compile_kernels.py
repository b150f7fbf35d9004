"""Compile the attention kernels for sm_80 and sm_90 without a GPU, and print what each needs as
JSON.

Printed are registers, stack (bytes a thread spills), shared (bytes a program needs), copies
(asynchronous 16-byte copies) and matrix (tensor-core instructions).
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from restorekv.model.attention import triton_attend
from restorekv.model.attention.triton_kernels import (
    BIAS,
    CAUSAL,
    MASK,
    NOTHING,
    VARYING,
    attend_tile,
    merge,
)

TYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
TORCH = {
    "bf16": triton_attend.torch.bfloat16,
    "fp16": triton_attend.torch.float16,
    "fp32": triton_attend.torch.float32,
}
DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
CASES = [
    (128, 4, "bf16", False),
    (128, 64, "bf16", False),
    (128, 64, "bf16", True),
    (256, 64, "bf16", True),
    (80, 4, "fp16", True),
    (64, 4, "bf16", True),
    (128, 4, "fp32", False),
    (256, 64, "fp32", False),
]


def build(kernel, pointers: dict, constants: dict, arch: int, options: dict) -> dict:
    """Compile a kernel and return what it needs.

    Pointers, and integers that are not VARYING, are assumed to be multiples of 16.
    """
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = (
            f"*{pointers[name]}" if name in pointers else "fp32" if name == "scale" else "i32"
        )
        if name != "scale" and name not in VARYING:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [DISASSEMBLER, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", told).groups()
    text = made.asm["ptx"]
    return {
        "kernel": kernel.fn.__name__,
        "arch": arch,
        "registers": int(registers),
        "stack": int(stack),
        "shared": made.metadata.shared,
        "copies": text.count("cp.async.cg"),
        "matrix": len(re.findall(r"mma\.sync|mma_async\.sync", text)),
    }


def build_tile(width: int, rows: int, kind: str, masked: bool, arch: int) -> dict:
    block_d = triton.next_power_of_2(width)
    m, warps, stages = triton_attend.choose_resources(TORCH[kind], block_d, rows)
    pointers = dict.fromkeys(["query", "context_keys", "context_values", "keys", "values"], kind)
    pointers |= {"entries": "i32", "parts": "fp32", "sums": "fp32"}
    constants = {
        "CONTEXT": BIAS if masked else NOTHING,
        "TAIL": MASK if masked else CAUSAL,
        "H": 8,
        "G": 4,
        "D": width,
        "M": m,
        "BLOCK_N": triton_attend.count_pairs_at_once(block_d, TORCH[kind]),
        "BLOCK_D": block_d,
        "FACTOR": TYPES[kind],
    }
    if masked:
        pointers |= {"bias": kind, "mask": "i1"}
    else:
        constants |= {"bias": None, "mask": None}
    made = build(attend_tile, pointers, constants, arch, {"num_warps": warps, "num_stages": stages})
    return {"width": width, "rows": rows, "dtype": kind, "masked": masked, **made}


def main() -> None:
    found = [build_tile(*case, arch) for arch in (80, 90) for case in CASES]
    pointers = {"parts": "fp32", "sums": "fp32", "first": "i32", "output": "bf16"}
    for arch in (80, 90):
        for m, together, width in ((1, 32, 32), (8, 8, 128)):
            constants = {"H": 8, "G": 4, "D": 128, "M": m, "BLOCK_S": together, "WIDTH": width}
            without = constants | {"SINKS": False, "sinks": None}
            found.append(build(merge, pointers, without, arch, {"num_warps": 4}))
            sinks = pointers | {"sinks": "bf16"}
            found.append(build(merge, sinks, constants | {"SINKS": True}, arch, {"num_warps": 4}))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
