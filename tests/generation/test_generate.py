"""Answers of `ask` compared with transformers' `generate`: order, batches, stops, streams."""

import pytest
import torch

from restorekv.errors import RestoreKVError
from restorekv.generation.answers import AnswerStream, answer_greedily, stream_answer
from restorekv.generation.decoding import generate_ids, get_stop_ids
from restorekv.generation.transformers_generate import make_generate_inputs
from restorekv.model.prompt import encode_question, make_context
from restorekv.pipeline import compress
from tests.helpers import decoders
from tests.helpers.decoding import QUESTIONS, TEXT, make_cache
from tests.helpers.models import build_model


@pytest.fixture
def case(tiny_model, tiny_tokenizer):
    context = make_context(tiny_tokenizer, TEXT)
    return tiny_model, tiny_tokenizer, context, make_cache(tiny_model, context)


@pytest.mark.parametrize("restore", [0, 4])
def test_ask_is_generate(tiny_model, tiny_tokenizer, restore):
    context = make_context(tiny_tokenizer, TEXT)
    cache = make_cache(tiny_model, context, restore)
    for question in QUESTIONS:
        inputs = make_generate_inputs(tiny_tokenizer, context, cache, question)
        result = tiny_model.generate(
            **inputs,
            past_key_values=cache.fork(),
            max_new_tokens=20,
            do_sample=False,
            pad_token_id=0,
        )
        theirs = result[0, inputs["input_ids"].shape[1] :].tolist()
        asked = encode_question(tiny_tokenizer, context, question)
        assert generate_ids(tiny_model, tiny_tokenizer, cache, [asked], 20)[0].tolist() == theirs


@pytest.mark.parametrize("function", ["eager", "sdpa"])
def test_another_attention_function_may_be_set_meanwhile(function, tiny_tokenizer):
    """Users do so to look at attention weights."""
    model = build_model("llama")
    small = compress(model, tiny_tokenizer, TEXT, ratio=0.5, adapter=None, evictor="knorm")
    expected = small.ask(QUESTIONS[0], max_new_tokens=8)
    asking = {
        "ask": lambda: small.ask(QUESTIONS[0], max_new_tokens=8),
        "chat": lambda: small.chat().ask(QUESTIONS[0], max_new_tokens=8),
        "generate": lambda: small.generate(QUESTIONS[0], max_new_tokens=8),
    }
    for name, ask in asking.items():
        model.set_attn_implementation(function)
        assert ask() == expected, name


def test_order_and_batches_do_not_matter(case):
    together = answer_greedily(*case, QUESTIONS, 20)
    assert answer_greedily(*case, QUESTIONS[::-1], 20) == together[::-1]
    assert [answer_greedily(*case, [question], 20)[0] for question in QUESTIONS] == together
    many = [f"{question} {number}" for number in range(5) for question in QUESTIONS]
    assert answer_greedily(*case, many, 3) == [
        answer_greedily(*case, [question], 3)[0] for question in many
    ]
    assert case[3].get_seq_length() == case[2].num_tokens + 4  # the cache itself never grew


def test_first_token_can_end_the_answer(case):
    model, tokenizer, context, cache = case
    prompt = encode_question(tokenizer, context, QUESTIONS[0])
    first = int(generate_ids(model, tokenizer, cache, [prompt], 1)[0])
    model.generation_config.eos_token_id = [5, first]
    assert get_stop_ids(model, tokenizer) == {5, first}
    assert generate_ids(model, tokenizer, cache, [prompt], 20, first_may_stop=False)[0].numel() > 1
    assert generate_ids(model, tokenizer, cache, [prompt], 20)[0].tolist() == [first]
    assert answer_greedily(model, tokenizer, context, cache, QUESTIONS[:1], 20) == [""]


def test_without_ids_of_the_model_the_tokenizers_eos_ends_answers(case):
    model, tokenizer = case[:2]
    for ids, wanted in ((None, {tokenizer.eos_token_id}), ([], set()), (7, {7}), ([7, 5], {5, 7})):
        model.generation_config.eos_token_id = ids
        assert get_stop_ids(model, tokenizer) == wanted


def test_each_question_may_have_its_own_limit(case):
    model, tokenizer, context, cache = case
    prompts = [encode_question(tokenizer, context, question) for question in QUESTIONS]
    model.generation_config.eos_token_id = 319
    lengths = [
        len(answer) for answer in generate_ids(model, tokenizer, cache, prompts, [1, 5, 2, 7])
    ]
    assert (
        all(found <= limit for found, limit in zip(lengths, [1, 5, 2, 7], strict=True))
        and max(lengths) > 2
    )


def test_stream_gives_the_answer_in_pieces(case):
    model, tokenizer, context, cache = case
    pieces = list(stream_answer(model, tokenizer, (context, cache, QUESTIONS[0]), 20))
    assert "".join(pieces) == answer_greedily(*case, QUESTIONS[:1], 20)[0] and len(pieces) > 1


