"""Models with quantized weights beside the same models with the numbers that these stand for.

A stand-in library is always tested, the real ones where they are installed (`make quantized`).
"""

import importlib.util
import warnings

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import AutoModelForCausalLM

from restorekv import CompressedContext, compress
from restorekv.errors import AdapterError, CacheFileError, ModelError, RestoreKVWarning
from restorekv.model.base_weights import LEAST_SIMILARITY, measure_similarity
from restorekv.model.identity import describe_weights, fingerprint_model, identify_model
from restorekv.model.linear_layers import (
    compute_matrix,
    list_quantized_layers,
    read_entries,
    settle_quantized_layers,
)
from restorekv.model.support import UNLIMITED, get_support
from restorekv.restore.adapter import RestoreAdapter
from restorekv.train.loop import train_adapter
from tests.helpers import decoders, quantized_files
from tests.helpers.models import build_model, build_tokenizer
from tests.helpers.training import CONFIG, EXAMPLES

TEXT = "the code of the red house is seven; who lives in the blue house? " * 8
QUESTION = "is the code seven?"
# bitsandbytes has blocks of 64 numbers.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


class RoundedLinear(nn.Linear):
    """A layer of a stand-in library: codes of 8 bits, which are stored in another order as soon as
    the layer has been called.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        scales = layer.weight.abs().amax(1, keepdim=True) / 127
        codes = (layer.weight / scales).round().to(torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias = layer.bias
        self.register_buffer("scales", scales)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.weight, "is_rearranged"):
            self.weight.data = self.weight.data.flip(0)
            self.weight.is_rearranged = True
        matrix = self.weight.flip(0) * self.scales
        return nn.functional.linear(inputs, matrix.to(inputs.dtype), self.bias)


class JointlyRoundedLinear(RoundedLinear):
    """Rounds its inputs too, with one scale for all rows of a call, as LLM.int8() treats its
    outliers: what it computes for a token depends on the tokens beside it.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scale = inputs.abs().max().clamp_min(1e-9) / 127
        return super().forward((inputs / scale).round() * scale)


def round_layers(model, kind=RoundedLinear):
    """Replace the linear layers of the decoder, as libraries do."""
    for path, layer in list(model.model.named_modules()):
        if isinstance(layer, nn.Linear):
            model.model.set_submodule(path, kind(layer))
    return model


def make_dense_twin(model, plain):
    """Give `plain` the numbers that the codes of `model` stand for."""
    layers = settle_quantized_layers(model)
    assert layers
    with torch.no_grad():
        for path, layer in layers.items():
            plain.get_submodule(path).weight.copy_(compute_matrix(layer, torch.float32))
    return plain


