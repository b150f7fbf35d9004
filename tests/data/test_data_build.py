"""A mixture is the teacher's own greedy words, resumable to the same bytes, and never an evaluation
text.
"""

import gzip
import itertools
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import restorekv.data.build
from restorekv.data.build import SHIPPED_TEXTS, build_mixture
from restorekv.data.config import BuildConfig
from restorekv.data.documents import SourceDocument
from restorekv.data.gather import AttemptFile, compute_longest_context
from restorekv.data.mixture import read_mixture
from restorekv.data.self_study import QUESTION_PROMPTS, SelfStudy
from restorekv.data.sources import MIXTURES
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.files import HOST
from restorekv.model.identity import fingerprint_model
from restorekv.model.prompt import DEFAULT_SEPARATOR, encode_question, encode_text, make_context
from restorekv.tasks.reading import TEXTS
from restorekv.tiny.suite import draw_documents as suite
from tests.helpers.data_world import flags, settings, text, two_papers, write_jsonl, write_sources
from tests.helpers.models import SHAPE, build_model


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    return write_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def model():
    return build_model("qwen3")


@pytest.fixture(scope="module", autouse=True)
def suite_once(tiny_tokenizer):
    """Making the tiny suite's documents, and reading what ships, takes longer than a build here."""
    made = suite(tiny_tokenizer, restorekv.data.build.SUITE_DOCUMENTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restorekv.data.build, "SHIPPED_TEXTS", [])
        patch.setattr(restorekv.data.build, "draw_documents", lambda tokenizer, count: made)
        yield


@pytest.fixture(scope="module")
def whole(suite_once, files, model, tiny_tokenizer, tmp_path_factory) -> Path:
    """The uninterrupted paper mixture."""
    out = tmp_path_factory.mktemp("whole") / "data"
    build_mixture(model, tiny_tokenizer, settings(files), out)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def greedy(model, ids: torch.Tensor, limit: int, eos: int = 2) -> list[int]:
    """Plain transformers, everything anew for every token."""
    told = []
    while len(told) < limit and eos not in told:
        told.append(
            int(
                model(torch.cat([ids, torch.tensor([told], dtype=torch.long)], -1))
                .logits[0, -1]
                .argmax()
            )
        )
    return told


def test_the_defaults_are_the_papers():
    told = BuildConfig()
    assert (told.documents, told.shortest, told.longest) == (500, 2048, 16000)
    assert (told.books, told.chunk, told.chunks, told.examples) == (50, 3072, 10, 1500)
    assert (
        told.question_tokens,
        told.answer_tokens,
        told.flan_answer_tokens,
        told.flan_shortest,
    ) == (
        64,
        512,
        256,
        512,
    )
    assert (told.question_characters, told.least_answer) == (10, 4)
    assert list(QUESTION_PROMPTS) == ["factual", "summary", "multihop", "method", "compare"]
    assert [source.name for source in MIXTURES["permissive"]] == ["papers", "pg19", "flan"]


def test_answers_are_the_teachers_greedy_words(whole, model, tiny_tokenizer):
    made, manifest = read_mixture(whole, model, tiny_tokenizer)
    assert {context.source for context in made} == {"longalpaca", "pg19", "flan"}
    checked = 0
    for context in made[::2] + made[-1:]:
        framed = make_context(tiny_tokenizer, context.context)
        assert framed.text_tokens == context.tokens
        for question, answer, ids in zip(
            context.questions, context.answers, context.answer_ids, strict=True
        ):
            assert (
                question == ""
                if context.source == "flan"
                else question.startswith(DEFAULT_SEPARATOR)
            )
            asked = encode_question(tiny_tokenizer, framed, question, empty=True)
            limit = manifest["settings"][
                "flan_answer_tokens" if context.source == "flan" else "answer_tokens"
            ]
            assert list(ids) == greedy(model, torch.cat([framed.ids, asked], -1), limit)
            assert answer == tiny_tokenizer.decode(ids, skip_special_tokens=True)
            checked += 1
    assert checked > 15


