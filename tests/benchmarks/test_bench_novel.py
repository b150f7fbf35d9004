"""A benchmark that takes its texts from the novel refuses more than there are in it."""

import pytest

from benchmarks.book import make_book
from benchmarks.growing import Options, measure_conversation
from benchmarks.vllm_answers import cut_documents, plan_documents
from benchmarks.workload import cut_texts, load_novel
from restorekv.errors import RestoreKVError
from restorekv.model.load import load_model


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


@pytest.fixture(scope="module")
def length(tiny):
    return len(tiny[1].encode(load_novel()))


def test_texts_are_as_long_as_asked_or_refused(tiny, length):
    texts = cut_texts(tiny[1], length // 2, 2)
    assert len(texts) == 2 and all(texts)
    with pytest.raises(RestoreKVError, match=f"{length:,} tokens.*4 texts of {length // 2:,}"):
        cut_texts(tiny[1], length // 2, 4)
    with pytest.raises(RestoreKVError, match="1 text of"):
        cut_texts(tiny[1], length + 1)


def test_a_book_is_as_long_as_asked_or_refused(tiny, length):
    with pytest.raises(RestoreKVError, match="The novel has"):
        make_book(tiny[1], 3 * length, seed=0)


def test_documents_of_vllm_are_as_long_as_planned_or_refused(tiny):
    with pytest.raises(RestoreKVError, match="The novel has"):
        cut_documents(tiny[1], plan_documents(300))


def test_a_conversation_is_about_as_many_tokens_as_asked_or_refused(tiny, length):
    options = Options("tiny", "tiny", "knorm", "0.5", (), turns=length)
    with pytest.raises(RestoreKVError, match="The novel has"):
        measure_conversation(*tiny, options)
