"""Grids in this process: what is shared, what is reused, what is refused, and that answers are
those of compress.
"""

import copy
import json
from dataclasses import replace
from fractions import Fraction
from math import floor

import pytest
from tokenizers import normalizers
from transformers import GenerationConfig

from restorekv import spec, tasks
from restorekv.compression import full_cache
from restorekv.compression.streaming import Stream
from restorekv.errors import RestoreKVError
from restorekv.evaluation import results, worker
from restorekv.evaluation.frame import load_grid
from restorekv.evaluation.grid import FULL, Cell, Grid, group_jobs
from restorekv.evaluation.results import SECONDS, describe_changes
from restorekv.evaluation.rows import make_rows
from restorekv.evaluation.run import run_grid
from restorekv.evictors.kvzip import KVzip
from restorekv.files import append_line, file_lock
from restorekv.generation.decoding import decode_answer, generate_ids, get_stop_ids
from restorekv.model.load import load_model
from restorekv.model.prompt import encode_question
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.compressing import compress_with
from tests.helpers.grid_world import WORDS, Plain, contents, grid, save_world
from tests.helpers.hybrids import LATENT, build_hybrid
from tests.helpers.models import build_model

RATIOS = ("0.8", "0.6", "0.5", "0.4", "0.3")


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_tokenizer):
    """A tiny model and two adapters of it, on disk."""
    return save_world(
        tmp_path_factory.mktemp("grid"), tiny_tokenizer, adapters=("adapter", "other")
    )


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setitem(tasks.BENCHMARKS, "plain", Plain)
    worker.OPEN_MODELS.clear()


@pytest.fixture
def counted(monkeypatch):
    """How often contexts are read, scored and restored."""
    counts = {"prefill": 0, "score": 0, "restore": 0}

    def count(target, name, what):
        real = target if callable(target) else getattr(target, name)

        def called(*args, **kwargs):
            counts[what] += 1
            return real(*args, **kwargs)

        return called

    monkeypatch.setattr(full_cache, "prefill", count(full_cache.prefill, "", "prefill"))
    monkeypatch.setattr(worker, "prefill", count(worker.prefill, "", "prefill"))
    monkeypatch.setattr(KVzip, "score", count(KVzip.score, "", "score"))
    monkeypatch.setattr(
        RestoreAdapter, "run_restore_pass", count(RestoreAdapter.run_restore_pass, "", "restore")
    )
    return counts


def model_of(world):
    return str(world / "model")


def test_twenty_questions_at_five_ratios_cost_one_prefill_and_one_scoring_pass(
    world, counted, tmp_path
):
    cells = grid(
        model_of(world),
        "plain:contexts=1,questions=20",
        ratios=RATIOS,
        adapters=(None, str(world / "adapter")),
    )
    done = run_grid(cells, tmp_path)
    assert len(done) == 11 and all(len(result.answers) == 20 for result in done)
    assert counted == {"prefill": 1, "score": 1, "restore": 1}


def test_every_context_evictor_and_adapter_costs_once(world, counted, tmp_path):
    both = (None, str(world / "adapter"), str(world / "other"))
    run_grid(
        grid(model_of(world), "plain:contexts=3", ("kvzip", "kvzip:chunk=32"), RATIOS[:2], both),
        tmp_path,
    )
    # The second method reads one more text first, to find out whether it works on the model.
    assert counted == {"prefill": 7, "score": 7, "restore": 12}


def save_model(kind, folder, tokenizer):
    """Save a small model of a kind with a tokenizer; return its name."""
    build_hybrid(kind).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