@pytest.mark.parametrize("pads", [False, True])
def test_questions_are_the_teachers_too(model, tiny_tokenizer, monkeypatch, pads):
    monkeypatch.setattr(SelfStudy, "pads", pads)
    context = make_context(tiny_tokenizer, text("study", 20))
    config = settings({}, question_tokens=12)
    document = SourceDocument("study", text("study", 20), "cc0-1.0")
    attempts = SelfStudy(model, tiny_tokenizer, config).study_contexts([(context, document)])[0]
    assert [attempt["kind"] for attempt in attempts] == list(QUESTION_PROMPTS)
    for attempt, prompt in zip(attempts, QUESTION_PROMPTS.values(), strict=True):
        asked = encode_question(tiny_tokenizer, context, DEFAULT_SEPARATOR + prompt)
        ids = greedy(model, torch.cat([context.ids, asked], -1), 12)
        raw = tiny_tokenizer.decode(ids, skip_special_tokens=True)
        line = next((line.strip() for line in raw.splitlines() if line.strip()), "")
        assert attempt.get("question", DEFAULT_SEPARATOR) == DEFAULT_SEPARATOR + (
            line if "fault" not in attempt else ""
        )
    strict = SelfStudy(
        model, tiny_tokenizer, settings({}, question_characters=10_000)
    ).study_contexts([(context, document)])[0]
    assert strict == [{"kind": kind, "fault": "short question"} for kind in QUESTION_PROMPTS]
    silent = SelfStudy(model, tiny_tokenizer, settings({}, least_answer=100)).study_contexts(
        [(context, document)]
    )[0]
    assert all(attempt["fault"] in ("short answer", "short question") for attempt in silent)


def test_every_column_and_count_fits(whole, model, tiny_tokenizer):
    _, manifest = read_mixture(whole)
    assert (
        manifest["model"]["fingerprint"] == fingerprint_model(model)
        and manifest["model"]["dtype"] == "float32"
    )
    longalpaca = manifest["sources"]["longalpaca"]
    assert longalpaca["dropped"] == {"no document": 1, "too short": 1, "repeated": 1, "too long": 1}
    assert longalpaca["rows"] == 7 and longalpaca["contexts"] == 3 and longalpaca["attempts"] == 15
    assert longalpaca["examples"] == 15 - sum(longalpaca["dropped_attempts"].values())
    assert (
        manifest["sources"]["pg19"]["contexts"] == 4
        and manifest["sources"]["flan"]["examples"] == 2
    )
    assert manifest["sources"]["flan"]["dropped"] == {"another subset": 1, "too short": 1}
    assert manifest["exclusion"]["texts"] == 156
    for name, source in manifest["sources"].items():
        table = pq.read_table(whole / f"{name}.parquet")
        assert len(table) == source["examples"] == sum(source["licenses"].values())
        assert str(table.schema.field("answer_ids").type).startswith("list<") and "int32" in str(
            table.schema
        )
        for row in table.to_pylist():
            assert row["answer_tokens"] == len(row["answer_ids"])
            assert row["question_tokens"] == encode_text(tiny_tokenizer, row["question"]).shape[-1]
            assert row["kind"] in (QUESTION_PROMPTS if name != "flan" else ["prompt"])
    assert set(contents(whole)) == {
        "manifest.json",
        "longalpaca.parquet",
        "pg19.parquet",
        "flan.parquet",
    }


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_build_goes_on_to_the_same_bytes_and_asks_nothing_twice(
    seed, whole, files, model, tiny_tokenizer, tmp_path, monkeypatch
):
    rng, asked = random.Random(seed), []
    for name in ("study_contexts", "answer_prompt"):
        plain = getattr(SelfStudy, name)

        def counted(*args, plain=plain):
            contexts = [args[1]]
            if plain.__name__ == "study_contexts":
                contexts = [context for context, _ in args[1]]
            asked.extend(context.ids.tolist() for context in contexts)
            return plain(*args)

        monkeypatch.setattr(SelfStudy, name, counted)
    out = tmp_path / "data"
    for stop in sorted(rng.sample(range(1, 10), 3)):
        calls = itertools.count(1)

        def kill(*_, calls=calls, stop=stop) -> None:
            if next(calls) == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            build_mixture(model, tiny_tokenizer, settings(files), out, resume=True, progress=kill)
        torn = rng.choice(sorted((out / "parts").iterdir()))
        line = torn.read_bytes().splitlines(keepends=True)[0]
        with torn.open("ab") as file:  # as a kill in the middle of a write leaves it
            file.write(line[: rng.randrange(1, len(line))])
    build_mixture(model, tiny_tokenizer, settings(files), out, resume=True)
    assert contents(out) == contents(whole)
    assert len(asked) == len({str(ids) for ids in asked})
    build_mixture(model, tiny_tokenizer, settings(files), out, resume=True)
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.filterwarnings("ignore:There is nothing in")
def test_a_build_that_another_one_overtook_leaves_its_folder_alone(
    files, model, tiny_tokenizer, tmp_path, monkeypatch, resume
):
    """Both found an empty folder, and the other one ended before this one began to ask."""
    config = settings(files, books=0, examples=0)
    index = restorekv.data.build.index_excluded_texts
    out = tmp_path / "data"

    def be_overtaken(*arguments):
        monkeypatch.setattr(restorekv.data.build, "index_excluded_texts", index)
        build_mixture(model, tiny_tokenizer, config, out)
        return index(*arguments)

    monkeypatch.setattr(restorekv.data.build, "index_excluded_texts", be_overtaken)
    with pytest.raises(RestoreKVError, match="Another build has used"):
        build_mixture(model, tiny_tokenizer, config, out, resume=resume)
    assert not (out / "build.json").exists()
    assert read_mixture(out)[0]


