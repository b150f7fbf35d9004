"""Documents that grew or were composed, and requests for several documents, without vLLM."""

from dataclasses import replace

import pytest
import torch

from restorekv import CompressionConfig, compose, compress
from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError
from restorekv.restore.adapter import RestoreAdapter
from restorekv.storage.cache_file import open_cache_file
from restorekv.vllm import chat, prompt
from restorekv.vllm.composition import (
    MAX_DOCUMENTS,
    compose_files,
    find_names,
    make_ids,
    name_composition,
    read_short_names,
    refuse_unlike_parts,
)
from restorekv.vllm.page_pool import count_pages
from restorekv.vllm.ragged_documents import (
    PLACEHOLDERS,
    build_rope_model,
    gather_pairs,
    identify,
    make_end,
)
from restorekv.vllm.ragged_store import RaggedStore, count_pages_of_largest_rank
from tests.helpers.document_pairs import describe_engine_model

TEXTS = {
    "red": "The red house belongs to Ada, who has seven trees. " * 6,
    "blue": "The blue house belongs to Bob, who has nine trees and a well. " * 4,
    "green": "Nobody lives in the green house. " * 9,
}
QUESTION = "Who lives in the red house?"


def make_documents(folder, model, tokenizer, **options) -> dict[str, CompressedContext]:
    """Compress the texts with a restore cache, and save them in a folder."""
    options = {"adapter": RestoreAdapter.create(model, 4, rank=2), "ratio": 0.3, **options}
    made = {}
    for name, text in TEXTS.items():
        made[name] = compress(model, tokenizer, text, **options)
        made[name].save(folder / f"{name}.rkv")
    return made


@pytest.fixture
def documents(tiny_model, tiny_tokenizer, tmp_path):
    return make_documents(tmp_path, tiny_model, tiny_tokenizer)


@pytest.fixture
def store(documents, tiny_model, tmp_path):
    return RaggedStore(tmp_path, describe_engine_model(tiny_model))


def test_placeholders_say_which_documents_are_asked():
    names = [f"{number * 0x123456789ABCDEF % 2**64:016x}" for number in range(1, 11)]
    for count in range(2, MAX_DOCUMENTS + 1):
        ids = make_ids(names[:count])
        assert len(ids) == PLACEHOLDERS
        assert all(0 <= number < 256 for number in ids)
        prompt_ids = [*ids, 1, 2]
        assert find_names(prompt_ids, read_short_names(prompt_ids), names) == names[:count]
        assert find_names(prompt_ids, read_short_names(prompt_ids), names[1:]) is None
    # What is hashed comes first, so that the first block is not another composition's.
    assert make_ids(names[:2])[:16] != make_ids([names[0], names[2]])[:16]
    assert make_ids(names[:2]) != make_ids(names[1::-1])
    for count in (1, 11):
        with pytest.raises(RestoreKVError, match=f"2 to 10 documents together, not {count}"):
            make_ids((names * 2)[:count])


@pytest.mark.parametrize("place", [4, 10, 12, 15, 16, 27])
def test_damaged_placeholders_name_no_documents(place):
    names = ["0" * 16, "f" * 16, "3" * 16]
    ids = list(make_ids(names[:2]))
    ids[place] ^= 1
    assert find_names(ids, read_short_names(ids), names) is None
    assert read_short_names([1, 2, 3, 4, 5]) is None


def test_a_wrong_number_of_documents_is_refused():
    ids = list(make_ids(["0" * 16, "f" * 16]))
    for changed in (ids[:31], [*ids[:28], *make_end(1)], [*ids[:28], *make_end(11)]):
        with pytest.raises(RestoreKVError, match="damaged placeholders"):
            read_short_names(changed)