LATE_REFUSALS = {
    "fitted values": ("deepseek_v2", "am-fast", {"prefix_policy": "free"}, "has one vector"),
    "rotated queries": ("deepseek_v2", "expected-attention", {}, "does not know how to rotate"),
    "a cap": ("gemma2", "expected-attention", {}, "caps the logits"),
    "no gate": ("gemma2", "fastkvzip", {}, "No fastkvzip gate ships"),
    "codes": ("deepseek_v2", "snapkv", {"kv_dtype": "int8"}, "in the model's dtype"),
    "no adapter": ("gemma2", "snapkv", {"adapter": "auto"}, "No adapter for snapkv ships"),
}


@pytest.mark.parametrize("case", LATE_REFUSALS)
def test_what_a_model_cannot_do_is_refused_before_the_first_cell(case, tiny_tokenizer, tmp_path):
    kind, evictor, fields, message = LATE_REFUSALS[case]
    if kind == "deepseek_v2" and not LATENT:
        pytest.skip("transformers caches latents since it has states")
    name = save_model(kind, tmp_path / "model", tiny_tokenizer)
    cells = grid(name, "plain", ("knorm",), ("0.5",))
    cells.append(Cell(name, "plain", evictor, "0.5", **fields))
    with pytest.raises(RestoreKVError, match=message):
        run_grid(cells, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.json*"))


def test_a_grid_that_is_finished_but_for_one_job_reads_nothing_twice(world, counted, tmp_path):
    cells = grid(model_of(world), "plain:contexts=1", ("kvzip", "kvzip:chunk=32"), ("0.5",))
    run_grid(cells[:2], tmp_path)
    run_grid(cells, tmp_path)
    assert counted == {"prefill": 2, "score": 2, "restore": 0}


def test_an_offset_with_an_adapter_is_refused_before_a_model_is_loaded(world, tmp_path):
    """The cells of the evictor alone can have an offset, and would run first."""
    both = (None, str(world / "adapter"))
    cells = grid(model_of(world), "plain", ("knorm",), ("0.5",), both)
    cells = [cells[0], *(replace(cell, offset=8) for cell in cells[1:])]
    with pytest.raises(RestoreKVError, match="evaluate knorm without an adapter"):
        run_grid(cells, tmp_path / "out")
    assert not worker.OPEN_MODELS and not (tmp_path / "out").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tiny_tokenizer, tmp_path):
    name = save_model("gemma2", tmp_path / "model", load_model("tiny")[1])
    with pytest.raises(RestoreKVError, match="pass the tokenizer that belongs to the model"):
        run_grid(grid(name, "plain"), tmp_path / "out")


def test_the_full_cache_alone_is_not_scored(world, counted, tmp_path):
    cell = Cell.full_cache(model=model_of(world), benchmark="plain")
    (result,) = run_grid([cell], tmp_path)
    assert counted == {"prefill": 2, "score": 0, "restore": 0}
    # What is recorded of a full cache does not change with the library's default.
    assert result.identity["on_small_budget"] == cell.on_small_budget == "error"


def test_answers_are_those_of_compress(world, tmp_path):
    cells = grid(
        model_of(world), "plain", ("kvzip", "knorm"), ("0.5", "0.3"), (None, str(world / "adapter"))
    )
    model, tokenizer = load_model(model_of(world))
    samples, stops = (
        list(Plain().load_samples(tokenizer, "kvpress")),
        get_stop_ids(model, tokenizer),
    )
    for result in run_grid(cells, tmp_path):
        cell = result.cell
        how = {"evictor": "knorm", "adapter": None} if cell.evictor == "full" else vars(cell)
        how = {key: how[key] for key in ("evictor", "adapter")} | {
            "prefix_policy": "counted",
            "on_small_budget": "fewer",
        }
        for sample, line in zip(samples, result.lines, strict=True):
            compressed = compress_with(
                model, tokenizer, sample.context, ratio=cell.ratio, separator="", **how
            )
            prompts = [
                encode_question(tokenizer, compressed.context, asked.text)
                for asked in sample.questions
            ]
            ids_of_answers = generate_ids(
                model, tokenizer, compressed.cache, prompts, 4, first_may_stop=False
            )
            said = [decode_answer(tokenizer, ids.tolist(), stops) for ids in ids_of_answers]
            assert [answer["prediction"] for answer in line["answers"]] == said
            assert (
                line["pairs_with_prefix"] == compressed.cache.pairs_held
                and line["bytes"] == compressed.cache.nbytes
            )
            assert (
                line["restore_tokens"]
                == compressed.cache.restore_length
                == (3 if cell.restored else 0)
            )