KILLED = """
import os, signal, sys
from restorekv.cli import main
from restorekv.data.gather import AttemptFile, compute_longest_context

left, add = int(sys.argv[1]), AttemptFile.append_attempts

def cut(self, document, attempts):
    global left
    left -= 1
    if left < 0:
        with self.path.open("ab") as file:
            file.write(b'{"context": ["half a li')
        os.kill(os.getpid(), signal.SIGKILL)
    add(self, document, attempts)

AttemptFile.append_attempts = cut
main(sys.argv[2:])
"""


@pytest.mark.slow
def test_kill_9_in_the_middle_of_a_write_leaves_a_build_that_goes_on(
    whole, files, model, tiny_tokenizer, tmp_path
):
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    out = tmp_path / "data"
    command = [
        "data",
        "build",
        "--model",
        tmp_path / "model",
        *flags(settings(files)),
        "--out",
        out,
        "--resume",
    ]
    for more, code in ((1, -signal.SIGKILL), (5, -signal.SIGKILL), (99, 0)):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(more), *map(str, command)], capture_output=True
        )
        assert done.returncode == code, done.stderr
    made, expected = contents(out), contents(whole)
    for folder in (made, expected):  # this model has a name, that of the fixture none
        manifest = json.loads(folder["manifest.json"])
        manifest["model"].pop("name")
        # The fixture reads fewer evaluation texts than the command.
        manifest["exclusion"].pop("texts")
        # The command takes no place of a source of another mixture.
        manifest["settings"].pop("papers")
        folder["manifest.json"] = manifest
    assert made == expected


