"""Which document a prompt asks, without vLLM: unknown, damaged, foreign and replaced documents are
never served.
"""

import os
import shutil
import time
from dataclasses import replace

import pytest
import torch

from restorekv import seal
from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.model.rope import get_rope_settings
from restorekv.model.shape import CacheShape
from restorekv.storage.portable import KIND, load_portable
from restorekv.vllm import prompt, transfer_config
from restorekv.vllm.document_store import EngineModel, find_heads, find_limit
from restorekv.vllm.portable_store import PortableStore
from tests.helpers.models import VOCABULARY, build_model
from tests.helpers.portables import QUESTION, TEXTS, portable_of


def expected_for(model, **more):
    shape = CacheShape.from_model(model)
    facts = {
        "layers": shape.layers,
        "heads": shape.heads,
        "head_dim": shape.head_dim,
        "vocabulary": VOCABULARY,
        "limit": find_limit(model.config),
    }
    return EngineModel(
        **{**facts, "rope": get_rope_settings(model.config), "dtype": "float32", **more}
    )


@pytest.fixture
def place(tiny_model, tiny_tokenizer, tmp_path):
    documents = [portable_of(tiny_model, tiny_tokenizer, text) for text in TEXTS]
    for document, name in zip(documents, ("red", "blue"), strict=True):
        document.save(tmp_path / f"{name}.safetensors")
    return tmp_path, documents, PortableStore(tmp_path, expected_for(tiny_model)), tiny_tokenizer


def test_a_prompt_finds_its_document_and_its_pairs(place):
    _, documents, store, tokenizer = place
    # Of equal length, which is the hard case.
    assert len({document.tokens for document in documents}) == 1
    for document, name in zip(documents, ("red", "blue"), strict=True):
        found = store.find_document(prompt(document, QUESTION, tokenizer))
        assert (found.name, found.path.stem) == (document.name, name)
        keys, values = store.load_pairs(found)
        assert keys.equal(document.keys) and values.equal(document.values)


def test_other_prompts_are_not_ours(place):
    _, documents, store, tokenizer = place
    assert store.find_document(tokenizer.encode(QUESTION)) is None
    assert store.find_document([]) is None
    with pytest.raises(
        RestoreKVError, match="does not begin with placeholders of the document red"
    ):
        store.find_document(tokenizer.encode(QUESTION), "red")
    asked = prompt(documents[0], QUESTION, tokenizer)
    assert (
        store.find_document(asked, "red").name
        == store.find_document(asked, documents[0].name).name
        == documents[0].name
    )
    with pytest.raises(RestoreKVError, match=r"red.safetensors, but the request names blue"):
        store.find_document(asked, "blue")


def test_every_changed_placeholder_is_refused(place):
    _, documents, store, tokenizer = place
    asked = prompt(documents[0], QUESTION, tokenizer)
    for index in range(4, documents[0].tokens):
        other = [*asked[:index], (asked[index] + 1) % VOCABULARY, *asked[index + 1 :]]
        with pytest.raises(RestoreKVError, match="does not have"):
            store.find_document(other)
    with pytest.raises(RestoreKVError, match="no question"):
        store.find_document(asked[: documents[0].tokens])


def test_placeholders_that_do_not_stand_whole_at_the_beginning_are_refused(place):
    """vLLM would read the placeholders as a text, and answer without a document."""
    _, documents, store, tokenizer = place
    red, blue = (prompt(document, QUESTION, tokenizer) for document in documents)
    tokens = documents[0].tokens
    assert store.find_document(red)
    for cut in range(1, tokens - 3):
        with pytest.raises(RestoreKVError, match="leave out truncate_prompt_tokens"):
            store.find_document(red[cut:])
        with pytest.raises(RestoreKVError, match=r"does not begin with placeholders of .* red"):
            store.find_document(red[cut:], "red")
    assert store.find_document(red[tokens:]) is None
    for ids in ([5, *red], [*red, *blue], [*red[:tokens], *blue], [5] * 99 + red):
        with pytest.raises(RestoreKVError, match="are not complete at its beginning"):
            store.find_document(ids)