def test_the_full_cache_answers_once_for_all_evictors(world, tmp_path, monkeypatch):
    """But again about other contexts, and as another protocol asks."""
    calls = []

    def generate(*args, **options):
        calls.append(args)
        return generate_ids(*args, **options)

    monkeypatch.setattr(worker, "generate_ids", generate)
    cells = grid(model_of(world), "plain:contexts=2", ("kvzip", "knorm"), ("0.3",))
    first, *others = run_grid(cells, tmp_path / "both")
    assert len(calls) == 2 + 2 * 2
    seconds = [json.loads(line) for line in (first.folder / SECONDS).read_text().splitlines()]
    assert all(line["ask"] > 0 for line in seconds)

    calls.clear()
    own = run_grid(cells[2:], tmp_path / "own")
    assert len(calls) == 2 and own[0].lines == others[1].lines

    calls.clear()
    more = [replace(cell, benchmark="plain:contexts=3") for cell in cells]
    run_grid(more, tmp_path / "more")
    assert len(calls) == 1 + 2 * 3

    calls.clear()
    run_grid([replace(cell, protocol="kvzip") for cell in cells], tmp_path / "protocol")
    assert len(calls) == 2 + 2 * 2


def test_small_caches_are_asked_at_once(world, tmp_path, monkeypatch):
    """As many as hold together no more than the full cache; what is kept does not change."""
    batches = []

    def generate(model, tokenizer, caches, *rest, **options):
        batches.append(list(dict.fromkeys(caches)))
        return generate_ids(model, tokenizer, caches, *rest, **options)

    monkeypatch.setattr(worker, "generate_ids", generate)
    benchmark = "plain:contexts=1,words=200"
    cells = grid(model_of(world), benchmark, ratios=RATIOS, adapters=(None, str(world / "adapter")))
    together = run_grid(cells, tmp_path / "together")
    sizes = [[cache.pairs_held for cache in batch] for batch in batches]
    full = sizes[0][0]
    assert [len(batch) for batch in sizes[:1]] == [1] and max(map(len, sizes)) > 1
    assert all(sum(batch) <= full for batch in sizes if len(batch) > 1)
    assert sum(map(len, sizes)) == len(cells)
    # Where there is little room, they are asked one after the other.
    batches.clear()
    monkeypatch.setattr(worker, "MOST_BYTES", 0)
    apart = run_grid(cells, tmp_path / "apart")
    # The full cache's answers are remembered.
    assert [len(batch) for batch in batches] == [1] * (len(cells) - 1)
    assert [result.lines for result in apart] == [result.lines for result in together]
    # Each cell alone has the same lines.
    for result in together:
        (alone,) = run_grid([result.cell], tmp_path / result.cell.name)
        assert alone.lines == result.lines


