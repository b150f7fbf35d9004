"""The program `python -m benchmarks NAME`, in a checkout: it measures time and memory on this
machine. What is compared is measured in the same run.
"""

import sys

import typer

from restorekv.cli import Commands, invoke

COMMANDS = {
    "compare": ("benchmarks.cli.compare", "Compare time and memory with kvpress 0.5.5."),
    "scorers": (
        "benchmarks.cli.scorers",
        "Compare the time of every method's scoring with that of the prefill.",
    ),
    "kernel": ("benchmarks.cli.kernel", "Time attention over a compressed cache on a GPU."),
    "device": (
        "benchmarks.cli.device",
        "Compare a GPU with the CPU, and measure what the GPU's code paths save.",
    ),
    "efficiency": (
        "benchmarks.cli.efficiency",
        "Measure what the restore pass costs, and what a compressed cache saves.",
    ),
    "memory": (
        "benchmarks.cli.memory",
        "Measure memory and time of every phase of a compression as texts grow.",
    ),
    "decode": (
        "benchmarks.cli.decode",
        "Measure decode steps over a compressed cache, and many questions at once.",
    ),
    "train": (
        "benchmarks.cli.train",
        "Measure time and memory of a training step, phase by phase.",
    ),
    "growing": (
        "benchmarks.cli.growing",
        "Compare appended and composed texts with texts compressed at once.",
    ),
    "book": (
        "benchmarks.cli.book",
        "Compare a book compressed at once and in parts with transformers.",
    ),
    "serving": ("benchmarks.cli.serving", "Compare our server with transformers serve."),
    "vllm": (
        "benchmarks.cli.vllm",
        "Compare whole and compressed documents in vLLM (in its environment).",
    ),
    "vllm-answers": (
        "benchmarks.cli.vllm_answers",
        "Compare answers from cache files in vLLM with those of ask (in its environment).",
    ),
    "vllm-kl": (
        "benchmarks.cli.vllm_kl",
        "Compare distributions of vLLM over cache files with those of ask (in its environment).",
    ),
    "vllm-scores": (
        "benchmarks.cli.vllm_scores",
        "Compare a benchmark's scores by ask with those by vLLM over HTTP.",
    ),
    "vllm-steps": (
        "benchmarks.cli.vllm_steps",
        "Measure decode steps of vLLM with documents and without (in its environment).",
    ),
    "charts": ("benchmarks.cli.charts", "Draw a chart of every stored result."),
}


class Benchmarks(Commands):
    """The benchmarks of this checkout."""

    table = COMMANDS


app = typer.Typer(cls=Benchmarks, add_completion=False)


@app.callback()
def root() -> None:
    """Measure time and memory on this machine."""


def execute(args: list[str]) -> int:
    """Run one benchmark."""
    return invoke(typer.main.get_command(app), args or ["--help"], "python -m benchmarks", COMMANDS)


if __name__ == "__main__":
    sys.exit(execute(sys.argv[1:]))
