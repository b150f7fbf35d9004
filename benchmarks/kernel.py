"""`python -m benchmarks kernel`: a decode step's attention on a GPU, compared with dense attention
and the roofline.

The shape is that of Llama-3.1-8B: 32 layers, 8 KV heads of 128, 4 query heads each, 32,768 tokens,
bfloat16. Caches hold random numbers. A layer keeps r T H pairs, and heads keep unequal numbers of
them, as after a global ranking of scores. The dense rectangles hold the same number of pairs, and
all questions share one. A pass goes through all layers, and each layer has its own cache, so that
one layer's pairs have left the L2 cache before they are read again; the CUDA graph of a pass is
replayed.

    ours            attention over ragged context and tail, both kernels
    sdpa            PyTorch's choice for a rectangle of as many pairs and the tail; it groups the
                    query heads itself
    sdpa, as rows   the same with a KV head's query heads as rows of one product, which reads each
                    pair once
    flash-attn      flash_attn_with_kvcache, if that package is installed
    roofline        bytes of pairs and tail over the bandwidth of a copy (read and written),
                    measured in the same run

Figures are seconds per layer, medians over replays. Before anything is timed, our kernel's result
is checked against the reference implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.passes import Step, measure_bandwidth, pass_over, time_once
from benchmarks.workload import describe_machine
from restorekv.cache.ragged import RaggedLayer
from restorekv.compression.budget import parse_ratio
from restorekv.errors import RestoreKVError
from restorekv.model.attention import dispatch, reference, tiles

FLASH = "flash-attn"


@dataclass(frozen=True)
class Options:
    """The options of `kernel`.

    `questions` decode together over one context; `tail` columns hold the restore cache, the
    question and the answer so far.
    """

    tokens: int = 32768
    ratios: Sequence[float] = (1, 0.4, 0.2, 0.1, 0.05)
    questions: int = 1
    tail: int = 64
    layers: int = 32
    heads: int = 8
    groups: int = 4
    width: int = 128
    repeat: int = 50
    seed: int = 0
    copied: int = 1 << 30  # bytes of the copy that measures the bandwidth

    def __post_init__(self) -> None:
        for ratio in self.ratios:
            parse_ratio(ratio)
        counts = {
            name: value for name, value in asdict(self).items() if name not in ("ratios", "seed")
        }
        if not self.ratios or min(counts.values()) < 1:
            raise RestoreKVError(f"Measure at least 1 ratio, and 1 of each: {', '.join(counts)}.")


REHEARSAL = Options(
    tokens=96, ratios=(1, 0.25), tail=5, layers=2, heads=2, width=32, repeat=1, copied=1 << 16
)


@torch.no_grad()
def run_kernel(
    options: Options, progress: Callable[[str], None] = lambda phase: None, rehearse: bool = False
) -> dict:
    """Return rows {ratio, pairs, bytes, roofline, ours, sdpa, ...}, and what they were measured on.

    `rehearse` runs everything on the CPU; the figures then mean nothing.
    """
    check_device(rehearse)
    device = torch.device("cpu" if rehearse else "cuda")
    progress("copy bandwidth")
    bandwidth = measure_bandwidth(
        options.copied, device, lambda step: _time_step(step, options.repeat, device)
    )
    rows = []
    for ratio in options.ratios:
        progress(f"r = {ratio:g}")
        rows.append(
            {"ratio": float(ratio), **measure_ratio(options, float(ratio), bandwidth, device)}
        )
    return {
        "machine": {**describe_machine(torch.get_num_threads()), "cuda": torch.version.cuda},
        "rehearsal": rehearse,
        "options": asdict(options),
        "bandwidth": bandwidth,
        "rows": rows,
    }


def check_device(rehearse: bool) -> None:
    """Raise RestoreKVError if there is no CUDA device, no Triton, or, to rehearse, no
    interpreter.
    """
    if not rehearse and not torch.cuda.is_available():
        raise RestoreKVError(
            "There is no CUDA device here to time; --rehearse goes through the motions on the CPU."
        )
    if dispatch.triton_attend is None:
        raise RestoreKVError("The GPU kernels need Triton; pip install 'restorekv[triton]'.")
    if rehearse and not dispatch.triton_attend.INTERPRETED:
        raise RestoreKVError("A rehearsal runs in Triton's interpreter; set TRITON_INTERPRET=1.")


def measure_ratio(options: Options, ratio: float, bandwidth: float, device: torch.device) -> dict:
    """Measure one ratio on newly drawn caches."""
    generator = torch.Generator(device).manual_seed(options.seed)
    layers = [make_random_layer(options, ratio, generator) for _ in range(options.layers)]
    tiles.plan_tiles(layers)
    shape = options.questions, options.heads, options.groups, 1, options.width
    query = _draw_states(generator, *shape)
    check_kernel(query, layers[0])
    scale = options.width**-0.5
    attend = dispatch.triton_attend.attend_ragged
    found = {
        "ours": _time_step(
            pass_over(layers, lambda layer: attend(query, layer, None, scale)),
            options.repeat,
            device,
        )
    }
    pairs = layers[0].bounds[-1]
    # The length to which a rectangle would have to pad these heads.
    longest = max(layer.longest_head for layer in layers)
    del layers
    length = pairs // options.heads + options.tail
    size = (options.layers, 1, options.heads, length, options.width)
    shared = (
        _draw_states(generator, *size).expand(-1, options.questions, -1, -1, -1) for _ in range(2)
    )
    rectangles = list(zip(*shared, strict=True))
    for name, dense in _list_rivals(query).items():
        found[name] = _time_step(pass_over(rectangles, dense), options.repeat, device)
    rows = pairs + options.questions * options.heads * options.tail
    must = rows * 2 * options.width * query.element_size()
    least = must / bandwidth
    found = {name: took / options.layers for name, took in found.items()}
    figures = {name: {"seconds": took, "of roofline": least / took} for name, took in found.items()}
    return {"pairs": pairs, "longest": longest, "bytes": must, "roofline": least, **figures}


def _draw_states(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw normal bfloat16 numbers in place, without a float32 copy of all of them."""
    return torch.empty(shape, dtype=torch.bfloat16, device=generator.device).normal_(
        generator=generator
    )