@pytest.mark.filterwarnings("ignore:The adapter learned to read full caches")
def test_kv_dtype_and_streaming_chunk_are_fields_of_a_cell(world, counted, tmp_path, monkeypatch):
    """One preparation serves every `kv_dtype`; a streamed cell reads the context for itself, as
    `compress` does.
    """
    model, tokenizer = load_model(model_of(world))
    cells = grid(
        model_of(world),
        "plain:contexts=1",
        ratios=("0.5",),
        adapters=(None, str(world / "adapter")),
    )
    plain = cells[1:]
    run_grid([*cells, *(replace(cell, kv_dtype="int8") for cell in plain)], tmp_path)
    assert counted == {"prefill": 1, "score": 1, "restore": 1}
    streamed = [
        replace(cell, streaming_chunk=20, kv_dtype=kv_dtype)
        for kv_dtype in ("model", "fp8")
        for cell in plain
    ]
    passes, real = [], Stream.run
    monkeypatch.setattr(
        Stream, "run", lambda self: passes.append(self.source.streaming_chunk) or real(self)
    )
    done = run_grid(streamed, tmp_path)
    assert passes == [20, 20], "one alone and one restored, which serve both dtypes"
    (sample,) = Plain(contexts=1).load_samples(tokenizer, "kvpress")
    for result in done:
        cell, (line,) = result.cell, result.lines
        how = {
            key: getattr(cell, key)
            for key in (
                "evictor",
                "adapter",
                "ratio",
                "kv_dtype",
                "streaming_chunk",
                "on_small_budget",
            )
        }
        compressed = compress_with(
            model, tokenizer, sample.context, prefix_policy="counted", separator="", **how
        )
        assert (
            compressed.manifest.streaming_chunk == 20 and compressed.cache.nbytes == line["bytes"]
        )
        texts = compressed.ask([question.text for question in sample.questions], max_new_tokens=4)
        assert [answer["prediction"].strip() for answer in line["answers"]] == [
            text.strip() for text in texts
        ]
    labels = {
        row["label"] for row in make_rows(results.load_results(tmp_path)) if not row["restored"]
    }
    assert labels == {
        "",
        "int8",
        *(f"streamed 20 tokens at a time{more}" for more in ("", ", fp8")),
    }


def test_scores_are_means_over_tasks(world, tmp_path):
    result = run_grid(grid(model_of(world), "plain:contexts=3", ratios=("0.5",)), tmp_path)[1]
    by_task = {
        task: [a.score for a in result.answers if a.task == task] for task in ("task_0", "task_1")
    }
    means = [100 * sum(scores) / len(scores) for scores in by_task.values()]
    assert result.summary["score"] == pytest.approx(sum(means) / 2)
    assert [part["score"] for part in result.summary["tasks"].values()] == pytest.approx(means)
    assert result.summary["questions"] == 9 and result.summary["samples"] == 3


def test_nothing_is_asked_again(world, counted, tmp_path):
    cells = grid(model_of(world), "plain")
    run_grid(cells, tmp_path)
    before, counted["prefill"] = contents(tmp_path), 0
    assert [result.cell for result in run_grid([*cells, *cells], tmp_path)] == [*cells, *cells]
    assert contents(tmp_path) == before and counted["prefill"] == 0


def test_a_further_ratio_and_evictor_reuse_what_is_there(world, counted, tmp_path):
    run_grid(grid(model_of(world), "plain"), tmp_path)
    before = contents(tmp_path)
    counted.update(prefill=0, score=0)
    more = grid(model_of(world), "plain", ("kvzip", "knorm"), ("0.5", "0.3", "0.2"))
    run_grid(more, tmp_path)
    after = contents(tmp_path)
    assert before.items() <= after.items() and len(after) == 3 * len(more)
    assert counted == {"prefill": 5, "score": 2, "restore": 0}, (
        "two contexts for kvzip at 0.2, two for knorm, and one to find out whether knorm works"
    )


def test_the_full_cache_does_not_wait_for_an_evictor(world, counted, tmp_path):
    """It rides with the first of them that comes, once."""
    run_grid(grid(model_of(world), "plain")[1:], tmp_path)
    counted.update(prefill=0, score=0)
    run_grid(grid(model_of(world), "plain"), tmp_path)
    assert counted == {"prefill": 2, "score": 0, "restore": 0}


