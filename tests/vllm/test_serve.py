"""Our server with the real vLLM as its engine: every answer is that of `ask` on the same cache."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.compressing import compress_with

pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

from restorekv import compose  # noqa: E402
from restorekv.serve.vllm_documents import find_form  # noqa: E402
from restorekv.serve.vllm_files import VllmFiles  # noqa: E402
from restorekv.storage.cache_file import open_cache_file, write_cache_file  # noqa: E402
from restorekv.storage.portable import load_portable  # noqa: E402
from restorekv.vllm.page_pool import count_pages  # noqa: E402
from restorekv.vllm.ragged_documents import identify  # noqa: E402
from tests.helpers.engine import ENVIRONMENT, TOKENS, World, make_world, server, without_halves  # noqa: E402
from tests.helpers.models import build_model, build_tokenizer  # noqa: E402
from tests.helpers.serving import about, ask, client_of, expected, serving, upload  # noqa: E402

pytestmark = pytest.mark.slow
TEXTS = [
    f"The code of the {color} house is seven; nobody lives there. " * 4
    for color in ("red", "blue", "old")
]
QUESTIONS = [
    "Which code?",
    "who lives in the red house?",
    "Is there a well?",
    "What is the text about?",
]
# A question about a whole text is read in pieces of this many tokens.
OPTIONS = {
    "max_model_len": 1024,
    "enforce_eager": True,
    "block_size": 32,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
}
FORMS = ["ragged", "portable"]
PAGE_SIZE = 32  # pairs, on a CPU


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    """A small random model, in a folder from which vLLM can load it, without documents: our server
    makes them.
    """
    model = build_model("llama", hidden_size=128, head_dim=32)
    made = make_world(
        tmp_path_factory.mktemp("world"), model, build_tokenizer(), {}, [], evictor="knorm"
    )
    model.config.name_or_path = made.folder
    return made


def inside(form: str, **more: object) -> dict:
    """Return the settings of a server that starts vLLM itself."""
    return {"engine": "vllm", "options": {"options": OPTIONS, "documents": form, **more}}


def smalls(world, form: str) -> list:
    how = {"evictor": "snapkv", "ratio": "0.4", "adapter": None}
    how |= find_form(form).compress_settings
    return [compress_with(world.model, world.tokenizer, text, **how) for text in TEXTS]


def answers_of(small, form: str, world, questions) -> list[str]:
    """Return the answers of `ask`, without spaces at the start and half characters at the end."""
    if form == "portable":
        said = small.portable().ask(world.model, world.tokenizer, questions, TOKENS)
    else:
        said = small.ask(questions, TOKENS)
    return without_halves(said)


def told(answer) -> list[str]:
    return without_halves([choice.message.content for choice in answer.choices])


def assert_answers(client, files, world, small, form) -> None:
    """Check answers alone, in mixed batches of several clients, over composed documents, over the
    full cache and as a stream.
    """
    greedy = {"max_tokens": TOKENS}
    wanted = [answers_of(each, form, world, QUESTIONS) for each in small]
    assert told(ask(client, about(files[0], question=QUESTIONS[0]), **greedy)) == wanted[0][:1]
    places = [
        (document, question) for question in range(len(QUESTIONS)) for document in range(len(files))
    ]

    def asked(place: tuple[int, int]) -> list[str]:
        return told(ask(client, about(files[place[0]], question=QUESTIONS[place[1]]), **greedy))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(asked, places))
    assert found == [[wanted[document][question]] for document, question in places]
    both = answers_of(compose(small[:2]), form, world, QUESTIONS[:1])
    assert told(ask(client, about(*files[:2], question=QUESTIONS[0]), **greedy)) == both
    full = expected(world.model, world.tokenizer, TEXTS[0], ratio=1).ask(QUESTIONS[0], TOKENS)
    assert told(
        ask(client, about(files[0], question=QUESTIONS[0]), "tiny", **greedy)
    ) == without_halves([full])
    pieces = ask(client, about(files[0], question=QUESTIONS[1]), stream=True, **greedy)
    assert without_halves(["".join(each.choices[0].delta.content or "" for each in pieces)]) == [
        wanted[0][1]
    ]
    schema = {"name": "x", "schema": {"type": "nonsense"}}
    with pytest.raises(openai.BadRequestError, match="vLLM refuses"):
        ask(client, about(files[0]), response_format={"type": "json_schema", "json_schema": schema})


def foreign(ids: list[int], folder: Path) -> list[int]:
    """Replace the file of a prompt's document by one of a model with a different RoPE."""
    for path in folder.glob("*.rkv"):
        file = open_cache_file(path)
        if list(identify(file).ids) == ids:
            manifest = replace(file.manifest, rope={"rope_type": "yarn"})
            write_cache_file(path, file.make_cache(), file.context, manifest)
    for path in folder.glob("*.safetensors"):
        portable = load_portable(path)
        if portable.ids.tolist() == ids:
            replace(portable, manifest=replace(portable.manifest, rope={"rope_type": "yarn"})).save(
                path
            )
    return ids


