"""In vLLM, documents take the positions of their texts, although vLLM counts placeholders; without
vLLM itself.
"""

import pytest
from transformers import MistralConfig, Qwen2Config

from restorekv import CompressionConfig, compose, compress
from restorekv.errors import RestoreKVError, TextTooLongError
from restorekv.model.prompt import encode_question
from restorekv.restore.adapter import RestoreAdapter
from restorekv.storage.cache_file import open_cache_file
from restorekv.vllm import prompt
from restorekv.vllm.document_store import find_limit
from restorekv.vllm.portable_store import PortableStore
from restorekv.vllm.ragged_store import RaggedStore
from tests.helpers.document_pairs import describe_engine_model
from tests.helpers.grown import GROWN, make_grown_documents
from tests.helpers.models import build_model

POSITIONS = 512
TEXT = "The code of the red house is seven; nobody lives there. "
QUESTION = "Which code?"


@pytest.fixture(scope="module")
def model():
    return build_model("llama", max_position_embeddings=POSITIONS)


@pytest.fixture(scope="module", params=[RaggedStore, PortableStore])
def place(request, model, tiny_tokenizer, tmp_path_factory):
    """A store with one document, its compressed context, and a function that makes a prompt."""
    folder = tmp_path_factory.mktemp("store")
    small = compress(
        model,
        tiny_tokenizer,
        TEXT * 8,
        ratio=0.2,
        adapter=RestoreAdapter.create(model, 4, rank=2),
        config=CompressionConfig(allocation="per-head"),
    )
    path = folder / "red.rkv"
    small.save(path)
    if request.param is PortableStore:
        path = folder / "red.safetensors"
        small.portable().save(path)
    store = request.param(folder, describe_engine_model(model))
    return store, small, lambda question: prompt(path, question, tiny_tokenizer)


def make_question(small, positions):
    """Return a question that, with the document, takes exactly this many positions."""
    first = small.cache.get_seq_length()
    short = len(encode_question(small.tokenizer, small.context, "x")[0])
    # Every capital letter is a token.
    question = "x" + "Q" * (positions - first - short)
    assert first + len(encode_question(small.tokenizer, small.context, question)[0]) == positions
    return question


def test_a_question_beyond_the_positions_is_refused_as_by_ask(place):
    store, small, make_prompt = place
    question = make_question(small, POSITIONS + 1)
    ids = make_prompt(question)
    assert len(ids) < POSITIONS, "vLLM itself would refuse it"
    with pytest.raises(TextTooLongError) as of_ask:
        small.ask(question, 1)
    with pytest.raises(TextTooLongError) as of_store:
        store.find_document(ids)
    assert str(of_store.value) == str(of_ask.value)
    assert "with the question needs 513 positions, and the model has 512; ask less" in str(
        of_ask.value
    )


def test_answers_end_at_the_last_position(place):
    store, small, make_prompt = place
    for end, room in ((POSITIONS, 1), (POSITIONS - 1, 1), (POSITIONS - 9, 9)):
        ids = make_prompt(make_question(small, end))
        document = store.find_document(ids)
        assert document.positions == small.cache.get_seq_length()
        assert store.count_answer_room(document, ids) == room


@pytest.mark.parametrize("options", [{}, {"offset": 7}, {"kv_dtype": "int8"}])
def test_a_files_positions_are_those_of_its_cache(model, tiny_tokenizer, tmp_path, options):
    small = compress(
        model,
        tiny_tokenizer,
        TEXT * 4,
        ratio=0.4,
        # An offset goes without restore tokens.
        adapter=None if "offset" in options else RestoreAdapter.create(model, 4, rank=2),
        config=CompressionConfig(**options),
    )
    small.save(tmp_path / "a.rkv")
    assert small.manifest.positions == small.cache.get_seq_length()
    file = open_cache_file(tmp_path / "a.rkv")
    assert file.manifest.positions == file.make_cache().get_seq_length()


def test_positions_of_grown_and_of_several_documents(tiny_tokenizer, tmp_path):
    model = build_model("llama")
    adapter = RestoreAdapter.create(model, 4, rank=2)
    made = make_grown_documents(tmp_path, model, tiny_tokenizer, adapter=adapter)
    store = RaggedStore(tmp_path, describe_engine_model(model))
    for names in (*([name] for name in GROWN), ["red", "blue", "red"], ["composed", "appended"]):
        whole = made[names[0]]
        if len(names) > 1:
            whole = compose([made[name] for name in names])
        paths = [tmp_path / f"{name}.rkv" for name in names]
        ids = prompt(paths if len(paths) > 1 else paths[0], QUESTION, tiny_tokenizer)
        assert store.find_document(ids).positions == whole.cache.get_seq_length(), names


def test_several_documents_beyond_the_positions_are_refused(model, tiny_tokenizer, tmp_path):
    for name in ("red", "blue"):
        text = TEXT.replace("red", name) * 8
        small = compress(model, tiny_tokenizer, text, ratio=0.2, adapter=None)
        small.save(tmp_path / f"{name}.rkv")
    store = RaggedStore(tmp_path, describe_engine_model(model))
    paths = [tmp_path / "red.rkv", tmp_path / "blue.rkv", tmp_path / "red.rkv"]
    ids = prompt(paths, QUESTION, tiny_tokenizer)
    assert store.find_document(prompt(paths[0], QUESTION, tiny_tokenizer))
    with pytest.raises(RestoreKVError, match=r"with the question needs .* and the model has 512"):
        store.find_document(ids)


def test_a_window_of_all_layers_ends_what_is_asked():
    """vLLM would count placeholders against the window, and so always see the whole document."""
    assert find_limit(MistralConfig(sliding_window=64)).positions == 64
    whole = MistralConfig(sliding_window=None, max_position_embeddings=POSITIONS)
    assert find_limit(whole).positions == POSITIONS
    unused = Qwen2Config(
        use_sliding_window=False, sliding_window=64, max_position_embeddings=POSITIONS
    )
    assert find_limit(unused).positions == POSITIONS