def make_random_layer(options: Options, ratio: float, generator: torch.Generator) -> RaggedLayer:
    """Return a layer with heads that keep unequal numbers of pairs.

    A ranking over all heads chooses the pairs by random scores, with a different mean for each
    head.
    """
    heads = options.heads
    tokens = options.tokens
    width = options.width
    device = generator.device
    count = int(parse_ratio(ratio) * heads * tokens)
    means = torch.randn(heads, 1, generator=generator, device=device)
    scores = torch.randn(heads, tokens, generator=generator, device=device) + means
    kept = scores.flatten().topk(count).indices.sort().values
    lengths = (kept // tokens).bincount(minlength=heads)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    empty = _draw_states(generator, 1, heads, 0, width)
    context = _draw_states(generator, count, width), _draw_states(generator, count, width)
    layer = RaggedLayer(*context, offsets, (kept % tokens).int(), tokens, empty, empty)
    shape = options.questions, heads, options.tail, width
    layer.keys, layer.values = _draw_states(generator, *shape), _draw_states(generator, *shape)
    return layer


def check_kernel(query: Tensor, layer: RaggedLayer) -> None:
    """Refuse to time a kernel whose result differs from the reference implementation's."""
    scale = query.shape[-1] ** -0.5
    wished = reference.attend_ragged(query.float(), layer, None, scale)
    error = (
        dispatch.triton_attend.attend_ragged(query, layer, None, scale) - wished
    ).norm() / wished.norm()
    if not error < 0.02:
        raise RestoreKVError(
            f"The kernel's result is off by {float(error):.1%} here; please report this."
        )


def _list_rivals(query: Tensor) -> dict[str, Callable[[tuple[Tensor, Tensor]], Tensor]]:
    """Return functions for dense attention of the query (B, H, G, 1, D), by name.

    Each takes keys and values (B, H, T, D).
    """
    grouped = query.flatten(1, 2)
    as_rows = query[:, :, :, 0]
    found = {
        "sdpa": lambda pair: F.scaled_dot_product_attention(grouped, *pair, enable_gqa=True),
        "sdpa, as rows": lambda pair: F.scaled_dot_product_attention(as_rows, *pair),
    }
    if query.is_cuda and find_spec("flash_attn"):
        from flash_attn import flash_attn_with_kvcache

        flat = grouped.transpose(1, 2)
        found[FLASH] = lambda pair: flash_attn_with_kvcache(
            flat, *(x.transpose(1, 2) for x in pair)
        )
    return found


def _time_step(step: Step, repeat: int, device: torch.device) -> float:
    """Return the median seconds of `repeat` runs of a step, after one as a warm-up."""
    step()
    return median(
        _time_replays(step, repeat)
        if device.type == "cuda"
        else [time_once(step) for _ in range(repeat)]
    )


def _time_replays(step: Step, repeat: int) -> list[float]:
    """Time the replays of a CUDA graph by the device's own clock, after a few that only warm up."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [early.elapsed_time(late) / 1000 for early, late in pairwise(marks)]


def format_table(result: dict) -> str:
    """Return a Markdown table of microseconds per layer, and of their ratios to ours."""
    options = result["options"]
    machine = result["machine"]
    where = (
        machine.get("device", machine["processor"]),
        *(f"{name} {found}" for name, found in machine["versions"].items()),
    )
    sides = [name for name, cell in result["rows"][0].items() if isinstance(cell, dict)]
    rivals = [name for name in sides if name != "ours"]
    lines = [
        f"{machine['date']}, {', '.join(where)}, CUDA {machine['cuda']}.",
        f"T = {options['tokens']:,}, {options['layers']} layers of {options['heads']} KV heads of "
        f"{options['width']}, "
        f"{options['groups']} query heads each, {options['questions']} questions, tail "
        f"{options['tail']}; copy "
        f"{result['bandwidth'] / 1e9:,.0f} GB/s. Microseconds per layer.",
        *(["A rehearsal: these figures mean nothing."] if result["rehearsal"] else []),
        "",
        "| r | pairs | roofline |"
        + "".join(f" {name} |" for name in sides)
        + " ours, of roofline |"
        + "".join(f" {name} / ours |" for name in rivals),
        "|---|" + "---|" * (3 + len(sides) + len(rivals)),
    ]
    for row in result["rows"]:
        took = {name: row[name]["seconds"] for name in sides}
        cells = [f"{row['ratio']:g}", f"{row['pairs']:,}", f"{row['roofline'] * 1e6:.1f}"]
        cells += [f"{took[name] * 1e6:.1f}" for name in sides] + [
            f"{row['ours']['of roofline']:.0%}"
        ]
        cells += [f"{took[name] / took['ours']:.2f}" for name in rivals]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
