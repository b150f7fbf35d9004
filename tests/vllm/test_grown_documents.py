"""Answers of the fake vLLM about documents that were appended to, folded or composed are those of
`ask`.
"""

import pytest

from restorekv import compose
from restorekv.generation.decoding import get_stop_ids
from restorekv.restore.adapter import RestoreAdapter
from restorekv.vllm import prompt
from tests.helpers.fake_vllm import FakeVllm
from tests.helpers.grown import GROWN, make_grown_documents
from tests.helpers.models import build_model, build_tokenizer

QUESTIONS = ["Which code?", "Who lives there?"]
TOKENS = 12


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grown") / "store"
    folder.mkdir()
    model = build_model("llama")
    tokenizer = build_tokenizer()
    adapter = RestoreAdapter.create(model, 4, rank=2)
    documents = make_grown_documents(folder, model, tokenizer, adapter=adapter)
    return FakeVllm(model, tokenizer, folder), documents


def answer(fake, asked):
    document = fake.store.find_document(asked)
    stops = sorted(get_stop_ids(fake.model, fake.tokenizer))
    body = {"prompt": asked, "temperature": 0, "max_tokens": TOKENS, "stop_token_ids": stops}
    pieces = fake.answer(body, document, 0)
    return [token for piece in pieces for token in piece["token_ids"]]


@pytest.mark.parametrize("names", [*[[name] for name in GROWN], ["red", "blue"]])
def test_answers_are_those_of_ask(place, names):
    fake, documents = place
    paths = [fake.store.folder / f"{name}.rkv" for name in names]
    whole = documents[names[0]]
    if len(names) > 1:
        whole = compose([documents[name] for name in names])
    for question in QUESTIONS:
        asked = prompt(paths if len(paths) > 1 else paths[0], question, fake.tokenizer)
        wanted = whole.ask(question, max_new_tokens=TOKENS, details=True)
        assert answer(fake, asked) == list(wanted.ids)
