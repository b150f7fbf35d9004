"""Reading a mixture back: whatever is wrong is refused by file and row. The command line does it
all offline.
"""

import hashlib
import json
import shutil
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from restorekv.cli.data import run as run_data
from restorekv.data.build import build_mixture
from restorekv.data.config import BuildConfig
from restorekv.data.mixture import MixtureContext, read_mixture, summarize_sources
from restorekv.data.table import PAPER, compute_figures
from restorekv.errors import RestoreKVError
from tests.helpers.cli_world import cli
from tests.helpers.data_world import (
    flags,
    messages,
    paper,
    settings,
    text,
    write_jsonl,
    write_sources,
)
from tests.helpers.models import build_model


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    return write_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def made(files, tiny_tokenizer, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("made") / "data"
    build_mixture(build_model("qwen3"), tiny_tokenizer, settings(files), out)
    return out


@pytest.fixture
def data(made, tmp_path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(made, tmp_path / "data"))


def edit(folder: Path, row: int, honest: bool = False, **values: object) -> None:
    """Changes a row of pg19.parquet (counted from 1); `honest` makes the checksum fit."""
    path = folder / "pg19.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[row - 1] |= values
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    if honest:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["sources"]["pg19"]["file"]["sha256"] = hashlib.sha256(
            path.read_bytes()
        ).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("honest", [False, True])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"answer": " "}, "has an empty answer"),
        ({"answer_ids": []}, "has an empty answer"),
        ({"answer_ids": [3, -1]}, "has an answer id below 0"),
        ({"answer_ids": [3, None]}, "lacks a valid answer_ids"),
        ({"context": ""}, "has an empty context"),
        ({"context_tokens": 1001}, "has a context of 1001 tokens, more than 1000"),
        ({"context_tokens": None}, "lacks a valid context_tokens"),
        ({"license": "all rights reserved"}, "has the unknown license 'all rights reserved'"),
        ({"license": None}, "lacks a valid license"),
        ({"question": "\n\n"}, "has an empty question"),
        ({"kind": "riddle"}, "has the unknown kind 'riddle'"),
        ({"source": "flan"}, "belongs to 'flan', not 'pg19'"),
    ],
)
def test_a_bad_row_is_named(values, message, honest, data):
    edit(data, 7, honest, **values)
    with pytest.raises(RestoreKVError, match=rf"pg19\.parquet, row 7 .*{message}"):
        read_mixture(data)


def test_any_other_change_is_damage(data, made):
    edit(data, 7, answer="Another answer.")
    with pytest.raises(
        RestoreKVError, match=r"pg19\.parquet is not the file that the manifest describes"
    ):
        read_mixture(data)
    edit(data, 7, True, answer="Another answer.")
    assert "Another answer." in [
        answer for context in read_mixture(data)[0] for answer in context.answers
    ]
    path = data / "flan.parquet"
    whole = path.read_bytes()
    for spoilt in (whole[: len(whole) // 2], b"", b"not parquet"):
        path.write_bytes(spoilt)
        with pytest.raises(RestoreKVError, match=r"flan\.parquet is damaged or not a parquet file"):
            read_mixture(data)
    path.write_bytes(whole)
    lacking = pq.read_table(data / "longalpaca.parquet").drop_columns(["answer_ids"])
    pq.write_table(lacking, data / "longalpaca.parquet")
    with pytest.raises(RestoreKVError, match=r"longalpaca\.parquet, row 1 lacks a valid answer"):
        read_mixture(data)
    (data / "longalpaca.parquet").unlink()
    with pytest.raises(RestoreKVError, match=r"longalpaca\.parquet is missing"):
        read_mixture(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=2), "has version 2, not 1"),
        (lambda m: m.update(format="other"), "not a manifest of restorekv's data"),
        (lambda m: m.pop("sources"), r"is damaged \(its sources\)"),
        (lambda m: m.pop("version"), "damaged or not a manifest"),
        (
            lambda m: m["sources"]["flan"].update(examples=1),
            "not the file that the manifest describes",
        ),
        (lambda m: m.update(seed=True), r"is damaged \(its seed\); build the data again"),
        (lambda m: m.update(longest="0"), r"\(its longest\)"),
        (lambda m: m.update(sources=[]), r"\(its sources\)"),
        (lambda m: m["sources"]["flan"].pop("rows"), r"\(its sources\.flan\.rows\)"),
        (lambda m: m["sources"]["flan"].update(examples=0), r"\(its sources\.flan\.examples\)"),
        (
            lambda m: m["sources"]["flan"].update({"from": {"hub": "some/set", "files": []}}),
            r"its sources\.flan\.revision",
        ),
        (
            lambda m: m["sources"]["flan"].update({"from": {"files": ["a"]}}),
            r"its sources\.flan\.files",
        ),
        (
            lambda m: m["sources"]["flan"]["file"].update(name="../a.parquet"),
            "its sources.flan.file has the wrong name",
        ),
        (lambda m: m["exclusion"].update(files=["a"]), r"\(its exclusion\)"),
        (lambda m: m["licenses"].update(MIT="1"), r"\(its licenses\)"),
    ],
)
def test_foreign_manifests_are_refused(change, message, data):
    manifest = json.loads((data / "manifest.json").read_text())
    change(manifest)
    (data / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RestoreKVError, match=message):
        read_mixture(data)
    (data / "manifest.json").write_text("{")
    with pytest.raises(RestoreKVError, match=r"manifest\.json is damaged"):
        read_mixture(data)
    (data / "manifest.json").unlink()
    with pytest.raises(RestoreKVError, match="give a folder of restorekv data build"):
        read_mixture(data)


