"""The protocol kvpress against kvpress 0.5.5's own pipeline: ids of contexts and questions, and how
answers end.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from restorekv.cache.ragged import RaggedCache
from restorekv.evaluation import protocols
from restorekv.generation.decoding import decode_answer, generate_ids, get_stop_ids
from restorekv.model.load import load_model
from restorekv.model.prefill import prefill
from restorekv.tasks import Question
from tests.helpers.models import build_model

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress is not installed; `make conformance` installs and uses it"
)
pytestmark = pytest.mark.kvpress

KVPRESS = protocols.make_protocol("kvpress")
TEXT = (
    "The code of the red house is seven. The blue house has a green door, and nobody lives "
    "there since May.\n\n" * 3
)
QUESTIONS = ["Which code?", "\n\nWho lives in the blue house, and why? ", "", "Question: ünïcode\n"]
PREFIXES = ["", "Answer:", " The special magic number is"]


@pytest.fixture(params=["chat", "none"])
def both(request, tmp_path, tiny_tokenizer):
    """(kvpress's pipeline, our model, tokenizer) of one tiny model, with and without a chat
    template.
    """
    build_model("qwen3").save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    model, tokenizer = load_model(str(tmp_path))
    if request.param == "none":
        tokenizer.chat_template, tokenizer.bos_token = None, "<|im_start|>"
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="sdpa", dtype=torch.float32
    ).eval()
    return (
        kvpress.KVPressTextGenerationPipeline(model=theirs, tokenizer=tokenizer),
        model,
        tokenizer,
    )


@pytest.mark.parametrize("answer_prefix", PREFIXES)
def test_ids_are_those_of_the_pipeline(both, answer_prefix):
    pipeline, _, tokenizer = both
    for limit in (10**9, 50, 20):
        wanted = pipeline.preprocess(TEXT, QUESTIONS, answer_prefix, limit)
        context, cut = KVPRESS.make_context("any", tokenizer, TEXT, limit)
        assert context.ids.equal(wanted["context_ids"])
        assert (
            cut
            == KVPRESS.make_context("any", tokenizer, TEXT)[0].num_tokens
            - wanted["context_ids"].shape[1]
        )
        for text, ids in zip(QUESTIONS, wanted["questions_ids"], strict=True):
            asked = Question("0", "task", text, (), 4, answer_prefix)
            assert KVPRESS.make_prompt(tokenizer, context, asked).equal(ids)


@torch.no_grad()
def test_the_first_id_of_an_answer_ends_nothing(both):
    """The EOS id is, in turn, every id that the full cache answers with."""
    pipeline, model, tokenizer = both
    context, _ = KVPRESS.make_context("any", tokenizer, TEXT)
    asked = Question("0", "task", QUESTIONS[0], (), 6, "Answer:")
    prompt = KVPRESS.make_prompt(tokenizer, context, asked)
    cache = RaggedCache.from_full_cache(prefill(model, context.ids))
    lengths = set()
    for stop in dict.fromkeys(generate_ids(model, tokenizer, cache, [prompt], 6)[0].tolist()):
        model.generation_config.eos_token_id = pipeline.model.generation_config.eos_token_id = stop
        wanted = pipeline(
            TEXT, question=asked.text, answer_prefix=asked.answer_prefix, max_new_tokens=6
        )["answer"]
        found = generate_ids(
            model, tokenizer, cache, [prompt], 6, first_may_stop=KVPRESS.first_may_stop
        )[0].tolist()
        # kvpress's pipeline leaves the EOS id in what it decodes, where it is a special token in
        # practice
        assert tokenizer.decode(found, skip_special_tokens=True) == wanted
        said = decode_answer(tokenizer, KVPRESS.trim_answer(found), get_stop_ids(model, tokenizer))
        assert wanted.startswith(said)
        lengths.add(len(found))
    assert 1 not in lengths and len(lengths) > 2
