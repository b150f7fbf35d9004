"""Tables that were written by hand say what the stored results say.

Those between comments are written by `make charts` and the recipes, whose own tests compare them.
"""

import json
import re
from collections import Counter
from pathlib import Path
from statistics import median

from transformers import CONFIG_MAPPING

from benchmarks.vllm_memory import make_tables
from restorekv.evaluation.tables import Table
from restorekv.model.names import NAMES
from restorekv.tasks.genres import Genres
from restorekv.tasks.squad import HotpotQA
from tests.helpers.pages import ROOT

VLLM = ROOT / "docs" / "vllm.md"
EVALUATION = ROOT / "docs" / "evaluation.md"
BENCHMARKS = ROOT / "paper" / "results" / "benchmarks.md"
RELIABILITY = ROOT / "paper" / "results" / "reliability.md"
RESULTS = ROOT / "benchmarks" / "results"


def read_result(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def read_rows(page: Path, title: str) -> list[list[str]]:
    """The cells of every row of the table whose line of titles begins with `title`."""
    _, found, text = page.read_text(encoding="utf-8").partition(f"\n| {title}")
    assert found, title
    rows = []
    for line in text.splitlines()[2:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_documents_in_vllm_are_those_of_the_result():
    result = read_result(RESULTS / "2026-11-28-vllm-cpu.json")
    table = next(each for each in make_tables(result) if isinstance(each, Table))
    at = [*range(5), table.columns.index("tokens/s, do not fit, 32 together")]
    at.append(table.columns.index("tokens/s, fit, 32 together"))
    assert read_rows(VLLM, "documents | MB each") == [[row[i] for i in at] for row in table.rows]


def test_steps_in_vllm_are_those_of_the_result():
    rounds = read_result(RESULTS / "2026-11-27-vllm-steps-cpu.json")["rounds"]
    expected = []
    for one, other in (("documents", "plain"), ("plain", "alone")):
        ratios = [each[one] / each[other] for each in rounds]
        times = [median(each[name] for each in rounds) * 1e3 for name in (one, other)]
        expected.append(
            [
                f"{median(ratios):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{times[0]:.0f} / {times[1]:.0f} ms",
            ]
        )
    assert [row[1:] for row in read_rows(VLLM, "ratio of | median")] == expected


def test_rulers_longer_texts_are_those_of_the_result():
    rows = read_result(ROOT / "paper" / "results" / "smollm2-longer.json")["rows"]
    expected = []
    for length, benchmark in (
        ("2,048", "ruler:length=2048,per_task=3"),
        ("4,096", "ruler:per_task=2"),
    ):
        cells = [row for row in rows if row["benchmark"] == benchmark]
        (full,) = (row for row in cells if row["evictor"] == "full")
        first = [f"{length}, {full['samples']}", "0.3", f"{full['score']:.1f}"]
        for ratio in (0.3, 0.1, 0.05):
            pair = {row["restored"]: row for row in cells if row["ratio"] == ratio}
            alone = pair[False]
            restored = pair[True]
            gain = [f"{restored[name]:+.1f}" for name in ("gain", "gain_low", "gain_high")]
            scores = [f"{row['score']:.1f}" for row in (alone, restored)]
            first[1] = f"{ratio:g}"
            expected.append(
                [
                    *first,
                    *scores,
                    f"{gain[0]} ({gain[1]} to {gain[2]})",
                    show_divergence(alone),
                    show_divergence(restored),
                ]
            )
            first = ["", "", ""]
    assert read_rows(EVALUATION, "RULER tokens, texts") == expected


def show_divergence(row: dict) -> str:
    return f"{row['kl']:.3f} ({row['kl_low']:.3f} to {row['kl_high']:.3f})"


def test_the_number_of_passages_of_a_genre_is_that_of_the_file():
    counts = Counter(row["genre"] for _, row in Genres().load_rows())
    assert (min(counts.values()), max(counts.values())) == (1, 3)
    assert "one to three passages of each genre" in BENCHMARKS.read_text(encoding="utf-8")


def test_the_number_of_hotpotqas_examples_is_that_of_the_file():
    count = len(list(HotpotQA().load_rows()))
    assert f"({count} of the 100 HotpotQA dev examples)" in BENCHMARKS.read_text(encoding="utf-8")


def test_the_models_that_a_file_may_name_are_all_named():
    text = " ".join(RELIABILITY.read_text(encoding="utf-8").split())
    found = re.search(r"`compose` and `export` know (.*?), and need `--model`", text)
    assert found is not None
    assert sorted(re.findall(r"`([\w-]+)`", found[1])) == sorted(NAMES)


def test_the_states_of_qwen3_next_take_as_many_bytes_as_the_page_says():
    config = CONFIG_MAPPING["qwen3_next"]()
    value_heads = config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = value_heads * config.linear_value_head_dim
    recurrent = value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    inputs = (2 * keys + values) * config.linear_conv_kernel_dim
    states = config.layer_types.count("linear_attention") * (4 * recurrent + 2 * inputs)
    pairs = config.layer_types.count("full_attention") * config.num_key_value_heads
    of_a_token = 2 * 2 * pairs * config.head_dim
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert f"as the pairs of {states / of_a_token:,.0f} tokens" in " ".join(page.split())