def test_data_of_another_model_or_tokenizer_is_refused(made, tiny_tokenizer):
    model = build_model("qwen3")
    assert read_mixture(made, model, tiny_tokenizer)[0] == read_mixture(made)[0]
    with pytest.raises(RestoreKVError, match="with a different model"):
        read_mixture(made, build_model("qwen3", seed=1), tiny_tokenizer)
    with pytest.raises(RestoreKVError, match="with a different model"):
        read_mixture(
            made,
            build_model("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 5.0}),
            tiny_tokenizer,
        )
    template = tiny_tokenizer.chat_template
    try:
        tiny_tokenizer.chat_template = template.replace("assistant", "helper")
        with pytest.raises(RestoreKVError, match="with a different chat template"):
            read_mixture(made, model, tiny_tokenizer)
    finally:
        tiny_tokenizer.chat_template = template


def test_answers_that_ended_at_another_eos_are_refused(data, files, tiny_tokenizer):
    model = build_model("qwen3")
    model.generation_config.eos_token_id = [2, 7]
    with pytest.raises(RestoreKVError, match=r"a different set of ids .* \(\[2\], not \[2, 7\]\)"):
        read_mixture(data, model, tiny_tokenizer)
    with pytest.raises(RestoreKVError, match=r"the model's stops \[2\] \(now \[2, 7\]\)"):
        build_mixture(model, tiny_tokenizer, settings(files), data, resume=True)
    # Data of earlier versions does not say which ids ended its answers.
    manifest = json.loads((data / "manifest.json").read_text())
    del manifest["model"]["stops"]
    (data / "manifest.json").write_text(json.dumps(manifest))
    read_mixture(data, model, tiny_tokenizer)
    build_mixture(model, tiny_tokenizer, settings(files), data, resume=True)


def test_longer_contexts_than_the_manifest_allows_are_refused(data):
    manifest = json.loads((data / "manifest.json").read_text()) | {"longest": 50}
    (data / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RestoreKVError, match="more than 50"):
        read_mixture(data)


def test_the_record_tells_origin_counts_and_who_wrote(made, files):
    manifest = read_mixture(made)[1]
    told = summarize_sources(manifest)
    assert json.loads(json.dumps(told)) == told
    assert [row["source"] for row in told] == ["LongAlpaca", "PG-19", "Tulu-3 FLAN"]
    rows = pq.read_table(made / "pg19.parquet").to_pylist()
    assert told[1] == {
        "source": "PG-19",
        "dataset": "pg19.parquet",
        "sha256": hashlib.sha256(Path(files["pg19"]).read_bytes()).hexdigest(),
        "seed": 0,
        "contexts": len({row["context"] for row in rows}),
        "examples": len(rows),
        "licenses": {"apache-2.0": len(rows)},
        "made": "questions and answers by the model itself",
    }
    assert told[2]["made"] == "answers by the model itself"
    one, two = {"name": "a.txt", "sha256": "1f"}, {"name": "b.txt", "sha256": "2e"}
    manifest["sources"]["pg19"]["from"] = {"given": "/home/me/books", "files": [one, two]}
    manifest["sources"]["flan"]["from"] = {"given": "a/b@v1", "hub": "a/b", "revision": "c0ffee"}
    _, books, flan = summarize_sources(manifest)
    assert (books["dataset"], books["sha256"]) == ("2 files", hashlib.sha256(b"1f2e").hexdigest())
    assert (flan["dataset"], flan["revision"]) == ("a/b", "c0ffee") and "/home" not in json.dumps(
        [books, flan]
    )


def test_the_table_counts_samples(made):
    contexts = [
        MixtureContext("a", ("q",) * 5, ("x",) * 5, ((1,),) * 5, "pg19", "apache-2.0", "a", 100),
        MixtureContext("b", ("q",), ("x",), ((1,),), "pg19", "apache-2.0", "b", 40),
        MixtureContext("c", ("",), ("x",), ((1,),), "flan", "odc-by", "c", 10),
    ]
    sources = {
        "pg19": {"title": "PG-19", "licenses": {"apache-2.0": 6}},
        "flan": {"title": "Tulu-3 FLAN", "licenses": {"odc-by": 1}},
    }
    rows = compute_figures(contexts, {"sources": sources, "licenses": {}})
    assert [(row["samples"], row["mean"], row["shortest"], row["longest"]) for row in rows] == [
        (6, 90, 40, 100),
        (1, 10, 10, 10),
        (7, 550 / 7, 10, 100),
    ]
    assert rows[0]["paper"] == {"samples": 2260, "mean": 3071, "shortest": 3071, "longest": 3072}


def test_the_papers_table_adds_up():
    parts = [PAPER[name] for name in ("longalpaca", "pg19", "flan")]
    samples, mean, shortest, longest = PAPER["total"]
    assert samples == sum(part[0] for part in parts)
    assert mean == round(sum(part[0] * part[1] for part in parts) / samples)
    assert (shortest, longest) == (min(part[2] for part in parts), max(part[3] for part in parts))


def test_every_setting_is_a_flag_with_help():
    told = cli("data", "build", "--help")
    assert told.code == 0, told.err
    assert set(run_data.__annotations__) > {field.name for field in fields(BuildConfig)}
    assert all(field.metadata["help"].endswith(".") for field in fields(BuildConfig))


def test_the_command_builds_and_shows_with_the_tiny_model(tmp_path):
    long = tmp_path / "long.json"
    long.write_text(json.dumps([{"instruction": paper(text("long", 90)), "output": "x"}]))
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text(text("book", 300))
    flan = write_jsonl(tmp_path / "flan.jsonl", [{"id": "f", "messages": messages(text("f", 60))}])
    config = settings(
        {"longalpaca": str(long), "pg19": str(tmp_path / "books"), "flan": str(flan)},
        books=1,
        chunks=1,
        documents=1,
        examples=1,
        shortest=64,
    )
    out, figures_file = tmp_path / "data", tmp_path / "figures.json"
    done = cli("data", "build", "--model", "tiny", "--out", out, *flags(config))
    assert done.code == 0 and "1/1 Tulu-3 FLAN" in done.err and "cc-by-nc-4.0" in done.out, done.err
    shown = cli("data", "show", out, "--json", figures_file)
    assert shown.code == 0 and "(6,248)" in shown.out and "(4,236)" in shown.out and not shown.err
    told = json.loads(figures_file.read_text())
    assert [row["source"] for row in told["rows"]] == ["longalpaca", "pg19", "flan", "total"]
    assert told["manifest"]["model"]["name"] == "tiny"
    sources = told["manifest"]["sources"].values()
    assert not any(source["dropped"] or source["dropped_attempts"] for source in sources)
    assert "Left out" not in shown.out, "nothing was"
    assert (
        told["rows"][-1]["samples"]
        == sum(len(context.questions) for context in read_mixture(out)[0])
        > 2
    )


def test_mistakes_on_the_command_line_are_one_sentence(files, tmp_path, monkeypatch):
    def refused(words: str, *args: object, code: int = 1) -> None:
        result = cli("data", *args)
        assert (
            result.code == code and result.err.startswith("error: ") and result.err.count("\n") == 1
        ), result
        assert words in result.err and not result.out, result.err

    out = tmp_path / "data"
    refused("Missing command", code=2)
    refused("No such command 'bake'", "bake", code=2)
    refused("--out", "build", code=2)
    refused("one of paper, permissive", "build", "--out", out, "--mixture", "free")
    # The last one won without a word.
    refused(
        "--permissive is short for --mixture permissive, but --mixture is corpus",
        *("build", "--out", out, "--permissive", "--mixture", "corpus"),
    )
    refused("chunk must be at least 1", "build", "--out", out, "--licenses", "mit", "--chunk", 0)
    refused(
        "There is no evaluation file or folder nowhere",
        "build",
        "--out",
        out,
        "--exclude",
        "nowhere",
    )
    refused(
        "--corpus is for --mixture corpus; add that, or leave out --corpus.",
        *("build", "--out", out, "--corpus", "own.jsonl"),
    )
    refused("is a file", "build", "--out", files["flan"])
    refused("holds other files", "build", "--out", tmp_path.parent)
    refused("give a folder of restorekv data build", "show", tmp_path)
    with monkeypatch.context() as patch:
        # A path is checked before the model, which may have to be prepared first, is loaded.
        patch.setattr("restorekv.cli.loading.open_model", None)
        options = ("--permissive", "--papers", "./no")
        refused("There is no file or folder ./no", "build", "--out", out, *options)
    assert not out.exists()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("restorekv.data.build.build_mixture", interrupt)
    refused("continue with --resume", "build", "--model", "tiny", "--out", out, code=130)
