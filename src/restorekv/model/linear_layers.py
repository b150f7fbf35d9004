"""The matrices of linear layers, including layers that are quantized or have LoRA.

A quantized layer stores codes in the layout of its library (bitsandbytes, torchao, GPTQ, AWQ, FP8
and others), so its `weight`, if it has one, is not the matrix that it multiplies with. But every
layer can be asked for its products with unit vectors, which are the columns of its matrix.
"""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from restorekv.errors import ModelError

PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def has_plain_weight(layer: nn.Module) -> bool:
    """Return whether the layer's `weight` is the whole matrix that it multiplies with."""
    # Other classes than nn.Linear itself may scale the weight or add LoRA.
    weight = getattr(layer, "weight", None)
    return type(layer) is nn.Linear and isinstance(weight, Tensor) and holds_numbers(weight)


def holds_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor holds its numbers themselves, not codes for them."""
    # Libraries that quantize have their own tensor types, and some of these report float32.
    is_ordinary = type(tensor).__module__.partition(".")[0] == "torch"
    return is_ordinary and tensor.dtype in PLAIN_DTYPES


def dequantize(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor of torchao or quanto, and any other tensor unchanged.

    In these two libraries the tensor's type knows how to compute them, in others only the layer.
    """
    if type(tensor).__module__.startswith(("torchao.", "optimum.quanto.")):
        return tensor.dequantize()
    return tensor


def drop_wrappers(name: str) -> str:
    """Return the name of a module or weight as if neither PEFT nor torch.compile had wrapped it."""
    name = name.replace(".base_layer", "").replace("_orig_mod.", "")
    return name.removeprefix("base_model.model.")


def space_evenly(size: int, count: int) -> Tensor:
    """Return `count` evenly spaced indices below `size`.

    They are computed on the CPU, because devices round float64 differently.
    """
    return torch.linspace(0, size - 1, count, dtype=torch.float64).long()


def list_quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the quantized linear layers by their path without wrappers."""
    found = {}
    for path, module in model.named_modules():
        if hasattr(module, "base_layer") or "lora_" in path:
            continue
        is_linear = hasattr(module, "in_features") and hasattr(module, "out_features")
        if is_linear and _is_quantized(module):
            found[drop_wrappers(path)] = module
    return found


@torch.no_grad()
def settle_quantized_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Run a pass over one token if the model has quantized layers, and return these layers.

    In a model's first pass, bitsandbytes (on a CPU) rearranges its codes and compressed-tensors
    unpacks them. Before that, the weights cannot be identified, and parts of the model cannot run.
    """
    layers = list_quantized_layers(model)
    if not layers:
        return layers
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device))
    return list_quantized_layers(model)


def _is_quantized(layer: nn.Module) -> bool:
    """Return whether a layer has codes among its weights."""
    held = chain(layer.parameters(recurse=False), layer.buffers(recurse=False))
    return not all(holds_numbers(tensor) for tensor in held)


@torch.no_grad()
def compute_matrix(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return the matrix (out, in) that a linear layer multiplies with, without gradients; see
    `compute_matrix_with_gradients`.
    """
    return compute_matrix_with_gradients(layer, dtype)


def compute_matrix_with_gradients(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return the matrix (out, in) that a linear layer multiplies with, of which autograd knows how
    it was made.

    For a plain layer it is the weight itself. For others it is computed in `dtype`, with the LoRA
    that is active in the layer. Raises ModelError for a layer that does not say how wide it is.
    """
    if has_plain_weight(layer):
        return layer.weight  # type: ignore[return-value]
    size = getattr(layer, "in_features", None)
    if size is None:
        raise ModelError(
            f"The matrix of a {type(layer).__name__} cannot be computed, since the layer does not "
            "say how many numbers it reads (in_features); use an evictor that needs no matrices, "
            "such as kvzip."
        )
    columns = torch.arange(int(size), device=_get_device(layer))
    return _compute_columns(layer, columns, dtype).T


@torch.no_grad()
def read_entries(layer: nn.Module, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` evenly spaced entries of a layer's matrix, row by row, as (count,)."""
    linear: Any = layer
    size = int(linear.in_features)
    indices = space_evenly(int(linear.out_features) * size, count).to(_get_device(layer))
    columns = _compute_columns(layer, indices % size, dtype)
    return columns.gather(1, (indices // size)[:, None])[:, 0]


def _compute_columns(layer: nn.Module, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Return columns of a layer's matrix as rows (number of columns, out)."""
    linear: Any = layer
    size = int(linear.in_features)
    units = torch.zeros(len(columns), size, dtype=dtype, device=columns.device)
    units.scatter_(1, columns[:, None], 1)
    products = layer(units)
    if getattr(layer, "bias", None) is not None:
        products = products - layer(torch.zeros_like(units[:1]))
    return products


def _get_device(layer: nn.Module) -> torch.device:
    """Return the device of a layer's weights."""
    return next(chain(layer.parameters(), layer.buffers())).device