def test_texts_that_ship_for_benchmarks_are_refused(
    files, model, tiny_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(restorekv.data.build, "SHIPPED_TEXTS", SHIPPED_TEXTS)
    novel, stories, squad = (
        gzip.decompress((TEXTS / name).read_bytes()).decode()
        for name in (
            "novels/Burnett_Garden_1911.txt.gz",
            "fairytaleqa/val.jsonl.gz",
            "share-alike/squad.json.gz",
        )
    )
    genres = gzip.decompress((TEXTS / "genres" / "evaluation.jsonl.gz").read_bytes()).decode()
    contract = json.loads(genres.partition("\n")[0])["context"][:3000]
    cable = (TEXTS / "facts" / "cable.txt").read_text()
    story, article = (
        json.loads(stories.partition("\n")[0])["context"][:3000],
        json.loads(squad)["data"][0],
    )
    paragraph = max((each["context"] for each in article["paragraphs"]), key=len)
    texts = novel[9000:12000], story, paragraph, contract, cable
    papers = [{"instruction": f"{paper} Now the paper ends. Question: who?"} for paper in texts]
    changed = tmp_path / "longalpaca.json"
    changed.write_text(json.dumps([*json.loads(Path(files["longalpaca"]).read_text()), *papers]))
    config = settings(
        {**files, "longalpaca": str(changed)}, documents=9, books=0, examples=0, longest=4000
    )
    told = build_mixture(model, tiny_tokenizer, config, tmp_path / "data")["sources"]["longalpaca"]
    found = [each["found in"] for each in told["refused"]]
    assert [each.split(",")[0] for each in found] == [
        "Burnett_Garden_1911.txt.gz",
        "val.jsonl.gz",
        "squad.json.gz",
        "evaluation.jsonl.gz",
        "cable.txt",
    ]


def test_evaluation_texts_are_refused_counted_and_named(files, model, tiny_tokenizer, tmp_path):
    held_out = text("c", 20) + " " + text("d", 20)
    rows = [{"context": "Something else."}, {"context": held_out, "input": "Why?"}]
    evaluation = write_jsonl(tmp_path / "evaluation.jsonl", rows)
    tests = [document.text for document in suite(tiny_tokenizer)]
    tiny = min(tests, key=len)
    source = json.loads(Path(files["longalpaca"]).read_text())
    source.insert(1, {"instruction": f"{tiny.title()} Now the paper ends. Question: who?"})
    changed = tmp_path / "longalpaca.json"
    changed.write_text(json.dumps(source))
    config = settings(
        {**files, "longalpaca": str(changed)}, documents=9, books=0, examples=0, longest=4000
    )
    with pytest.warns(
        RestoreKVWarning, match="LongAlpaca gave 2 of 9 documents, .* 2 in an evaluation set"
    ):
        manifest = build_mixture(
            model, tiny_tokenizer, config, tmp_path / "data", [str(evaluation)]
        )
    told = manifest["sources"]["longalpaca"]
    assert told["dropped"]["in an evaluation set"] == 2
    assert told["refused"][0] == {
        "document": "row 1",
        "found in": f"tiny suite, document {tests.index(tiny)}",
        "share": 1.0,
    }
    assert (
        told["refused"][1]["document"] == "row 7"
        and told["refused"][1]["found in"] == "evaluation.jsonl, row 2"
    )
    assert manifest["exclusion"]["files"][0]["name"] == "evaluation.jsonl"
    made, _ = read_mixture(tmp_path / "data")
    assert not any(text("c", 20) in context.context for context in made)
    plain = build_mixture(model, tiny_tokenizer, config, tmp_path / "plain")
    assert [row["document"] for row in plain["sources"]["longalpaca"]["refused"]] == ["row 1"]
    assert any(
        two_papers("", "")[:30] in context.context
        for context in read_mixture(tmp_path / "plain")[0]
    )


def test_the_permissive_mixture_has_free_licenses_only(files, model, tiny_tokenizer, tmp_path):
    with pytest.warns(RestoreKVWarning, match="Open papers gave 2 of 9 documents, all of"):
        manifest = build_mixture(
            model,
            tiny_tokenizer,
            settings(files, mixture="permissive", documents=9),
            tmp_path / "data",
        )
    assert set(manifest["licenses"]) == {"cc-by-4.0", "public-domain", "apache-2.0", "odc-by"}
    assert manifest["sources"]["papers"]["dropped"] == {
        "license cc-by-sa-4.0": 1,
        "license Some rights": 1,
        "license missing": 1,
    }
    made, _ = read_mixture(tmp_path / "data")
    assert {c.document: c.license for c in made if c.source == "papers"} == {
        "2106.0": "cc-by-4.0",
        "2106.3": "public-domain",
    }


def test_a_begun_folder_takes_the_same_build_only(whole, files, model, tiny_tokenizer, tmp_path):
    def stop(*_) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "data"
    with pytest.raises(KeyboardInterrupt):
        build_mixture(model, tiny_tokenizer, settings(files), out, progress=stop)
    with pytest.raises(RestoreKVError, match="continue with --resume"):
        build_mixture(model, tiny_tokenizer, settings(files), out)
    others = write_jsonl(tmp_path / "new.jsonl", [{"context": "Else."}])
    for folder in (out, whole):
        changed = settings(files, answer_tokens=7, mixture="permissive")
        with pytest.raises(
            RestoreKVError,
            match=r"--mixture paper \(now permissive\), --answer-tokens 6 \(now 7\); give",
        ):
            build_mixture(model, tiny_tokenizer, changed, folder, resume=True)
        with pytest.raises(RestoreKVError, match=r"the model's fingerprint \w+ \(now \w+\); give"):
            build_mixture(
                build_model("qwen3", seed=1), tiny_tokenizer, settings(files), folder, resume=True
            )
        with pytest.raises(
            RestoreKVError, match=r"--exclude nothing \(now new\.jsonl [0-9a-f]{16}\); give"
        ):
            build_mixture(
                model, tiny_tokenizer, settings(files), folder, [str(others)], resume=True
            )
    with pytest.raises(RestoreKVError, match="finish it with restorekv data build --resume"):
        read_mixture(out)
    with pytest.raises(RestoreKVError, match="already holds"):
        build_mixture(model, tiny_tokenizer, settings(files), whole)


def test_a_finished_folder_is_of_the_files_it_was_made_from(model, tiny_tokenizer, tmp_path):
    source = write_jsonl(tmp_path / "flan.jsonl", [{"id": "a", "text": text("a", 40)}])
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [{"context": "Else."}])
    out, config = (
        tmp_path / "data",
        settings({"flan": str(source)}, documents=0, books=0, examples=1),
    )

    def again(exclude: list) -> dict:
        return build_mixture(
            model, tiny_tokenizer, config, out, [str(path) for path in exclude], resume=True
        )

    made = again([held_out])
    assert again([held_out]) == made
    with pytest.raises(
        RestoreKVError, match=r"--exclude held_out\.jsonl [0-9a-f]{16} \(now nothing\)"
    ):
        again([])
    write_jsonl(held_out, [{"context": "Something else."}])
    with pytest.raises(
        RestoreKVError, match=r"--exclude held_out\.jsonl (\w+) \(now held_out\.jsonl (?!\1)\w+\)"
    ):
        again([held_out])
    write_jsonl(held_out, [{"context": "Else."}])
    write_jsonl(source, [{"id": "a", "text": text("b", 40)}])
    with pytest.raises(
        RestoreKVError, match=r"--flan flan\.jsonl (\w+) \(now flan\.jsonl (?!\1)\w+\)"
    ):
        again([held_out])


