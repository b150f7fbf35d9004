"""Input embeddings as arguments of a decoder's pass, for tokens that have no id.

In every layer, Gemma 3n and Gemma 4 add an embedding of the token's id to its state. Tokens without
an id, such as restore tokens, get that of the padding token there, which is what these models give
to images and sounds.
"""

from typing import Any

import torch
from torch import Tensor, nn


def pass_embeddings(backbone: nn.Module, embeddings: Tensor) -> dict[str, Tensor]:
    """Return input embeddings (B, Q, d) as the keyword arguments of a decoder's forward pass."""
    arguments = {"inputs_embeds": embeddings}
    decoder: Any = backbone
    if getattr(decoder.config, "hidden_size_per_layer_input", None):
        padding = getattr(decoder.config, "pad_token_id", None) or 0
        ids = torch.full(embeddings.shape[:2], padding, device=embeddings.device)
        arguments["per_layer_inputs"] = decoder.get_per_layer_inputs(ids)
    return arguments
