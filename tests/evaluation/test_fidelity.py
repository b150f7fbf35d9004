"""KL against the full cache: an oracle that masks evicted pairs in a plain pass, and what grids
record of it.
"""

import json
from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from restorekv import CompressionConfig, compress, tasks
from restorekv.errors import RestoreKVError
from restorekv.evaluation import results, worker
from restorekv.evaluation.fidelity import summarize_fidelity
from restorekv.evaluation.frame import GridResults
from restorekv.evaluation.grid_tables import make_tables
from restorekv.evaluation.rows import make_payload
from restorekv.evaluation.run import run_grid
from restorekv.generation.decoding import generate_ids
from restorekv.model.load import load_model
from restorekv.model.prompt import encode_question
from tests.helpers.compressing import compress_with
from tests.helpers.grid_world import Plain, grid, save_world


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_tokenizer):
    """A tiny model and an adapter of it, on disk."""
    return save_world(tmp_path_factory.mktemp("fidelity"), tiny_tokenizer)


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setitem(tasks.BENCHMARKS, "plain", Plain)
    worker.OPEN_MODELS.clear()


def masked_logits(path, ids, answers, positions, cache):
    """Logits that predict the last `answers` ids, from one pass whose later rows do not see evicted
    columns.
    """

    def attend(module, query, key, value, attention_mask, scaling, **_):
        groups, width = query.shape[1] // key.shape[1], key.shape[2]
        seen = torch.ones(width, width, dtype=torch.bool).tril().repeat(query.shape[1], 1, 1)
        layer = cache.layers[module.layer_idx] if cache else None
        for head in range(query.shape[1]) if cache else ():
            bounds = layer.bounds[head // groups : head // groups + 2]
            kept = torch.zeros(positions, dtype=torch.bool)
            kept[layer.positions[bounds[0] : bounds[1]]] = True
            seen[head, positions:, :positions] &= kept
        logits = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2), weights

    AttentionInterface.register("oracle", attend)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="oracle"
    )
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0, -answers - 1 : -1].double()


def kl(full, other):
    """Mean over positions, from probabilities alone."""
    p, q = (logits.softmax(-1).numpy() for logits in (full, other))
    rows = [[(a, b) for a, b in zip(*row, strict=True)] for row in zip(p, q, strict=True)]
    return float(np.mean([sum(a * (log(a) - log(b)) for a, b in row) for row in rows]))


def test_divergences_are_those_of_a_masked_pass(world, tmp_path):
    path = world / "model"
    done = run_grid(grid(str(path), "plain", ("kvzip", "knorm"), ("0.5", "0.2")), tmp_path)
    model, tokenizer = load_model(str(path))
    samples = list(Plain().load_samples(tokenizer, "kvpress"))
    whole = [
        compress(
            model,
            tokenizer,
            each.context,
            evictor="knorm",
            adapter=None,
            ratio=1,
            config=CompressionConfig(separator=""),
        )
        for each in samples
    ]
    for result in done[1:]:
        how = {"evictor": result.cell.evictor, "ratio": result.cell.ratio, "adapter": None}
        for sample, full, line in zip(samples, whole, result.lines, strict=True):
            small = compress_with(
                model, tokenizer, sample.context, prefix_policy="counted", separator="", **how
            )
            prompts = [
                encode_question(tokenizer, small.context, asked.text)[0]
                for asked in sample.questions
            ]
            answers = generate_ids(model, tokenizer, full.cache, prompts, 4, first_may_stop=False)
            for prompt, answer, recorded in zip(prompts, answers, line["answers"], strict=True):
                ids = torch.cat([small.context.ids[0], prompt, answer])
                pair = [
                    masked_logits(path, ids, len(answer), small.context.num_tokens, c)
                    for c in (None, small.cache)
                ]
                assert recorded["kl"] == pytest.approx(kl(*pair), rel=1e-3, abs=1e-5)
                assert recorded["answer_tokens"] == len(answer) and recorded["kl"] > 1e-3