def test_a_dataset_of_the_hub_stays_at_the_commit_it_was_made_from(
    model, tiny_tokenizer, tmp_path, monkeypatch
):
    commits = iter(["first", "second"])
    monkeypatch.setattr(
        restorekv.data.build,
        "identify_source",
        lambda where: {"hub": "some/set", "revision": next(commits)},
    )
    monkeypatch.setattr(
        restorekv.data.build, "iterate_rows", lambda where, known: iter([{"text": text("a", 40)}])
    )
    config = settings({"flan": "some/set"}, documents=0, books=0, examples=1)
    made = build_mixture(model, tiny_tokenizer, config, tmp_path / "data")
    assert build_mixture(model, tiny_tokenizer, config, tmp_path / "data", resume=True) == made
    assert made["sources"]["flan"]["from"] == {
        "given": "some/set",
        "hub": "some/set",
        "revision": "first",
    }
    with pytest.raises(RestoreKVError, match=r"--flan some/set \(now some/set@v2\)"):
        build_mixture(
            model,
            tiny_tokenizer,
            settings({**vars(config), "flan": "some/set@v2"}),
            tmp_path / "data",
            resume=True,
        )


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", r"holds other files \(config\.json\); choose another"),
        ("parts/mine", r"holds other files \(parts\)"),
        ("build.json", "is damaged or not written by restorekv; build into another folder"),
        ("manifest.json", "damaged or not a manifest of restorekv"),
    ],
)
def test_a_foreign_folder_is_left_as_it_is(
    name, message, resume, files, model, tiny_tokenizer, tmp_path
):
    path = tmp_path / "theirs" / name
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(RestoreKVError, match=message):
        build_mixture(model, tiny_tokenizer, settings(files), tmp_path / "theirs", resume=resume)
    assert contents(tmp_path / "theirs") == {name: b"{}"}


