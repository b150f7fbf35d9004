"""Families of models that people run: what RestoreKV answers over a compressed text, against
transformers' own.

Each family is a small random model (examples/families.py). At ratio 1 the oracle is the class
itself, which reads text and question at once; below 1 it is one dense pass in float64 with a mask
for every layer and head, made from the config's own words (tests/helpers/hybrids.py). Texts are 64
tokens longer than the windows.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from restorekv.compression.eviction import make_compressor
from restorekv.errors import ModelError, RestoreKVError
from restorekv.generation import decoding
from restorekv.model.prompt import Context
from restorekv.model.shape import CacheShape, is_hybrid
from restorekv.model.support import UNLIMITED, get_support
from tests.families import USED, judge_model
from tests.helpers import decoders, exactness
from tests.helpers.exactness import TOKENIZER, measure_error, random_ids, read_question
from tests.helpers.families import FAMILIES, build_family, example
from tests.helpers.hybrids import dense_logits, full_rows

PREFIX, QUESTION, ANSWER = 3, 20, 12
TEXT = example.WINDOW + 64
CLOSE = 2e-5  # relative to the largest logit, in float32
EVICTORS = ["kvzip:chunk=40", "snapkv:window=8"]
# What families are refused for, or from which position on.
REFUSED = {
    "Llama 4 beyond its chunk": (
        "llama4_text",
        {"attention_chunk_size": example.WINDOW, "intermediate_size_mlp": 48, **example.EXPERTS},
        f"layers see at most {example.WINDOW} positions",
    ),
    "Mistral beyond its window": (
        "mistral",
        {"sliding_window": example.WINDOW},
        f"every layer sees at most {example.WINDOW} positions, so that nothing of a longer text is "
        "left to evict",
    ),
}
HYBRID = {
    "Qwen2 with windows",
    "Qwen3 with windows",
    "Gemma 2",
    "Gemma 3",
    "Gemma 3n",
    "Gemma 4",
    "Gemma 4 with shared pairs",
    "Qwen3.5",
    "Qwen3.5 with experts",
    "Qwen3-Next",
    "OLMo Hybrid",
    "LFM2",
    "LFM2 with experts",
    "Granite with state-space layers",
    "Nemotron-H",
    "Falcon-H1",
    "gpt-oss",
    "Flint",
    "Cohere 2",
    "OLMo 3",
    "EXAONE 4",
    "Granite with windows",
}


def make_context(seed=0):
    return Context(random_ids(TEXT, seed), PREFIX, random_ids(2, 9))


def prepare(model, spec="random", context=None):
    return make_compressor(spec).prepare(model, TOKENIZER, context or make_context())


def answer_questions(family, count):
    """Answers to short questions, of RestoreKV in one batch and of `generate` one by one."""
    model = build_family(family)
    plain = exactness.plain_copy(model)
    context = make_context()
    cache = prepare(model, context=context).evict(1)
    asked = [random_ids(2 + seed % 9, 100 + seed) for seed in range(count)]
    written = decoding.generate_ids(model, TOKENIZER, cache, asked, ANSWER)
    wanted = []
    for each in asked:
        ids = torch.cat([context.ids, each], -1)
        wanted.append(exactness.greedy_ids(plain, ids, ANSWER, None))
    return [each.tolist() for each in written], wanted


def is_tie(family, number, written, wanted):
    """Whether two answers part where float64 has two tokens closer than float32 can tell apart."""
    common = 0
    while written[common] == wanted[common]:
        common += 1
    asked = random_ids(2 + number % 9, 100 + number)
    ids = torch.cat([make_context().ids, asked, torch.tensor([wanted[:common]]).long()], -1)
    with torch.no_grad():
        logits = build_family(family).double()(input_ids=ids).logits[0, -1]
    best = logits.topk(2).indices.tolist()
    gap = abs(float(logits[written[common]] - logits[wanted[common]]))
    return {written[common], wanted[common]} == set(best) and gap < 2e-6 * float(logits.abs().max())


def test_there_are_many_families_and_the_hybrid_ones_are_known():
    kinds = {kind for kind, _ in example.FAMILIES.values()}
    assert len(kinds) >= 16
    found = {family for family in FAMILIES if is_hybrid(build_family(family))}
    assert found == HYBRID & set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_lost_at_ratio_1(family):
    model = build_family(family)
    plain = exactness.plain_copy(model)
    context = make_context()
    asked = random_ids(QUESTION, 1)
    cache = prepare(model, context=context).evict(1)
    with torch.no_grad():
        whole = torch.cat([context.ids, asked], -1)
        expected = plain(input_ids=whole).logits[:, TEXT:]
    with torch.no_grad():
        own = read_question(model, cache, asked)
    assert measure_error(own, expected) < CLOSE


@pytest.mark.parametrize("spec", EVICTORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_question_sees_what_is_kept(family, spec):
    check_what_a_question_sees(build_family(family), spec)


@pytest.mark.parametrize("spec", [*EVICTORS, "kvzip+:chunk=40", "contrastkv:chunk=40", "tova"])
def test_passes_of_evictors_read_a_class_that_asks_what_layers_hold(spec):
    """Mllama's own code asks each layer of a cache how many numbers it has."""
    longer = {"max_position_embeddings": 1024, "num_hidden_layers": 3}
    check_what_a_question_sees(decoders.build("mllama", **longer), spec)