def test_a_restored_cache_is_given_the_same_ids_behind_its_restore_tokens(world, tmp_path):
    """Token by token through transformers' own forward, positions counted by hand."""
    path = str(world / "model")
    cells = grid(
        path,
        "plain:contexts=1",
        ratios=("0.4",),
        adapters=(str(world / "adapter"),),
        prefix_policy="free",
    )
    result = run_grid(cells, tmp_path)[1]
    model, tokenizer = load_model(path)
    (sample,) = Plain(contexts=1).load_samples(tokenizer, "kvpress")
    full, small = (
        compress(
            model,
            tokenizer,
            sample.context,
            ratio=ratio,
            adapter=adapter,
            config=CompressionConfig(on_small_budget="fewer", separator=""),
        )
        for ratio, adapter in ((1, None), ("0.4", str(world / "adapter")))
    )
    assert small.cache.restore_length == 3
    for asked, recorded in zip(sample.questions, result.lines[0]["answers"], strict=True):
        prompt = encode_question(tokenizer, full.context, asked.text)[0]
        (answer,) = generate_ids(model, tokenizer, full.cache, [prompt], 4, first_may_stop=False)
        logits_of_both = []
        for cache, first in ((full.cache.fork(), 0), (small.cache.fork(), 3)):
            logits, position = [], full.context.num_tokens + first
            for index, token in enumerate([*prompt.tolist(), *answer.tolist()][:-1]):
                output = model(
                    input_ids=torch.tensor([[token]]),
                    position_ids=torch.tensor([[position]]),
                    past_key_values=cache,
                )
                position += 1
                logits += [output.logits[0, -1].double()] if index >= len(prompt) - 1 else []
            logits_of_both.append(torch.stack(logits).detach())
        assert recorded["kl"] == pytest.approx(kl(*logits_of_both), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("protocol", ["kvpress", "kvzip"])
def test_the_full_cache_is_faithful_to_itself(world, tmp_path, protocol):
    done = run_grid(
        grid(str(world / "model"), "plain", ratios=("1", "0.2"), protocol=protocol), tmp_path
    )
    full, same, small = (result.summary for result in done)
    assert full["kl"] == 0 and full["same"] == 100 and full["answer_tokens"] > 0
    assert same["kl"] == pytest.approx(0, abs=1e-6) and same["same"] == 100, "r = 1 loses nothing"
    assert small["kl"] > 0 and small["answer_tokens"] == full["answer_tokens"]
    assert small["kl_low"] is None, "two contexts have no interval"
    texts = [
        [answer["prediction"] for line in result.lines for answer in line["answers"]]
        for result in done
    ]
    assert small["same"] == pytest.approx(
        100 * np.mean([a == b for a, b in zip(texts[0], texts[2], strict=True)])
    )


def test_streamed_cells_are_compared_with_the_full_cache_too(world, tmp_path):
    cells = grid(str(world / "model"), "plain", ratios=("0.5",))
    full, plain, streamed = run_grid([*cells, replace(cells[1], streaming_chunk=200)], tmp_path)
    assert streamed.summary["answer_tokens"] == full.summary["answer_tokens"]
    assert streamed.summary["kl"] == pytest.approx(plain.summary["kl"], rel=1e-3), (
        "one part is no streaming"
    )


def line(*answers):
    return {
        "answers": [
            {"task": task, "kl": kl, "answer_tokens": n, "same": same}
            for task, kl, n, same in answers
        ]
    }


def test_every_token_weighs_alike():
    lines = [line(("a", 1.0, 9, True), ("b", 3.0, 1, False)), line(("a", 0.0, 10, True))]
    assert summarize_fidelity(lines)["kl"] == pytest.approx(12 / 20) and summarize_fidelity(lines)[
        "same"
    ] == pytest.approx(200 / 3)
    assert (
        summarize_fidelity(lines, {"a"})["kl"] == pytest.approx(9 / 19)
        and summarize_fidelity(lines, {"b"})["answer_tokens"] == 1
    )
    assert summarize_fidelity(lines)["kl_low"] is None, "two contexts have no interval"
    many = summarize_fidelity(lines * 3)
    assert 0 <= many["kl_low"] < 0.6 < many["kl_high"] <= 1.2


def test_a_line_without_fidelity_is_damaged(world, tmp_path):
    done = run_grid(grid(str(world / "model"), "plain", ratios=("0.5",)), tmp_path)
    assert any(
        "KL" in table.columns for table in make_tables(GridResults(done))
    ) and "kl" in json.dumps(make_payload(done))
    (line, *_) = done[1].lines
    del line["answers"][0]["kl"]
    (done[1].folder / results.ANSWERS).write_text(json.dumps(line) + "\n")
    with pytest.raises(RestoreKVError, match=r"damaged \(kl is missing or has the wrong type\)"):
        make_tables(GridResults(results.load_results(tmp_path)))
