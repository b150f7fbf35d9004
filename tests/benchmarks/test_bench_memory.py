"""The memory benchmark on a tiny shape, and what it says on paper against models made on no
device.
"""

import math
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks import accuracy
from benchmarks.memory import Options, compute_growth, measure, run_memory
from benchmarks.memory_on_paper import LENGTHS, MODELS, PART, format_table
from benchmarks.memory_table import compute_bound, format_seconds, format_tables
from benchmarks.workload import SHAPE, save_model, save_tokenizer
from restorekv.errors import RestoreKVError
from tests.helpers.shapes import TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("bench")
    save_tokenizer(made)
    save_model(made, {**SHAPE, **TINY}, 0)
    return made


@pytest.mark.parametrize(
    ("mode", "filled", "phases"),
    [
        ("plain", False, ["prefill", "score", "restore", "evict"]),
        pytest.param("plain", True, ["fill", "score", "restore", "evict"], marks=pytest.mark.slow),
        pytest.param(
            "offload", False, ["prefill", "score", "restore", "evict"], marks=pytest.mark.slow
        ),
        pytest.param(
            "offload", True, ["fill", "score", "restore", "evict"], marks=pytest.mark.slow
        ),
        pytest.param("streaming", False, ["part"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:The adapter learned to read full caches")
def test_every_mode_and_phase_is_measured(folder, mode, filled, phases):
    job = {
        "model": str(folder),
        "threads": 1,
        "tokens": 300,
        "mode": mode,
        "filled": filled,
        "seed": 0,
        "part": 100,
    }
    row = measure({**job, "evictor": "snapkv", "ratio": "0.05"})
    assert list(row["phases"]) == phases
    assert all(phase["seconds"] > 0 for phase in row["phases"].values())
    assert row["full"] == TINY["num_hidden_layers"] * row["layer"] and 0 < row["kept"] < row["full"]
    assert 300 * 128 < row["layer"] < 340 * 128  # 2 heads of 16, 2 bytes, keys and values
    assert row["scores"] < compute_bound({**row, "mode": mode})


@pytest.mark.slow
def test_every_measurement_is_a_process():
    options = Options(
        tokens=(300, 700, 900),
        modes=("plain", "streaming"),
        evictor="snapkv",
        part=400,
        threads=1,
        shape=TINY,
    )
    result = run_memory(options)
    assert [(row["tokens"], row["mode"]) for row in result["rows"]] == [
        (tokens, mode) for tokens in (300, 700, 900) for mode in ("plain", "streaming")
    ]
    # Fits into one part.
    assert list(result["rows"][1]["phases"]) == ["prefill", "score", "restore", "evict"]
    assert len(result["growth"]["plain"]["prefill"]) == 2
    assert {name: len(grown) for name, grown in result["growth"]["streaming"].items()} == {
        "prefill": 0,
        "score": 0,
        "restore": 0,
        "evict": 0,
        "part": 1,
    }
    text = format_tables(result)
    assert (
        "| plain: T |" in text
        and "| streaming: T |" in text
        and "streamed 400 tokens at a time" in text
    )


def test_growth_is_the_exponent():
    rows = [
        {"tokens": t, "mode": "plain", "phases": {"score": {"seconds": 3 * t**1.5}}}
        for t in (10, 20, 80)
    ]
    assert compute_growth(rows)["plain"]["score"] == pytest.approx([1.5, 1.5])


def test_growth_of_texts_that_share_a_phase():
    """The shortest went the plain way; the table tells all phases there were."""
    plain, part = (
        {name: {"seconds": 2.0, "peak": 5} for name in names}
        for names in (("score", "restore"), ("part",))
    )
    rows = [
        {"tokens": t, "mode": "streaming", "phases": part if t > 10 else plain}
        for t in (10, 20, 40)
    ]
    found = compute_growth(rows)["streaming"]
    assert found == {"score": [], "restore": [], "part": [0.0]}
    lines = format_seconds("streaming", rows, found).to_markdown().splitlines()
    assert "| score | 2.00 |  |  |  |" in lines and "| part |  | 2.00 | 2.00 | 0.00 |" in lines
    assert "| restore pass, share of all | 50.00% |  |  |  |" in lines


def test_every_text_is_streamed_unless_told_otherwise():
    assert Options().streamed == 1024 and Options(tokens=(512, 1024)).streamed == 256
    assert (
        Options(tokens=(8192, 5000)).streamed == 2048
        and Options(tokens=(300,), part=400).streamed == 400
    )


@pytest.mark.parametrize("ratio", ["0.01", "0.05"])
def test_a_filled_cache_is_squeezed_to_any_ratio(folder, ratio):
    """Of the warm-up's 256 tokens 1 % are fewer than the adapter's eight."""
    job = {
        "model": str(folder),
        "threads": 1,
        "tokens": 300,
        "mode": "plain",
        "filled": True,
        "seed": 0,
        "part": 100,
    }
    assert measure({**job, "evictor": "knorm", "ratio": ratio})["kept"] > 0


def test_paper_knows_the_models():
    """Their weights and the cache of a token."""
    known = {
        "Qwen3-0.6B": (
            Qwen3ForCausalLM,
            Qwen3Config(
                num_hidden_layers=28,
                hidden_size=1024,
                intermediate_size=3072,
                num_attention_heads=16,
                num_key_value_heads=8,
                head_dim=128,
                vocab_size=151_936,
                tie_word_embeddings=True,
            ),
            114_688,
        ),
        "Qwen3-4B": (
            Qwen3ForCausalLM,
            Qwen3Config(
                num_hidden_layers=36,
                hidden_size=2560,
                intermediate_size=9728,
                num_attention_heads=32,
                num_key_value_heads=8,
                head_dim=128,
                vocab_size=151_936,
                tie_word_embeddings=True,
            ),
            147_456,
        ),
        "Llama-3.1-8B": (
            LlamaForCausalLM,
            LlamaConfig(
                num_hidden_layers=32,
                hidden_size=4096,
                intermediate_size=14_336,
                num_attention_heads=32,
                num_key_value_heads=8,
                vocab_size=128_256,
                tie_word_embeddings=False,
            ),
            131_072,
        ),
    }
    for model in MODELS:
        kind, config, token = known[model.name]
        with torch.device("meta"):
            count = kind(config).num_parameters()
        assert math.isclose(model.weights, 2 * count, rel_tol=1e-3)
        assert model.layers * model.layer(1) == token
        for tokens in LENGTHS:
            plain, offload, streaming = model.peaks(tokens)
            assert model.weights < min(offload, streaming) and max(offload, streaming) < plain
            assert model.workspace(tokens) < 600e6  # whatever the length
    qwen, _, llama = MODELS
    # 4 * 4096 + 3 * 14336 + 4 * 4096.
    assert llama.workspace(PART) == 2048 * (3 * 2048 + 2 * 75_776) == 322_961_408
    assert qwen.workspace(PART) == 2048 * (3 * 2048 + 2 * 21_504)  # 4 * 1024 + 3 * 3072 + 4 * 2048
    full, columns = 131_072 * 32_768, 32_768  # bytes a column
    held = full // 20 + 131_072 * 2048 + 10 * 256 * columns + 322_961_408
    assert llama.peaks(columns)[2] == pytest.approx(llama.weights + held, abs=1)
    assert llama.peaks(columns)[
        0
    ] == llama.weights + full + full // 32 + 6 * 256 * columns + llama.workspace(columns)
    assert format_table().count("\n") == 3 + 1 + len(MODELS) * len(LENGTHS)


def test_what_is_wrong_is_told():
    with pytest.raises(RestoreKVError, match="threads and part are at least 0, not -1 and 0"):
        Options(threads=-1)


@pytest.mark.parametrize(
    "bad",
    [
        {"part": -1},
        {"tokens": (8,)},
        {"modes": ("fast",)},
        {"modes": ()},
        {"filled": True},
        {"ratio": 0.0},
        {"evictor": "x"},
    ],
)
def test_wrong_options_are_refused(bad):
    with pytest.raises(RestoreKVError):
        Options(**bad)


@pytest.mark.parametrize("documents", ["x", "-1", "0"])
def test_accuracy_tells_a_mistake_in_a_sentence(tmp_path, documents, recwarn):
    """sys.exit with a text prints it and exits with 1."""
    with pytest.raises(SystemExit) as caught:
        accuracy.main(documents, str(tmp_path / "run"))
    assert re.fullmatch(r"error: [^\n]+\.", caught.value.code)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The adapter learned to read full caches")
def test_accuracy_is_measured_beside_the_plain_way(tmp_path):
    """On one document; 8 bits take at least a quarter of float32, and streaming holds as many
    pairs.
    """
    found = accuracy.measure_accuracy(1, tmp_path)
    for (name, ratio), result in found.items():
        (line,), (plain,) = result.lines, found["model", ratio].lines
        assert line["pairs"] == plain["pairs"] and len(line["answers"]) == len(plain["answers"])
        assert (0.25 < line["bytes"] / plain["bytes"] < 0.4) == (name in ("int8", "fp8"))
        assert (line["answers"] == plain["answers"]) or name != "model"
    assert accuracy.format_table(found).count("\n") == 2 + len(found)


def test_a_mode_or_a_length_that_is_named_twice_is_measured_once():
    """Growth is between neighboring lengths, so a length must not be its own neighbor."""
    assert Options(modes=("plain", "offload", "plain")).modes == ("plain", "offload")
    assert Options(tokens=(512, 1024, 512)).tokens == (512, 1024)