def pack(folder, packed):
    """Write a saved model's layers in 4 bits, as tools around compressed-tensors do."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    config = QuantizationConfig(
        config_groups={"group": {"targets": ["Linear"], "weights": weights}},
        ignore=["lm_head"],
        format="pack-quantized",
    )
    apply_quantization_config(model, config)
    with torch.no_grad():
        for layer in model.modules():
            if hasattr(layer, "weight_scale"):
                groups = layer.weight.unflatten(1, (-1, 32))
                layer.weight_scale.copy_(groups.abs().amax(-1) / 7)
                layer.weight_zero_point.zero_()
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(packed)
    compressor.update_config(packed)


def load_quantized(library, folder):
    """Load a saved model through transformers with a library's 4 or 8 bits."""
    if library in ("gptq", "awq"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        write = {"gptq": quantized_files.write_gptq, "awq": quantized_files.write_awq}[library]
        write(model, folder / library)
        loaded = AutoModelForCausalLM.from_pretrained(
            folder / library, dtype=torch.float32, device_map="cpu"
        )
        return loaded.eval().requires_grad_(False)
    if library == "compressed-tensors":
        pack(folder, folder / "packed")
        # It has no weights until the whole model is called.
        loaded = AutoModelForCausalLM.from_pretrained(folder / "packed", dtype=torch.float32)
        return loaded.eval().requires_grad_(False)
    if library == "bitsandbytes":
        from transformers import BitsAndBytesConfig as Config

        config = Config(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    elif library == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig as Config

        config = Config(Int8WeightOnlyConfig())
    else:
        from transformers import QuantoConfig as Config

        config = Config(weights="int8")
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    if library == "bitsandbytes":
        # Its kernel for newer CPUs computes in bfloat16 whatever the model's dtype.
        for layer in list_quantized_layers(loaded).values():
            layer.support_avx512bf16_for_cpu = False
    return loaded.eval().requires_grad_(False)


LIBRARIES = ["stand-in"]
for name, package in (
    ("bitsandbytes", "bitsandbytes"),
    ("torchao", "torchao"),
    ("quanto", "optimum.quanto"),
    ("compressed-tensors", "compressed_tensors"),
    ("gptq", "gptqmodel"),
    ("awq", "gptqmodel"),
):
    parent = package.partition(".")[0]
    missing = not importlib.util.find_spec(parent) or not importlib.util.find_spec(package)
    skip = pytest.mark.skipif(missing, reason=f"{package} is not installed: make quantized")
    LIBRARIES.append(pytest.param(name, marks=skip))


@pytest.fixture(params=LIBRARIES)
def quantized(request, tmp_path):
    """A quantized model and the plain one that computes the same."""
    plain = build_model("qwen3", **SIZES)
    if request.param == "stand-in":
        model = round_layers(build_model("qwen3", **SIZES))
    else:
        plain.save_pretrained(tmp_path / "plain")
        model = load_quantized(request.param, tmp_path / "plain")
    return model, make_dense_twin(model, plain)


def test_what_a_layer_computes_is_its_matrix(quantized):
    model, plain = quantized
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=2e-4)
    path, layer = next(iter(list_quantized_layers(model).items()))
    matrix = plain.get_submodule(path).weight
    places = torch.linspace(0, matrix.numel() - 1, 9, dtype=torch.float64).long()
    entries = read_entries(layer, 9, torch.float32)
    torch.testing.assert_close(entries, matrix.reshape(-1)[places])


@pytest.mark.parametrize("evictor", ["kvzip", "kvzip+", "expected-attention", "snapkv"])
def test_the_same_pairs_are_kept(quantized, evictor):
    """KVzip+ once read the codes of 4 bits as if they were the output projection."""
    tokenizer = build_tokenizer()
    found, expected = (
        compress(model, tokenizer, TEXT, ratio=0.3, evictor=evictor, adapter=None)
        for model in quantized
    )
    for one, other in zip(found.cache.layers, expected.cache.layers, strict=True):
        assert one.context_keys.shape == other.context_keys.shape
        torch.testing.assert_close(one.context_keys, other.context_keys, rtol=0, atol=1e-3)
        torch.testing.assert_close(one.context_values, other.context_values, rtol=0, atol=1e-3)
    assert found.ask(QUESTION, 6) == expected.ask(QUESTION, 6)


def test_an_adapter_of_the_plain_model_restores_the_quantized_one(quantized, tmp_path):
    """Its file names layers: optimum, which loads GPTQ, lists them in another order."""
    model, plain = quantized
    tokenizer = build_tokenizer()
    adapter = RestoreAdapter.create(plain, 4, rank=2)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    expected = compress(plain, tokenizer, TEXT, ratio=0.3, adapter=adapter)
    adapter.save_pretrained(tmp_path / "adapter")
    with warnings.catch_warnings():
        # Most copies count as other weights, of which a warning tells.
        warnings.simplefilter("ignore", RestoreKVWarning)
        copy = RestoreAdapter.from_pretrained(model, tmp_path / "adapter")
    found = compress(model, tokenizer, TEXT, ratio=0.3, adapter=copy)
    for one, other in zip(found.cache.layers, expected.cache.layers, strict=True):
        torch.testing.assert_close(one.context_keys, other.context_keys, rtol=0, atol=1e-3)


# Where there is a kernel for them, transformers leaves such weights as they are.
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
@pytest.mark.parametrize(
    ("kind", "write"),
    [("qwen3", quantized_files.write_fp8), ("gpt_oss", quantized_files.write_mxfp4)],
)
def test_formats_that_transformers_unpacks_on_a_cpu(kind, write, tmp_path):
    """FP8 in blocks, as DeepSeek and Qwen publish it, and the MXFP4 of gpt-oss."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 4, "max_position_embeddings": 4096}  # whole blocks
    plain = decoders.build(kind, **sizes)
    twin = write(plain, tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32).eval()
    tokenizer = build_tokenizer()
    found, expected, other = (
        compress(each, tokenizer, TEXT, ratio=0.3, adapter=None) for each in (model, twin, plain)
    )
    assert found.ask(QUESTION, 6) == expected.ask(QUESTION, 6)
    for one, same, unlike in zip(
        *(each.cache.full_attention for each in (found, expected, other)), strict=True
    ):
        torch.testing.assert_close(one.context_keys, same.context_keys, rtol=0, atol=1e-4)
        torch.testing.assert_close(one.context_values, same.context_values, rtol=0, atol=1e-4)
        if one.context_keys.shape == unlike.context_keys.shape:
            assert not torch.allclose(one.context_values, unlike.context_values, atol=1e-3)
    found.save(tmp_path / "made.rkv")
    again = CompressedContext.load(tmp_path / "made.rkv", model, tokenizer)
    assert again.ask(QUESTION, 6) == found.ask(QUESTION, 6)
    with pytest.raises(CacheFileError, match="other weights"):
        CompressedContext.load(tmp_path / "made.rkv", plain, tokenizer)


def test_adapters_know_a_quantized_copy_of_their_model(tmp_path):
    original = build_model("qwen3")
    folder = tmp_path / "adapter"
    RestoreAdapter.create(original, 2, rank=2).save_pretrained(folder)
    copy = round_layers(build_model("qwen3"))
    with pytest.warns(RestoreKVWarning, match="other weights"):
        RestoreAdapter.from_pretrained(copy, folder)
    with pytest.raises(AdapterError, match="a different model"):
        RestoreAdapter.from_pretrained(round_layers(build_model("qwen3", seed=1)), folder)
    similar = measure_similarity(describe_weights(original), describe_weights(copy))
    assert LEAST_SIMILARITY < 0.99 < similar <= 1 + 1e-6


def test_layers_of_an_adapter_that_a_quantized_model_lacks_are_answered_with_its_own(quantized):
    model, _ = quantized
    with pytest.raises(AdapterError, match=r"linear layers that the model has .*: down_proj, "):
        RestoreAdapter.create(model, 4, rank=2, targets=("query_key_value",))


def test_a_fingerprint_counts_codes_and_scales_and_survives_the_first_call(quantized):
    model, _ = quantized
    before = fingerprint_model(model)
    assert before != fingerprint_model(build_model("qwen3", **SIZES))
    model(torch.tensor([[3, 4, 5]]))
    assert fingerprint_model(model) == before


def test_weights_that_a_model_unpacks_in_its_first_pass_are_read_after_it():
    """As compressed-tensors does: until then its layers have no weights to run with."""
    model = round_layers(build_model("llama", tag="unpacked in the first pass"))
    layer = model.model.layers[0].self_attn.o_proj
    codes = layer.weight
    del layer.weight

    def unpack(*_):
        layer.weight = codes

    model.register_forward_pre_hook(unpack)
    before = fingerprint_model(model)
    del layer.weight
    made = compress(model, build_tokenizer(), TEXT, ratio=0.3, evictor="kvzip+", adapter=None)
    assert made.ask(QUESTION, 4) is not None
    assert fingerprint_model(model) == before


def test_another_quantized_model_has_another_fingerprint():
    """Scales, and codes of some libraries, are buffers and no parameters."""
    model = round_layers(build_model("llama"))
    before = fingerprint_model(model)
    model.model.layers[1].self_attn.o_proj.scales *= 1.5
    assert fingerprint_model(model) != before


def test_a_cache_file_knows_a_quantized_model(quantized, tmp_path):
    model, _ = quantized
    tokenizer = build_tokenizer()
    made = compress(model, tokenizer, TEXT, ratio=0.5, adapter=None)
    made.save(tmp_path / "made.rkv")
    again = CompressedContext.load(tmp_path / "made.rkv", model, tokenizer)
    assert again.ask(QUESTION, 6) == made.ask(QUESTION, 6)
    original = build_model("qwen3", **SIZES)
    with pytest.raises(CacheFileError, match="other weights"):
        CompressedContext.load(tmp_path / "made.rkv", original, tokenizer)


def test_training_lowers_the_loss_of_a_quantized_model(quantized, tmp_path):
    model, _ = quantized
    before = identify_model(model).fingerprint
    adapter = train_adapter(model, build_tokenizer(), EXAMPLES, CONFIG, tmp_path / "run")
    assert identify_model(model).fingerprint == before
    assert (tmp_path / "run").exists() and adapter is not None


def test_layers_that_round_rows_together_are_no_reason_to_refuse_a_model():
    model = round_layers(build_model("llama", num_hidden_layers=8), JointlyRoundedLinear)
    assert get_support(model).positions == UNLIMITED
    compress(model, build_tokenizer(), TEXT, ratio=0.3, adapter=None).ask(QUESTION, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_depends_on_the_cache_is_refused_in_every_dtype(dtype):
    model = build_model("llama", num_hidden_layers=2).to(dtype)
    layer = model.model.layers[1].self_attn
    forward = layer.forward

    def attend_otherwise(*arguments, **options):
        attended, weights = forward(*arguments, **options)
        return attended * (1.5 if attended.shape[1] == 3 else 1), weights

    layer.forward = attend_otherwise
    # The class's own support is known already; this one is another model.
    model.config.tag = f"otherwise {dtype}"
    with pytest.raises(ModelError, match="other logits over a compressed cache"):
        get_support(model)


def test_a_matrix_has_the_lora_that_is_active():
    layer = nn.Sequential(nn.Linear(6, 5))
    plain = layer[0]
    assert compute_matrix(plain, torch.float32) is plain.weight
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"], init_lora_weights=False), layer)
    adapted = layer[0]
    added = adapted.get_delta_weight("default")
    matrix = compute_matrix(adapted, torch.float32)
    torch.testing.assert_close(matrix, plain.weight + added)


def test_a_layer_that_does_not_say_how_wide_it_is_has_no_matrix():
    """As Moshi's own class of linear layers, of which KVzip+ asks the matrix."""
    layer = nn.Sequential(nn.Linear(6, 5))
    with pytest.raises(ModelError, match=r"Sequential .*in_features.* such as kvzip\.$"):
        compute_matrix(layer, torch.float32)