def test_a_half_written_line_is_dropped(world, tmp_path):
    cells = grid(model_of(world), "plain")
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    run_grid(cells, whole)
    for result in run_grid(cells, torn):
        answers = result.folder / results.ANSWERS
        lines = answers.read_bytes().splitlines(keepends=True)
        answers.write_bytes(lines[0] + lines[1][: len(lines[1]) // 2])
        (result.folder / results.SUMMARY).unlink()
    assert not any(result.done or len(result.lines) != 1 for result in results.load_results(torn))
    run_grid(cells, torn)
    assert contents(torn) == contents(whole)


def test_a_context_that_was_lost_comes_back_to_its_place(world, tmp_path):
    """So that the cells of a run can still be compared answer by answer."""
    cells = grid(model_of(world), "plain")
    whole, holed = tmp_path / "whole", tmp_path / "holed"
    run_grid(cells, whole)
    lost = run_grid(cells, holed)[-1].folder / results.ANSWERS
    lines = lost.read_bytes().splitlines(keepends=True)
    lost.write_bytes(b"".join(lines[1:]))
    run_grid(cells, holed)
    assert lost.read_bytes().splitlines(keepends=True)[0] == lines[0]
    assert load_grid(holed)


def test_lines_are_added_to_a_long_file_without_reading_it(tmp_path):
    """Where the end is whole; thousands of contexts would otherwise be read thousands of times."""
    path, wanted = tmp_path / "lines", b"x" * 9 + b"\n"
    with path.open("wb") as file:
        file.truncate(2**40)  # a hole, which takes hours to read
        file.seek(0, 2)
        file.write(wanted)
    append_line(path, {"sample": "ünï"})
    with path.open("rb") as file:
        file.seek(2**40)
        assert file.read() == wanted + '{"sample": "ünï"}\n'.encode()
    path.write_bytes(b"whole\nhalf")
    append_line(path, {})
    assert path.read_bytes() == b"whole\n{}\n"


def test_only_the_cells_that_lack_a_context_are_asked(world, tmp_path, monkeypatch):
    cells = grid(model_of(world), "plain")
    first = run_grid(cells, tmp_path)[1]
    (first.folder / results.SUMMARY).unlink()
    answers = first.folder / results.ANSWERS
    answers.write_bytes(answers.read_bytes().splitlines(keepends=True)[0])
    asked, real = [], worker.Worker._score_answers

    def scored(self, sample, *given):
        asked.append(sample.id)
        return real(self, sample, *given)

    monkeypatch.setattr(worker.Worker, "_score_answers", scored)
    run_grid(cells, tmp_path)
    assert asked == ["1"]


def test_a_folder_that_another_run_fills_is_refused(world, tmp_path):
    """Two runs would ask the same contexts and both add them."""
    cells, folder = grid(model_of(world), "plain"), tmp_path / "run"
    folder.mkdir()
    with (
        file_lock(folder / ".lock") as mine,
        pytest.raises(RestoreKVError, match="Another process is at work in") as raised,
    ):
        assert mine
        run_grid(cells, folder)
    assert one_sentence(raised) and not (folder / results.CELLS).exists()
    assert all(result.done for result in run_grid(cells, folder))


@pytest.mark.parametrize("file", [results.ANSWERS, results.SUMMARY])
def test_a_damaged_file_is_told(world, tmp_path, file):
    path = run_grid(grid(model_of(world), "plain"), tmp_path)[1].folder / file
    path.write_bytes(b"\0" * 9 + b"\n" + path.read_bytes())
    with pytest.raises(RestoreKVError, match=f"{file}.* is damaged") as raised:
        make_rows(run_grid(grid(model_of(world), "plain"), tmp_path))
    assert one_sentence(raised)


@pytest.mark.parametrize(
    "damage", ["", "[]", '{"cell": {"model": "x"}, "facts": {}}', '{"facts": {}}']
)
def test_a_foreign_folder_is_refused(world, tmp_path, damage):
    cells = grid(model_of(world), "plain")
    (tmp_path / results.CELLS / cells[0].name).mkdir(parents=True)
    (tmp_path / results.CELLS / cells[0].name / results.CELL).write_text(damage)
    with pytest.raises(RestoreKVError, match="holds no cell of restorekv") as raised:
        run_grid(cells, tmp_path)
    assert one_sentence(raised)


def one_sentence(raised):
    return "\n" not in str(raised.value) and str(raised.value).endswith(".")


def test_another_model_of_the_same_name_is_refused(world, tmp_path, tiny_tokenizer):
    place = tmp_path / "model"
    for seed in (0, 1):
        build_model("qwen3", seed=seed).save_pretrained(place)
        tiny_tokenizer.save_pretrained(place)
        worker.OPEN_MODELS.clear()
        if seed == 0:
            run_grid(grid(str(place), "plain"), tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(
        RestoreKVError, match=r"was made with fingerprint \w+ \(now \w+\)"
    ) as raised:
        run_grid(grid(str(place), "plain"), tmp_path / "run")
    assert one_sentence(raised) and contents(tmp_path / "run") == before


@pytest.mark.parametrize("change", ["stops", "tokenizer", "context_limit"])
def test_a_model_folder_that_ends_splits_or_cuts_texts_otherwise_is_refused(
    world, tmp_path, tiny_tokenizer, change
):
    """The weights are the same, and the answers are others."""
    cells = grid(model_of(save_world(tmp_path, tiny_tokenizer)), "plain")
    run_grid(cells, tmp_path / "run")
    if change == "stops":
        ids = [tiny_tokenizer.eos_token_id, *tiny_tokenizer.encode("seven")]
        GenerationConfig(eos_token_id=ids).save_pretrained(tmp_path / "model")
    else:
        tokenizer = copy.deepcopy(tiny_tokenizer)
        if change == "tokenizer":
            tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
        else:
            tokenizer.model_max_length = 20
        tokenizer.save_pretrained(tmp_path / "model")
    worker.OPEN_MODELS.clear()
    with pytest.raises(RestoreKVError, match=f"was made with {change} .* \\(now ") as raised:
        run_grid(cells, tmp_path / "run")
    assert one_sentence(raised)


def test_facts_that_an_earlier_result_lacks_are_not_compared():
    before = {"device": "cpu"}
    later = {"stops": [2], "tokenizer": "1f", "positions": 4096, "context_limit": 512}
    assert not describe_changes(before, {"device": "cpu", **later})
    assert describe_changes(before, {"device": "cpu", "code": "1f"})
    assert describe_changes(before | {"stops": [2]}, {"device": "cpu", "stops": [3]})


def test_another_adapter_of_the_same_name_is_refused(world, tmp_path):
    place, model = tmp_path / "adapter", build_model("qwen3")
    cells = grid(model_of(world), "plain", adapters=(str(place),))
    for seed in (0, 1):
        adapter = RestoreAdapter.create(model, 3, rank=2, seed=seed)
        adapter.record_training(evictor="kvzip", prefix_policy="counted", ratio_range=(0.1, 0.9))
        adapter.save_pretrained(place)
        if seed == 0:
            run_grid(cells, tmp_path / "run")
    with pytest.raises(RestoreKVError, match="was made with adapter") as raised:
        run_grid(cells, tmp_path / "run")
    assert one_sentence(raised)


def test_an_evictor_whose_file_has_changed_is_refused(world, tmp_path, monkeypatch):
    """Also one of this package, whose version does not move while it is worked on."""
    cells = grid(model_of(world), "plain")
    run_grid(cells, tmp_path)
    before = contents(tmp_path)
    read = spec._read_source
    monkeypatch.setattr(spec, "_read_source", lambda cls: read(cls) + "# changed")
    with pytest.raises(RestoreKVError, match=r"was made with code \w+ \(now \w+\)") as raised:
        run_grid(cells, tmp_path)
    assert one_sentence(raised) and contents(tmp_path) == before


def test_what_an_older_evictor_answered_can_be_set_aside(world, tmp_path, monkeypatch):
    cells = grid(model_of(world), "plain")
    before = run_grid(cells, tmp_path)
    answers = [(each.folder / results.ANSWERS).read_text() for each in before]
    read = spec._read_source
    for round_ in (1, 2):
        edited = f"# changed {round_} times"
        monkeypatch.setattr(
            spec,
            "_read_source",
            lambda cls, edited=edited: read(cls) + edited * issubclass(cls, KVzip),
        )
        run_grid(cells, tmp_path, set_aside=True)
        # Cells of the full cache have no evictor, and stay.
        aside = sorted(each.name for each in (tmp_path / results.SET_ASIDE).iterdir())
        moved = [each for each in before if each.cell.evictor != FULL]
        assert aside == sorted(
            f"{each.folder.name}-{n}" for each in moved for n in range(1, round_ + 1)
        )
    for each, old in zip(before, answers, strict=True):
        # The source's digest changed and its scores did not, so the answers are the same again.
        assert (each.folder / results.ANSWERS).read_text() == old
        if each in moved:
            kept = tmp_path / results.SET_ASIDE / f"{each.folder.name}-1" / results.ANSWERS
            assert kept.read_text() == old


def test_other_contexts_are_refused(world, tmp_path, monkeypatch):
    run_grid(grid(model_of(world), "plain"), tmp_path)
    monkeypatch.setattr("tests.helpers.grid_world.WORDS", WORDS[::-1])
    with pytest.raises(RestoreKVError, match="was made with benchmark") as raised:
        run_grid(grid(model_of(world), "plain"), tmp_path)
    assert one_sentence(raised)


def test_answers_to_contexts_that_are_not_asked_are_refused(world, tmp_path):
    cells = grid(model_of(world), "plain")
    result = run_grid(cells, tmp_path)[1]
    answers = result.folder / results.ANSWERS
    line = json.loads(answers.read_text().splitlines()[0]) | {"sample": "elsewhere"}
    answers.write_text(json.dumps(line) + "\n")
    with pytest.raises(RestoreKVError, match="answers to other contexts"):
        run_grid(cells, tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"benchmark": "plain:contexts=0"}, "has no contexts"),
        ({"benchmark": "nonsense"}, "no benchmark 'nonsense'"),
        ({"protocol": "vllm"}, "no protocol 'vllm'"),
        ({"evictor": "kvzop"}, "no evictor 'kvzop'"),
        ({"ratio": "1.5"}, "ratio"),
        ({"ratio": "much"}, "ratio"),
        ({"prefix_policy": "some"}, "prefix_policy"),
        ({"model": "no/such/folder"}, "no/such/folder"),
        ({"adapter": "no/such/adapter"}, "no/such/adapter"),
        ({"max_context": 3}, "no room"),
        ({"dtype": "float7"}, "dtype must be one of"),
        ({"kv_dtype": "int4"}, "kv_dtype must be one of"),
        ({"streaming_chunk": 16, "evictor": "streaming"}, "leave out streaming_chunk"),
        (
            {"streaming_chunk": 16, "evictor": "am-fast", "prefix_policy": "free"},
            "leave out streaming_chunk",
        ),
    ],
)
def test_what_cannot_be_carried_out_is_refused_in_one_sentence(world, tmp_path, changed, said):
    cells = grid(model_of(world), "plain", ratios=("0.5",))
    with pytest.raises(RestoreKVError, match=said) as raised:
        run_grid([replace(cell, **changed) for cell in cells[1:]], tmp_path)
    assert one_sentence(raised)
    assert not list(tmp_path.rglob(results.ANSWERS))