@pytest.mark.parametrize("form", FORMS)
def test_vllm_in_the_server(world, tmp_path, monkeypatch, form):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    small = smalls(world, form)
    with serving(world.model, world.tokenizer, tmp_path, **inside(form)) as url:
        client = client_of(url)
        files = [upload(client, text) for text in TEXTS]
        assert_answers(client, files, world, small, form)
        (written,) = small[0].ask(QUESTIONS[:1], TOKENS, details=True, logprobs=3)
        answer = ask(
            client,
            about(files[0], question=QUESTIONS[0]),
            max_tokens=TOKENS,
            logprobs=True,
            top_logprobs=3,
        )
        likely = answer.choices[0].logprobs.content
        assert [each.logprob for each in likely] == pytest.approx(list(written.logprobs), abs=1e-3)
        assert answer.choices[0].finish_reason == written.finish
        counts = answer.usage
        assert (counts.prompt_tokens, counts.completion_tokens) == (
            small[0].context.num_tokens + written.prompt_tokens,
            len(written.ids),
        )
        whole = [
            ask(client, about(files[2], question=each), "tiny").usage for each in QUESTIONS[:2]
        ]
        assert [each.prompt_tokens_details.cached_tokens > 60 for each in whole] == [False, True]
        # A question of several pieces, drawn: with a seed, vLLM's engine would end.
        long = upload(client, TEXTS[2] * 3)
        drawn = ask(client, about(long), "tiny", temperature=1.0, n=2)
        assert len(told(drawn)) == 2
        with pytest.raises(openai.BadRequestError, match="vLLM on a CPU takes no seed"):
            ask(client, about(files[0]), temperature=1.0, seed=3)
        schema = {
            "type": "object",
            "properties": {"code": {"type": "integer"}},
            "required": ["code"],
        }
        answer_form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        shaped = (
            ask(client, about(files[0]), response_format=answer_form, max_tokens=40)
            .choices[0]
            .message.content
        )
        assert shaped.startswith("{") and '"code"' in shaped
        stopped = ask(
            client,
            about(files[0], question=QUESTIONS[0]),
            stop=written.text[4:6],
            max_tokens=TOKENS,
        )
        assert (
            stopped.choices[0].message.content
            == written.text[: written.text.find(written.text[4:6])].lstrip()
        )
        # Another model's document ends its requests alone, with a sentence.
        other = upload(client, TEXTS[0] * 2)
        take = VllmFiles.take
        with monkeypatch.context() as patch:
            patch.setattr(VllmFiles, "take", lambda *given: foreign(take(*given), tmp_path / form))
            with pytest.raises(openai.BadRequestError, match="was made for rope"):
                ask(client, about(other))
        assert told(ask(client, about(files[1], question=QUESTIONS[0]), max_tokens=TOKENS))
    with serving(world.model, world.tokenizer, tmp_path, **inside(form)) as url:
        again = ask(client_of(url), about(files[0], question=QUESTIONS[0]), max_tokens=TOKENS)
        assert told(again) == without_halves([written.text])
        assert again.usage.prompt_tokens_details.cache_write_tokens == 0


def test_a_document_that_vllms_memory_cannot_hold_is_refused_with_a_sentence(
    world, tmp_path, monkeypatch
):
    """A pool that holds one of three documents at a time serves all of them."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    small = smalls(world, "ragged")
    pages = [
        count_pages(each.cache.lengths + each.cache.restore_length, PAGE_SIZE) for each in small
    ]
    dim = small[0].cache.layers[0].context_keys.shape[-1]
    options = inside("ragged", documents_memory=max(pages) * PAGE_SIZE * 2 * dim * 4)
    with serving(world.model, world.tokenizer, tmp_path, **options) as url:
        client = client_of(url)
        files = [upload(client, text) for text in TEXTS]
        with ThreadPoolExecutor(3) as pool:
            asked = [about(file, question=QUESTIONS[0]) for file in files]
            found = list(pool.map(lambda each: ask(client, each, max_tokens=TOKENS), asked))
        wanted = [answers_of(each, "ragged", world, QUESTIONS[:1]) for each in small]
        assert [told(answer) for answer in found] == wanted
        large = upload(client, TEXTS[0] * 4)
        with pytest.raises(openai.BadRequestError, match="increase documents_memory"):
            ask(client, about(large))
        assert told(ask(client, asked[0], max_tokens=TOKENS)) == wanted[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_vllm_server_by_its_url(world, tmp_path, form):
    """The server of the other tests reads documents from the folder `world.store`."""
    small = smalls(world, form)
    options = {"url": "http://127.0.0.1:8765/v1", "folder": world.store, "documents": form}
    engine = {"engine": "vllm", "options": options}
    with server(world, form), serving(world.model, world.tokenizer, tmp_path, **engine) as url:
        client = client_of(url)
        files = [upload(client, text) for text in TEXTS]
        assert_answers(client, files, world, small, form)