@pytest.mark.parametrize("read_as", ["source", "exclude"])
def test_a_folder_among_the_texts_that_are_read_is_refused(
    read_as, model, tiny_tokenizer, tmp_path
):
    """Its files are JSON and Parquet, as texts are: a second build would read the first one's."""
    mine = tmp_path / "mine"
    mine.mkdir()
    source = write_jsonl(mine / "flan.jsonl", [{"id": "a", "text": text("a", 40)}])
    if read_as == "source":
        source = mine
    config = settings({"flan": str(source)}, documents=0, books=0, examples=1)
    exclude = [str(mine)] if read_as == "exclude" else []
    for out in (mine / "data", mine / "deeper" / "data"):
        with pytest.raises(RestoreKVError, match="whose files are read"):
            build_mixture(model, tiny_tokenizer, config, out, exclude)
    assert [path.name for path in mine.iterdir()] == ["flan.jsonl"]


def test_what_a_kill_before_the_first_record_leaves_is_gone_on_with(
    model, tiny_tokenizer, tmp_path
):
    source = write_jsonl(tmp_path / "flan.jsonl", [{"id": "a", "text": text("a", 40)}])
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / "data" / "parts").mkdir(parents=True)
    (tmp_path / "data" / f".build.json.{HOST}-{dead.pid}.tmp").write_text("{")
    config = settings({"flan": str(source)}, documents=0, books=0, examples=1)
    with pytest.warns(RestoreKVWarning, match="nothing in .* to resume; this is a new build"):
        build_mixture(model, tiny_tokenizer, config, tmp_path / "data", resume=True)
    assert set(contents(tmp_path / "data")) == {"manifest.json", "flan.parquet"}


def test_what_is_less_than_wanted_is_told(files, model, tiny_tokenizer, tmp_path):
    config = settings(files, documents=0, books=9, chunks=1, examples=9, longest=100_000)
    with pytest.warns(RestoreKVWarning) as told:
        made = build_mixture(model, tiny_tokenizer, config, tmp_path / "data")
    words = [str(warning.message) for warning in told]
    assert len(words) == 3 and words[0].startswith(
        f"--longest 100000 is lowered to {made['longest']}: "
    )
    assert (
        words[1] == f"PG-19 gave 3 of 9 books, all of {files['pg19']} (dropped: 1 no whole chunk)."
    )
    assert (
        words[2].startswith("Tulu-3 FLAN gave 3 of 9 examples, all of ")
        and "1 too short" in words[2]
    )


@pytest.mark.parametrize("option", ["answer_tokens", "flan_answer_tokens"])
def test_answers_beyond_the_positions_name_their_option(files, model, tiny_tokenizer, option):
    config = settings(files, **{option: 10**6})
    with pytest.raises(RestoreKVError, match=f"lower --{option.replace('_', '-')}\\.$"):
        compute_longest_context(model, tiny_tokenizer, config)