def test_what_cannot_stream_is_refused_before_anything_is_asked(world, tmp_path):
    cells = grid(model_of(world), "plain", ("streaming",))
    with pytest.raises(RestoreKVError, match="scores a context as a whole"):
        run_grid([cells[0], *(replace(cell, streaming_chunk=16) for cell in cells[1:])], tmp_path)
    assert not list(tmp_path.rglob(results.ANSWERS))


def test_nothing_to_do_is_refused(tmp_path):
    with pytest.raises(RestoreKVError, match="nothing to evaluate"):
        run_grid([], tmp_path)
    with pytest.raises(RestoreKVError, match="holds no results"):
        results.load_results(tmp_path)


def test_cells_are_told_apart_by_everything_in_them():
    cell = Cell("org/model", "plain", "kvzip:chunk=5", "0.5")
    others = {
        "model": "org/other",
        "benchmark": "plain:contexts=3",
        "evictor": "kvzip",
        "ratio": "0.4",
        "adapter": "a",
        "restore_tokens": 3,
        "protocol": "kvzip",
        "prefix_policy": "free",
        "on_small_budget": "clip",
        "allocation": "per-head",
        "restore_from": "evicted",
        "offset": 8,
        "max_context": 50,
        "dtype": "bfloat16",
        "kv_dtype": "int8",
        "streaming_chunk": 512,
    }
    assert others.keys() == vars(cell).keys()
    names = {replace(cell, **{field: value}).name for field, value in others.items()} | {cell.name}
    assert len(names) == 17 and all(
        len(name) < 200 and "/" not in name and ":" not in name for name in names
    )


