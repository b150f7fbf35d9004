"""Models that take images too: text is compressed and answered by their language model, as the
whole class reads it.
"""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from restorekv import CompressedContext, RestoreAdapter, compress
from restorekv.cache.states import HAS_STATES
from restorekv.compression.eviction import make_compressor
from restorekv.errors import ModelError, RestoreKVError
from restorekv.generation import decoding
from restorekv.model.cache_argument import pass_cache_to_generate
from restorekv.model.prompt import Context
from restorekv.model.shape import find_state_layers, get_backbone
from tests.helpers import decoders, exactness
from tests.helpers.compressing import QUESTIONS, compress_with
from tests.helpers.compressing import TEXT as SENTENCES
from tests.helpers.exactness import TOKENIZER, measure_error, random_ids, read_question
from tests.helpers.families import example
from tests.helpers.hybrids import dense_logits

PREFIX, QUESTION, ANSWER = 3, 20, 12
TEXT = example.WINDOW + 64
CLOSE = 2e-5
LANGUAGE = {**example.SIZES, "vocab_size": 320, "bos_token_id": None, "eos_token_id": 2}
VISION = {"hidden_size": 16, "num_heads": 2, "patch_size": 14, "initializer_range": 0.2}
# Of the two later Qwen towers
PROJECTED = {**VISION, "out_hidden_size": 32, "intermediate_size": 16}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
IMAGE_IDS = {
    "image_token_id": 319,
    "video_token_id": 318,
    "vision_start_token_id": 317,
    "vision_end_token_id": 316,
}


TOWER = {  # Gemma's, of one layer
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
}


def make_gemma():
    config = Gemma3Config(
        text_config={
            **LANGUAGE,
            "sliding_window": example.WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 20,
        },
        vision_config={**TOWER, "image_size": 28},
        mm_tokens_per_image=4,
        image_token_index=319,
        boi_token_index=318,
        eoi_token_index=317,
    )
    return Gemma3ForConditionalGeneration(config)


def make_gemma4():
    config = AutoConfig.for_model(
        "gemma4",
        text_config={
            **LANGUAGE,
            "sliding_window": example.WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 320,
            "use_bidirectional_attention": "vision",
        },
        vision_config={
            **TOWER,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "position_embedding_size": 64,
        },
        image_token_id=319,
        boi_token_id=318,
        eoi_token_id=317,
        video_token_id=316,
    )
    return AutoModelForImageTextToText.from_config(config)


def make_qwen2():
    vision = {**VISION, "depth": 1, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config=LANGUAGE | ROPE, vision_config=vision, **IMAGE_IDS)
    return Qwen2VLForConditionalGeneration(config)


def make_qwen2_5():
    vision = {**PROJECTED, "depth": 1, "fullatt_block_indexes": [0]}
    config = Qwen2_5_VLConfig(text_config=LANGUAGE | ROPE, vision_config=vision, **IMAGE_IDS)
    return Qwen2_5_VLForConditionalGeneration(config)