def test_contexts_fit_into_a_window_that_all_layers_have(files, tiny_tokenizer, tmp_path):
    """Its config says more positions than such a model sees; a build would end in the middle."""
    windows = {
        "use_sliding_window": True,
        "sliding_window": 300,
        "layer_types": ["sliding_attention"] * SHAPE["num_hidden_layers"],
    }
    config = settings(files, documents=0, books=0, examples=2, flan_shortest=1)
    with pytest.warns(RestoreKVWarning, match="--longest 1000 is lowered to"):
        made = build_mixture(build_model("qwen3", **windows), tiny_tokenizer, config, tmp_path)
    assert made["longest"] < 300
    tokens = [context.tokens for context in read_mixture(tmp_path)[0]]
    assert tokens and max(tokens) <= made["longest"]


def test_a_refused_book_is_replaced_by_the_next(files, model, tiny_tokenizer, tmp_path):
    config = settings(files, documents=0, examples=0, chunk=200)
    first = write_jsonl(tmp_path / "first.jsonl", [{"text": text(0, 130)}])
    made = build_mixture(model, tiny_tokenizer, config, tmp_path / "data", [str(first)])["sources"][
        "pg19"
    ]
    assert made["dropped"] == {"in an evaluation set": 2, "no whole chunk": 1}
    books = {context.document.split(" ")[0][-1] for context in read_mixture(tmp_path / "data")[0]}
    assert books == {"2", "3"}


def test_a_source_may_be_corrected_while_it_is_asked_and_nothing_is_asked_twice(
    model, tiny_tokenizer, tmp_path, monkeypatch
):
    good = [json.dumps({"id": f"d{n}", "text": text(n, 40)}) for n in range(4)]
    source = tmp_path / "flan.jsonl"
    out = tmp_path / "data"
    config = settings({"flan": str(source)}, documents=0, books=0, examples=4)
    source.write_text("\n".join([*good[:3], '{"id": ']))
    with pytest.raises(RestoreKVError, match=r"flan\.jsonl, line 4"):
        build_mixture(model, tiny_tokenizer, config, out)
    # One text has gone, one is another one, one is new, and the order is another one.
    changed = json.dumps({"id": "d1", "text": text("another", 40)})
    source.write_text("\n".join([good[3], good[2], changed, good[0]]))
    answer, asked = SelfStudy.answer_prompt, []

    def count(self, context):
        asked.append(1)
        return answer(self, context)

    monkeypatch.setattr(SelfStudy, "answer_prompt", count)
    build_mixture(model, tiny_tokenizer, config, out, resume=True)
    assert len(asked) == 2
    found = {each.document: each for each in read_mixture(out, model, tiny_tokenizer)[0]}
    assert list(found) == ["d3", "d2", "d1", "d0"]
    assert found["d1"].context == text("another", 40)
    # They are what a new build gives.
    build_mixture(model, tiny_tokenizer, config, tmp_path / "new")
    assert contents(tmp_path / "new") == contents(out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk": 4090, "longest": 16000}, "needs contexts of 4090 tokens, and at most [34]"),
        ({"flan": "nowhere.jsonl"}, "There is no file or folder nowhere.jsonl"),
        ({"shortest": 990, "longest": 995}, "LongAlpaca gave no example"),
    ],
)
def test_what_cannot_work_leaves_nothing_behind(
    changes, message, files, model, tiny_tokenizer, tmp_path
):
    with pytest.raises(RestoreKVError, match=message):
        build_mixture(model, tiny_tokenizer, settings({**files, **changes}), tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixture": "free"}, "one of paper, permissive"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"documents": -1}, "documents must be at least 0"),
        ({"overlap": 0.0}, "overlap must be above 0"),
        ({"shortest": 9, "longest": 8}, "swap them"),
        ({"documents": 0, "books": 0, "examples": 0}, "Every source has a count of 0"),
        ({"mixture": "passages", "part": "2/8"}, "--part is for --mixture corpus"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(RestoreKVError, match=message):
        BuildConfig(**changes)


def test_damaged_attempts_are_refused(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"context": ["a", "1f"], "attempts": [{"kind": "lookup"}]}\n{"context"')
    assert len(AttemptFile(path).done) == 1
    path.write_text('{"context": "a", "attempts": []}\n')
    with pytest.raises(RestoreKVError, match="is damaged; delete it to ask its contexts again"):
        AttemptFile(path)