def test_names_with_the_same_short_form_are_told_apart():
    """There are only 36,864 short forms, so names share them, and the hash decides."""
    base = 192**2
    names = [f"{7 + base * number:016x}" for number in range(5)]
    for asked in ([names[3], names[1]], [names[1], names[3]], [names[2], names[2], names[4]]):
        ids = make_ids(asked)
        assert find_names(ids, read_short_names(ids), names) == asked
    many = [f"{7 + base * number:016x}" for number in range(400)]
    ids = make_ids(many[:2])
    with pytest.raises(RestoreKVError, match="too many documents to query several together"):
        find_names(ids, read_short_names(ids), many)


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"allocation": "per-head"}])
def test_several_documents_are_what_compose_makes(tiny_model, tiny_tokenizer, tmp_path, options):
    config = CompressionConfig(**options)
    made = make_documents(tmp_path, tiny_model, tiny_tokenizer, config=config)
    store = RaggedStore(tmp_path, describe_engine_model(tiny_model))
    rope_model = build_rope_model(tiny_model.config)
    for names in (["red", "blue"], ["green", "red", "blue", "red"]):
        asked = prompt([tmp_path / f"{name}.rkv" for name in names], QUESTION, tiny_tokenizer)
        found = store.find_document(asked)
        assert [part.path.stem for part in found.parts] == names
        whole = compose([made[name] for name in names])
        cache = compose_files([open_cache_file(path) for _, path in found.files], rope_model)
        pairs = gather_pairs(cache, rope_model, slice(None), torch.float32)
        wanted = gather_pairs(whole.cache, rope_model, slice(None), torch.float32)
        assert pairs.lengths.equal(wanted.lengths) and pairs.lengths.equal(found.lengths)
        assert count_pages_of_largest_rank(found.lengths, 1, 32) == count_pages(pairs.lengths, 32)
        for own, other in zip(pairs.keys, wanted.keys, strict=True):
            assert torch.allclose(own, other, atol=1e-6)
        assert all(map(torch.equal, pairs.values, wanted.values))


def test_a_document_that_was_kept_whole_is_asked_with_restored_ones(
    documents, tiny_model, tiny_tokenizer, tmp_path
):
    short = compress(tiny_model, tiny_tokenizer, "31 goats.", ratio=1, adapter=None)
    short.save(tmp_path / "short.rkv")
    store = RaggedStore(tmp_path, describe_engine_model(tiny_model))
    rope_model = build_rope_model(tiny_model.config)
    for names in (["short", "red"], ["red", "short"]):
        files = [tmp_path / f"{name}.rkv" for name in names]
        found = store.find_document(prompt(files, QUESTION, tiny_tokenizer))
        whole = compose([documents["red"] if name == "red" else short for name in names])
        cache = compose_files([open_cache_file(path) for path in files], rope_model)
        pairs = gather_pairs(cache, rope_model, slice(None), torch.float32)
        wanted = gather_pairs(whole.cache, rope_model, slice(None), torch.float32)
        assert pairs.lengths.equal(wanted.lengths) and pairs.lengths.equal(found.lengths)
        assert all(map(torch.equal, pairs.values, wanted.values))


def test_a_composition_is_another_document_than_its_parts(store, documents, tiny_tokenizer):
    files = [store.folder / f"{name}.rkv" for name in ("red", "blue")]
    names = {store.find_document(prompt(file, QUESTION, tiny_tokenizer)).name for file in files}
    for order in (files, files[::-1]):
        body = chat(order, QUESTION, tiny_tokenizer)
        found = store.find_document(
            body["kv_transfer_params"]["prompt_token_ids"], body["kv_transfer_params"]["document"]
        )
        assert found.name not in names
        names.add(found.name)
    assert len(names) == 4
    with pytest.raises(RestoreKVError, match="several documents, but the request names red"):
        store.find_document(prompt(files, QUESTION, tiny_tokenizer), "red")