@pytest.mark.parametrize("change", [{"kv_dtype": "int8"}, {"ratio": "0.3"}, {"adapter": "auto"}])
def test_a_full_cache_that_is_none_is_refused(change):
    """Its answers are those of every pair as computed, so its bytes would be of something else."""
    full = Cell.full_cache(model="m", benchmark="plain")
    with pytest.raises(RestoreKVError, match="keeps every pair as the model computes it"):
        replace(full, **change)
    assert replace(full, ratio="1.0").ratio_value == 1


def test_a_grid_has_one_place_for_every_setting():
    """Its cells would be of the arguments, and only the full cache's of what `common` says."""
    with pytest.raises(RestoreKVError, match="not kv_dtype; a Grid has an argument"):
        Grid(["m"], [("kvzip", None)], ["tiny"], common={"kv_dtype": "int8"})


def test_jobs_share_what_can_be_shared():
    full = Cell.full_cache(model="m", benchmark="plain")
    cells = [full, *(Cell("m", "plain", evictor, "0.5") for evictor in ("kvzip", "knorm"))]
    cells += [
        replace(cells[1], ratio="0.3", offset=8),
        replace(cells[1], adapter="a"),
        replace(cells[1], dtype="x"),
    ]
    grouped = group_jobs([*cells, *cells])
    assert [len(job.cells) for job in grouped] == [4, 1, 1]
    assert [job.representative.evictor for job in grouped] == ["kvzip", "knorm", "kvzip"]
    assert grouped[0].cells[-1] is full, "what shares its scores bears their time"


def test_real_pairs_differ_between_protocols_as_their_budgets_do(world, tmp_path):
    """B = floor(r T_b L H): KVzip's own evaluation keeps the template beside it, kvpress lets it
    compete.
    """
    both = [
        cell
        for name in ("kvpress", "kvzip")
        for cell in grid(model_of(world), "plain", protocol=name)
    ]
    for result in run_grid(both, tmp_path):
        cell, heads = result.cell, 3 * 2
        counted = cell.protocol == "kvpress" and cell.evictor != "full"
        assert result.identity["protocol"]["name"] == cell.protocol and len(result.lines) == 2
        for line in result.lines:
            competing = line["tokens"] + (line["prefix"] if counted else 0)
            assert line["pairs"] == floor(Fraction(cell.ratio) * competing * heads)
            assert line["pairs_with_prefix"] == line["pairs"] + (
                0 if counted else heads * line["prefix"]
            )
