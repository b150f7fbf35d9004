"""Folders of models in formats that other tools write: GPTQ, AWQ, FP8 in blocks, and MXFP4.

Every function takes a plain model and returns its twin, which has the numbers that the codes of the
written folder stand for.
"""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

GROUP = 32  # numbers that share a scale, in GPTQ, AWQ and MXFP4
BLOCK = 64  # rows and columns that share a scale, in FP8
# The places of eight codes of 4 bits in an integer of 32.
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MXFP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def write_gptq(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Write 4-bit codes in GPTQ's layout, where a zero point is stored less one."""

    def encode(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, stand_for = _round_to_4_bits(weight)
        zeros = torch.full(scales.T.shape, 8)
        columns = torch.arange(weight.shape[1])
        tensors = {
            "qweight": _pack(codes.T, 0, IN_ORDER),
            "qzeros": _pack(zeros - 1, 1, IN_ORDER),
            "scales": scales.T.contiguous(),
            "g_idx": (columns // GROUP).to(torch.int32),
        }
        return tensors, stand_for

    config = {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    config |= {"quant_method": "gptq", "checkpoint_format": "gptq"}
    return _write_linear_layers(model, folder, encode, config)


def write_awq(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Write 4-bit codes in AWQ's layout for GEMM, which joins outputs and not inputs."""

    def encode(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, stand_for = _round_to_4_bits(weight)
        zeros = torch.full(scales.T.shape, 8)
        tensors = {
            "qweight": _pack(codes.T, 1, AWQ_ORDER),
            "qzeros": _pack(zeros, 1, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }
        return tensors, stand_for

    config = {"bits": 4, "group_size": GROUP, "zero_point": True}
    config |= {"quant_method": "awq", "version": "gemm"}
    return _write_linear_layers(model, folder, encode, config)


def write_fp8(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Write 8-bit floats with a scale for each block, as DeepSeek and Qwen publish them."""

    def encode(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        stand_for = codes.float() * scales[:, None, :, None]
        tensors = {"weight": codes.reshape(weight.shape), "weight_scale_inv": scales}
        return tensors, stand_for.reshape(weight.shape)

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    config |= {"weight_block_size": [BLOCK, BLOCK]}
    return _write_linear_layers(model, folder, encode, config)


def write_mxfp4(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Write the experts of a gpt-oss in 4-bit floats, as its published weights are."""
    twin = copy.deepcopy(model)
    stored = {}
    for name, weight in twin.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = weight.clone()
            continue
        groups = weight.mT.contiguous().unflatten(-1, (-1, GROUP))  # (experts, out, in / 32, 32)
        exponents = (groups.abs().amax(-1) / 6).log2().ceil()
        scaled = groups / exponents.exp2()[..., None]
        codes = (scaled[..., None] - MXFP4_VALUES).abs().argmin(-1)
        stored[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        stored[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        stand_for = MXFP4_VALUES[codes] * exponents.exp2()[..., None]
        weight.copy_(stand_for.flatten(-2).mT)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": [*kept, "lm_head"]}
    _save(model, folder, stored, config)
    return twin


def _round_to_4_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes from 1 to 15 (out, in), the scales of groups (out, in / 32) in float16, and the
    numbers that they stand for.
    """
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).to(torch.float16)
    levels = (groups / scales[..., None].float()).round().clamp(-7, 7)
    stand_for = levels * scales[..., None].float()
    return (levels.flatten(1) + 8).long(), scales, stand_for.flatten(1)


def _pack(codes: Tensor, dim: int, order: tuple[int, ...]) -> Tensor:
    """Join eight codes along a dimension into an integer of 32 bits."""
    eights = codes.movedim(dim, -1).unflatten(-1, (-1, 8))
    joined = torch.zeros_like(eights[..., 0])
    for number, place in enumerate(order):
        joined += eights[..., place] << (4 * number)
    # Integers of 64 bits wrap around to those of 32.
    return joined.to(torch.int32).movedim(-1, dim).contiguous()


def _write_linear_layers(
    model: PreTrainedModel,
    folder: Path,
    encode: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]],
    config: Mapping[str, Any],
) -> PreTrainedModel:
    """Write a model whose linear layers `encode` has turned into tensors of a format."""
    twin = copy.deepcopy(model)
    stored = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    with torch.no_grad():
        for path, layer in twin.named_modules():
            if isinstance(layer, nn.Linear) and path != "lm_head":
                tensors, stand_for = encode(layer.weight)
                del stored[f"{path}.weight"]
                stored |= {f"{path}.{name}": tensor for name, tensor in tensors.items()}
                layer.weight.copy_(stand_for)
    _save(model, folder, stored, config)
    return twin


def _save(
    model: PreTrainedModel, folder: Path, stored: dict[str, Tensor], config: Mapping[str, Any]
) -> None:
    folder.mkdir(parents=True)
    if model.config.tie_word_embeddings:
        stored.pop("lm_head.weight", None)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    entries = model.config.to_dict() | {"quantization_config": dict(config)}
    entries |= {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(entries))