def make_qwen3():
    vision = {
        **PROJECTED,
        "depth": 2,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    config = Qwen3VLConfig(text_config=LANGUAGE | ROPE, vision_config=vision, **IMAGE_IDS)
    return Qwen3VLForConditionalGeneration(config)


def make_qwen3_5():
    config = AutoConfig.for_model(
        "qwen3_5",
        text_config={
            **LANGUAGE,
            **example.LINEAR,
            "head_dim": 16,
            "rope_parameters": {**ROPE["rope_parameters"], "partial_rotary_factor": 0.5},
        },
        vision_config={**PROJECTED, "depth": 1, "num_position_embeddings": 16},
        **IMAGE_IDS,
    )
    return AutoModelForImageTextToText.from_config(config)


MODELS = {
    "Gemma 3": make_gemma,
    "Qwen2-VL": make_qwen2,
    "Qwen2.5-VL": make_qwen2_5,
    "Qwen3-VL": make_qwen3,
}
if decoders.HAS_LAYER_CONFIGS:
    MODELS["Gemma 4"] = make_gemma4
if HAS_STATES:
    MODELS["Qwen3.5"] = make_qwen3_5


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    model = MODELS[request.param]().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += 0.3 * torch.randn(parameter.shape)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def make_context():
    return Context(random_ids(TEXT), PREFIX, random_ids(2, 9))


def prepare(model, spec="random"):
    return make_compressor(spec).prepare(model, TOKENIZER, make_context())


def make_adapter(model):
    adapter = RestoreAdapter.create(model, 4, rank=2, alpha=4)
    with torch.no_grad():
        for weight in adapter.lora:
            weight.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    return adapter


def test_nothing_is_lost_at_ratio_1(model):
    plain = exactness.plain_copy(model)
    cache = prepare(model).evict(1)
    asked = random_ids(QUESTION, 1)
    whole = torch.cat([make_context().ids, asked], -1)
    with torch.no_grad():
        expected = plain(input_ids=whole).logits[:, TEXT:]
        assert measure_error(read_question(model, cache, asked), expected) < CLOSE
    questions = [random_ids(2 + seed, 20 + seed) for seed in range(6)]
    written = decoding.generate_ids(model, TOKENIZER, cache, questions, ANSWER)
    wanted = []
    for each in questions:
        whole = torch.cat([make_context().ids, each], -1)
        wanted.append(exactness.greedy_ids(plain, whole, ANSWER, None))
    assert [each.tolist() for each in written] == wanted


@pytest.mark.parametrize("spec", ["kvzip:chunk=40", "snapkv:window=8", "expected-attention"])
def test_a_question_sees_what_is_kept(model, spec):
    has_sections = decoders.IS_OLD and "Qwen2" in str(type(model))
    if spec == "expected-attention" and has_sections:
        with pytest.raises(ModelError, match="does not know"):
            prepare(model, spec)
        return
    cache = prepare(model, spec).evict(0.4)
    keep = cache.mark_held(TEXT)
    asked = random_ids(QUESTION, 1)
    whole = torch.cat([make_context().ids, asked], -1)
    expected = dense_logits(model, whole, [(TEXT, whole.shape[-1], keep)])[:, TEXT:]
    with torch.no_grad():
        assert measure_error(read_question(model, cache, asked), expected) < CLOSE


def test_an_adapter_is_of_the_language_model_alone(model, tmp_path):
    """A vision tower has layers of the same names, which no text trains."""
    adapter = make_adapter(model)
    layers = len(get_backbone(model).layers)
    # Linear attention has projections of its own, which are no targets.
    targets = layers * 7 - len(find_state_layers(model.config)) * 4
    assert len(list(adapter.lora)) == targets * 2
    with torch.enable_grad():
        cache = prepare(model).with_restore_cache(adapter).evict(0.4)
        read_question(model, cache, random_ids(QUESTION, 1)).square().mean().backward()
    # After the last layer's keys and values nothing of the restore pass is used.
    unused = {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    trained = [weight for weight in adapter.lora if weight.grad is not None and weight.grad.any()]
    assert len(trained) == (targets - len(unused)) * 2
    adapter.save_pretrained(tmp_path / "adapter")
    again = RestoreAdapter.from_pretrained(model, tmp_path / "adapter")
    for own, other in zip(again.parameters(), adapter.parameters(), strict=True):
        assert own.equal(other)


def test_a_text_is_compressed_asked_and_saved(model, tmp_path):
    settings = {"ratio": 0.4, "evictor": "snapkv", "adapter": make_adapter(model)}
    small = compress_with(model, TOKENIZER, SENTENCES * 2, **settings)
    answers = small.ask(QUESTIONS, max_new_tokens=ANSWER)
    small.save(tmp_path / "small.rkv")
    again = CompressedContext.load(tmp_path / "small.rkv", model, TOKENIZER)
    assert again.ask(QUESTIONS, max_new_tokens=ANSWER) == answers
    chat = small.chat()
    assert chat.ask(QUESTIONS[0], ANSWER) == answers[0]


def test_another_attention_of_the_language_model_alone_changes_nothing(model):
    """Its config is not the whole model's, which still names ours then."""
    small = compress(model, TOKENIZER, SENTENCES, ratio=0.5, evictor="knorm", adapter=None)
    wanted = small.ask(QUESTIONS[0], 4)
    for part in (model.get_decoder(), model):
        part.set_attn_implementation({"text_config": "sdpa"} if part is model else "sdpa")
        assert small.ask(QUESTIONS[0], 4) == wanted


@pytest.mark.parametrize("name", [name for name in MODELS if name in ("Qwen2.5-VL", "Qwen3.5")])
def test_an_earlier_image_moves_no_question(name):
    """Its prompt leaves in the model how far its last position is from the number of its tokens."""
    model = MODELS[name]().eval()
    model.generation_config.eos_token_id = None
    small = compress(model, TOKENIZER, SENTENCES, ratio=0.5, evictor="knorm", adapter=None)
    answer = small.ask(QUESTIONS[0], 8, details=True)
    model.model.rope_deltas = torch.tensor([[-30]])
    assert small.generate(QUESTIONS[0], max_new_tokens=8) == answer.text
    inputs = small.inputs(QUESTIONS[0])
    rows = {name: tensor.expand(2, -1) for name, tensor in inputs.items()}
    own = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False}
    written = model.generate(**rows, **pass_cache_to_generate(small.cache.fork(2)), **own)
    for row in written:
        assert row[inputs["input_ids"].shape[1] :].tolist() == list(answer.ids)
    assert model.model.rope_deltas.tolist() == [[-30]]


@pytest.mark.parametrize("name", ["Gemma 3", "Qwen3-VL"])
def test_what_is_no_text_is_refused_with_what_to_pass(name):
    model = MODELS[name]().eval()
    processor = object.__new__(Gemma3Processor)
    with pytest.raises(RestoreKVError, match=r"not a Gemma3Processor; pass processor\.tokenizer"):
        compress(model, processor, SENTENCES, evictor="snapkv")
    part = [{"type": "image", "url": "a.png"}, {"type": "text", "text": "What is this?"}]
    with pytest.raises(RestoreKVError, match="pass the text of each message as one string"):
        compress(model, TOKENIZER, [{"role": "user", "content": part}], evictor="snapkv")
    for headless in (model.model, model.model.language_model):
        with pytest.raises(ModelError, match="has no output layer"):
            compress(headless, TOKENIZER, SENTENCES, evictor="snapkv")