def check_what_a_question_sees(model, spec):
    context = make_context()
    asked = random_ids(QUESTION, 1)
    cache = prepare(model, spec, context).evict(0.4)
    keep = cache.mark_held(TEXT)
    assert len(keep) == len(full_rows(model)) == CacheShape.from_model(model).layers
    whole = torch.cat([context.ids, asked], -1)
    expected = dense_logits(model, whole, [(TEXT, whole.shape[-1], keep)])[:, TEXT:]
    with torch.no_grad():
        own = read_question(model, cache, asked)
    assert measure_error(own, expected) < CLOSE
    nothing_hidden = dense_logits(model, whole, [])[:, TEXT:]
    assert measure_error(nothing_hidden, expected) > 100 * CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_generate(family):
    written, wanted = answer_questions(family, 4)
    assert written == wanted


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_50_greedy_answers_are_those_of_generate(family):
    written, wanted = answer_questions(family, 50)
    different = [number for number in range(50) if written[number] != wanted[number]]
    assert len(different) <= 1
    for number in different:
        assert is_tie(family, number, written[number], wanted[number])
    assert len({tuple(each) for each in written}) > 25  # they depend on the questions


def test_a_class_may_ask_what_a_layer_holds():
    """Mllama's own code asks each layer of a cache how many numbers it has."""
    model = decoders.build("mllama", num_hidden_layers=3)
    outcome, why, problems = judge_model(model, 0)
    assert (outcome, problems) == (USED, []), why


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_not_built_is_one_sentence(family):
    kind, settings, sentence = REFUSED[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=320, **{**example.SIZES, **settings})
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(RestoreKVError, match=sentence) as refused:
        prepare(model)
    text = str(refused.value)
    assert text.endswith(".") and "\n" not in text


def test_the_example_prints_what_it_found(capsys, monkeypatch):
    example.main("Llama", "gpt-oss")
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["Llama", "equal"],
        ["gpt-oss", "equal"],
    ]
    own = example.compress
    evicting = lambda *given, ratio, **options: own(*given, ratio=0.1, **options)  # noqa: E731
    monkeypatch.setattr(example, "compress", evicting)
    example.main("Llama")
    assert capsys.readouterr().out.split() == ["Llama", "different"]


def test_sinks_are_known_and_of_the_layers_of_some_families_only():
    assert get_support(build_family("gpt-oss")).has_sinks
    for family in {"Granite with windows"} & set(FAMILIES):
        assert get_support(build_family(family)).has_sinks
    assert not get_support(build_family("Gemma 3")).has_sinks
    assert get_support(build_family("gpt-oss")).positions == UNLIMITED


def refuse_anew(model, name):
    """The refusal of a model whose config was not seen before."""
    model.config.name = name
    with pytest.raises(ModelError) as refused:
        get_support(model)
    return str(refused.value)


def test_sinks_that_are_computed_otherwise_are_refused(monkeypatch):
    """What the class computes decides, not what it hands to attention."""
    model = build_family("gpt-oss")
    attention = model.model.layers[0].self_attn
    module = __import__(type(attention).__module__, fromlist=["eager_attention_forward"])
    own = module.eager_attention_forward

    def without_sinks(layer, query, key, value, mask, scaling, **options):
        groups = layer.num_key_value_groups
        logits = query @ key.repeat_interleave(groups, 1).mT * scaling + mask
        weights = logits.softmax(-1)
        return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2), weights

    def capped(layer, query, key, value, mask, scaling, **options):
        result, weights = own(layer, query * 0.9, key, value, mask, scaling, **options)
        return result, weights

    said = "in a different way, such as with a different cap or sink"
    for name, eager in (("without sinks", without_sinks), ("capped", capped)):
        monkeypatch.setattr(module, "eager_attention_forward", eager)
        assert said in refuse_anew(model, name)


@pytest.mark.parametrize("sinks", [torch.zeros(2), torch.zeros(4, 1), 0.5])
def test_sinks_that_are_not_one_for_each_query_head_are_refused(sinks):
    model = build_family("gpt-oss")
    attention = model.model.layers[1].self_attn
    forward = type(attention).forward

    class Other(type(attention)):
        def forward(self, *args, **options):
            del self._parameters["sinks"]
            self.sinks = sinks
            return forward(self, *args, **options)

    Other.__module__ = type(attention).__module__
    attention.__class__ = Other
    assert "has sinks that are not one logit of each query head" in refuse_anew(model, str(sinks))