def test_a_stream_that_failed_has_no_answer():
    """The next piece was the end of an answer that nobody had finished."""

    def write():
        yield "se"
        raise MemoryError("full")

    stream = AnswerStream(write(), lambda: pytest.fail("what failed is no answer"))
    assert next(stream) == "se"
    with pytest.raises(MemoryError):
        next(stream)
    assert next(stream, "end") == "end"
    assert stream.answer is None


@pytest.mark.parametrize("limit", [0, -1, [1], [1, 2, 3, 0]])
def test_refused_limits(case, limit):
    with pytest.raises(RestoreKVError, match="max_new_tokens"):
        answer_greedily(*case, QUESTIONS, limit)


@pytest.mark.parametrize("others", [0, 1])
def test_a_prompt_without_ids_is_refused(case, others):
    """In a batch, its padding was once answered as if it were a question."""
    model, tokenizer, context, cache = case
    prompts = [torch.empty(0, dtype=torch.long)]
    prompts += [encode_question(tokenizer, context, QUESTIONS[0])] * others
    with pytest.raises(RestoreKVError, match="A question has no tokens"):
        generate_ids(model, tokenizer, cache, prompts, 4)


def test_no_questions_no_answers(case):
    assert answer_greedily(*case, [], 5) == []


def test_generating_in_batches_and_with_beams(tiny_tokenizer):
    """Check transformers' own batches over a shared context, with left padding after the restore
    cache.
    """
    model = build_model("qwen3")
    context = make_context(tiny_tokenizer, TEXT)
    cache = make_cache(model, context)
    made = [
        make_generate_inputs(tiny_tokenizer, context, cache, question) for question in QUESTIONS
    ]
    past, width = cache.get_seq_length(), max(one["input_ids"].shape[1] for one in made)
    ids, mask = (
        torch.zeros(len(made), width, dtype=torch.long),
        torch.zeros(len(made), width, dtype=torch.long),
    )
    for row, one in enumerate(made):
        asked = one["input_ids"][0, past:]
        ids[row, :past], mask[row, :past] = one["input_ids"][0, :past], 1
        ids[row, width - len(asked) :], mask[row, width - len(asked) :] = asked, 1
    model.generation_config.eos_token_id = 319
    tiny = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    result = model.generate(
        input_ids=ids, attention_mask=mask, past_key_values=cache.fork(4), **tiny
    )[:, width:]
    prompts = [encode_question(tiny_tokenizer, context, question) for question in QUESTIONS]
    alone = generate_ids(model, tiny_tokenizer, cache, prompts, 6)
    assert [row[: len(one)].tolist() for row, one in zip(result, alone, strict=True)] == [
        x.tolist() for x in alone
    ]
    beams = model.generate(**made[0], past_key_values=cache.fork(3), num_beams=3, **tiny)
    assert beams.shape[1] > made[0]["input_ids"].shape[1]


def test_a_forward_pass_that_returns_the_logits_of_all_tokens(tiny_tokenizer, monkeypatch):
    """The logits of the first tokens must not be taken for those of the last ones."""
    small = compress(build_model("llama"), tiny_tokenizer, TEXT, ratio=0.5, adapter=None)
    wanted = small.ask(QUESTIONS, max_new_tokens=6)
    own = small.model.forward

    def forward(*args, logits_to_keep=0, **options):
        return own(*args, **options)

    monkeypatch.setattr(small.model, "forward", forward)
    assert small.ask(QUESTIONS, max_new_tokens=6) == wanted
    assert [small.ask(question, max_new_tokens=6) for question in QUESTIONS] == wanted


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_attention_between_two_pieces_changes_nothing(tiny_tokenizer, implementation):
    small = compress(build_model("llama"), tiny_tokenizer, TEXT, ratio=0.5, adapter=None)
    wanted = list(small.ask(QUESTIONS[0], 8, stream=True))
    pieces = small.ask(QUESTIONS[0], 8, stream=True)
    found = [next(pieces)]
    small.model.set_attn_implementation(implementation)
    assert found + list(pieces) == wanted and len(wanted) > 1


def test_autocast_between_two_pieces_is_refused(tiny_tokenizer):
    small = compress(build_model("llama"), tiny_tokenizer, TEXT, ratio=0.5, adapter=None)
    pieces = small.ask(QUESTIONS[0], 8, stream=True)
    next(pieces)
    with torch.autocast("cpu"), pytest.raises(RestoreKVError, match="autocast is on"):
        list(pieces)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "olmoe", "granitemoe", "gpt_oss"])
@pytest.mark.parametrize("graph", [False, True])
def test_a_mixture_whose_config_asks_for_router_logits(tiny_tokenizer, kind, graph):
    """A config has this after a training with their loss, which needs transformers' own mask."""
    text = TEXT[:20]
    answers = []
    for asked in (False, True):
        model = decoders.build(kind, output_router_logits=asked)
        options = {"ratio": 1, "evictor": "knorm", "adapter": None}
        small = compress(model, tiny_tokenizer, text, **options)
        answers.append(small.ask("x?", max_new_tokens=5, graph=graph))
    assert answers[0] == answers[1]