def test_placeholders_that_do_not_stand_whole_at_the_beginning_are_refused(store, tiny_tokenizer):
    """vLLM would read them as text, such as a second document in a prompt as its question."""
    red, blue = (
        prompt(store.folder / f"{name}.rkv", QUESTION, tiny_tokenizer) for name in ("red", "blue")
    )
    both = prompt([store.folder / "red.rkv", store.folder / "blue.rkv"], QUESTION, tiny_tokenizer)
    for first in (red, both):
        for second in (blue, both):
            for question in ([], [5], [5, 6, 7] * 20):
                with pytest.raises(RestoreKVError, match="pass several documents and turns to one"):
                    store.find_document([*first[:PLACEHOLDERS], *question, *second])
        # After a system text, for example.
        with pytest.raises(RestoreKVError, match="put nothing before what"):
            store.find_document([5, *first])
    # As vLLM cuts prompts from their beginning; what is cut altogether cannot be seen. No file of
    # the folder was read before.
    most = prompt([store.folder / "red.rkv"] * MAX_DOCUMENTS, QUESTION, tiny_tokenizer)
    for asked in (red, both, most):
        unread = RaggedStore(store.folder, store.model)
        for cut in range(1, PLACEHOLDERS - 3):
            with pytest.raises(RestoreKVError, match="leave out truncate_prompt_tokens"):
                unread.find_document(asked[cut:])
        assert unread.find_document(asked[PLACEHOLDERS:]) is None
        assert unread.find_document(asked)
    with pytest.raises(RestoreKVError, match="no question"):
        store.find_document(both[:PLACEHOLDERS])


def test_documents_that_are_not_here_are_named(store, documents, tiny_tokenizer, tmp_path):
    asked = prompt([tmp_path / "red.rkv", tmp_path / "blue.rkv"], QUESTION, tiny_tokenizer)
    name = identify(open_cache_file(tmp_path / "blue.rkv")).name
    elsewhere = RaggedStore(tmp_path, store.model)
    damaged = [*asked[:5], asked[5] ^ 1, *asked[6:]]
    with pytest.raises(RestoreKVError, match="match no 2 documents of the store"):
        store.find_document(damaged)
    assert store.find_document(asked)
    (tmp_path / "blue.rkv").unlink()
    with pytest.raises(RestoreKVError, match=f"does not have {name}"):
        store.find_document(asked)
    with pytest.raises(RestoreKVError, match="does not have number 2"):
        elsewhere.find_document(asked)
    documents["blue"].save(tmp_path / "other.rkv")
    assert store.find_document(asked).parts[1].path.stem == "other"
    other = RaggedStore(tmp_path, replace(store.model, fingerprint="0" * 16))
    with pytest.raises(RestoreKVError, match="with other weights"):
        other.find_document(asked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": CompressionConfig(allocation="per-head")}, "differ in allocation"),
        ({"adapter": None}, "differ in adapter"),
        ({"config": CompressionConfig(system="Answer in one word.")}, "same chat prefix"),
    ],
)
def test_documents_that_were_not_made_alike_are_refused(
    store, tiny_model, tiny_tokenizer, options, message
):
    options = {"adapter": RestoreAdapter.create(tiny_model, 4, rank=2), "ratio": 0.3, **options}
    other = compress(tiny_model, tiny_tokenizer, TEXTS["blue"], **options)
    other.save(store.folder / "other.rkv")
    paths = [store.folder / "red.rkv", store.folder / "other.rkv"]
    with pytest.raises(RestoreKVError, match=message):
        prompt(paths, QUESTION, tiny_tokenizer)
    names = [identify(open_cache_file(path)).name for path in paths]
    assert name_composition(names)
    with pytest.raises(RestoreKVError, match=message):
        store.find_document([*make_ids(names), 1, 2, 3])


def test_documents_of_several_models_are_refused(store, documents, tiny_tokenizer):
    paths = [store.folder / "red.rkv", store.folder / "blue.rkv"]
    store.find_document(prompt(paths, QUESTION, tiny_tokenizer))
    first, second = list(store.parts.values())[:2]
    other = replace(second, manifest=replace(second.manifest, fingerprint="0" * 16))
    with pytest.raises(RestoreKVError, match="different models"):
        refuse_unlike_parts([first, other])


def test_portable_files_are_not_asked_together(tiny_model, tiny_tokenizer, tmp_path):
    small = compress(
        tiny_model,
        tiny_tokenizer,
        TEXTS["red"],
        ratio=0.3,
        adapter=None,
        config=CompressionConfig(allocation="per-head"),
    )
    portable = small.portable()
    with pytest.raises(RestoreKVError, match="Several portable files"):
        prompt([portable, portable], QUESTION, tiny_tokenizer)