def test_a_file_that_was_replaced_by_one_of_the_same_time_is_found(place):
    """Archives and reproducible builds give all their files the same time of modification."""
    folder, documents, store, tokenizer = place
    red, blue = (prompt(document, QUESTION, tokenizer) for document in documents)
    (folder / "blue.safetensors").rename(folder / "new")
    times = (folder / "red.safetensors").stat()
    assert store.find_document(red).path.stem == "red"
    time.sleep(0.02)  # clocks of file systems are coarse
    os.utime(folder / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (folder / "new").replace(folder / "red.safetensors")
    found = store.find_document(blue)
    assert found.path.stem == "red" and store.load_pairs(found)[0].equal(documents[1].keys)
    with pytest.raises(RestoreKVError, match="does not have"):
        store.find_document(red)


def test_files_may_come_go_and_change(place):
    folder, documents, store, tokenizer = place
    asked = [prompt(document, QUESTION, tokenizer) for document in documents]
    shutil.move(folder / "blue.safetensors", folder / "away")
    with pytest.raises(RestoreKVError, match="does not have"):
        store.find_document(asked[1])
    shutil.move(folder / "away", folder / "again.safetensors")
    found = store.find_document(asked[1])
    shutil.copy(folder / "red.safetensors", folder / "again.safetensors")
    with pytest.raises(CacheFileError, match="replaced by a different document"):
        store.load_pairs(found)
    raw = (folder / "red.safetensors").read_bytes()
    for path in folder.glob("*.safetensors"):
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    fresh = PortableStore(folder, store.model)
    # Which says what is wrong with it.
    with pytest.raises(RestoreKVError, match=r"does not have\. .*red.safetensors"):
        fresh.find_document(asked[0])


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"head_dim": 7}, "head_dim"),
        ({"heads": 7}, "heads"),
        ({"layers": 1}, "layers"),
        ({"rope": {"rope_type": "yarn"}}, "rope"),
        ({"fingerprint": "0"}, "other weights"),
        ({"vocabulary": 9}, "token ids"),
        ({"vocabulary": VOCABULARY + 1}, "token ids"),
    ],
)
def test_documents_of_another_model_are_refused(tiny_model, place, facts, what):
    """The error of a prompt about one says why, whatever vocabulary its placeholders come from."""
    folder, documents, _, tokenizer = place
    expected = expected_for(tiny_model, **facts)
    with pytest.raises(CacheFileError, match=what):
        expected.check(documents[0].manifest, folder / "red.safetensors", documents[0].vocabulary)
    store = PortableStore(folder, expected)
    store.scan()
    with pytest.raises(RestoreKVError, match=f"red.safetensors was made .*{what}"):
        store.find_document(prompt(documents[0], QUESTION, tokenizer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pairs_are_cast_to_the_dtype_of_the_engine(tiny_model, place, dtype):
    folder, documents, _, tokenizer = place
    store = PortableStore(folder, expected_for(tiny_model, dtype=str(dtype).removeprefix("torch.")))
    for document in documents:  # the placeholders stay those of the file
        keys, values = store.load_pairs(store.find_document(prompt(document, QUESTION, tokenizer)))
        assert keys.equal(document.keys.to(dtype)) and values.equal(document.values.to(dtype))


def test_numbers_that_the_dtype_cannot_hold_are_refused(tiny_model, place):
    folder, documents, _, tokenizer = place
    values = documents[0].values
    # Float16 ends at 65,504.
    large = replace(documents[0], values=values * (65_530 / values.abs().max()))
    large.save(folder / "large.safetensors")
    for dtype, fits in (("float16", False), ("bfloat16", True)):
        store = PortableStore(folder, expected_for(tiny_model, dtype=dtype))
        found = store.find_document(prompt(large, QUESTION, tokenizer))
        if fits:
            assert store.load_pairs(found)[1].isfinite().all()
        else:
            with pytest.raises(CacheFileError, match="too large for float16"):
                store.load_pairs(found)


def test_a_file_cannot_claim_the_placeholders_of_another(tiny_tokenizer, place):
    folder, documents, store, _ = place
    metadata, tensors = seal.read_sealed(folder / "blue.safetensors", KIND)
    seal.write_sealed(
        folder / "forged.safetensors", KIND, {**tensors, "ids": documents[0].ids}, metadata
    )
    with pytest.raises(CacheFileError, match="do not follow from its contents"):
        load_portable(folder / "forged.safetensors")
    assert store.find_document(prompt(documents[0], QUESTION, tiny_tokenizer)).path.stem == "red"


def test_links_and_fifos_among_the_files_hide_no_document(place):
    folder, documents, store, tokenizer = place
    (folder / "a.safetensors").symlink_to("a.safetensors")
    (folder / "b.safetensors").symlink_to("/dev/zero")
    os.mkfifo(folder / "c.safetensors")
    assert store.find_document(prompt(documents[0], QUESTION, tokenizer)).name == documents[0].name


@pytest.mark.parametrize(
    ("heads", "ranks", "held"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (3, 3, [[0], [1], [2]]),
        (1, 2, [[0], [0]]),
    ],
)
def test_tensor_parallel_ranks_take_their_heads(heads, ranks, held):
    """Heads are spread as in vLLM: in blocks, and if there are more ranks than heads, each head to
    neighboring ranks.
    """
    assert [list(range(heads))[find_heads(rank, ranks, heads)] for rank in range(ranks)] == held


def test_memory_is_bounded(place):
    _, documents, store, tokenizer = place
    store.limit = 1
    for document in documents:
        store.load_pairs(store.find_document(prompt(document, QUESTION, tokenizer)))
        assert list(store.loaded) == [document.name]


def test_the_configuration_of_vllm(tmp_path):
    config = transfer_config(tmp_path, memory=5)
    assert config["kv_connector_extra_config"] == {"store": str(tmp_path), "memory": 5}
    assert config["kv_load_failure_policy"] == "fail"
    with pytest.raises(RestoreKVError, match="is not a folder"):
        PortableStore(tmp_path / "nowhere", expected_for(build_model("llama")))


def test_random_ids_never_match(place):
    _, _, store, _ = place
    torch.manual_seed(0)
    for _ in range(50):
        assert store.find_document(torch.randint(0, VOCABULARY, (60,)).tolist()) is None
