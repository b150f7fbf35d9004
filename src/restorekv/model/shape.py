"""The shape of a model's cache."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from restorekv.errors import ModelError


@dataclass(frozen=True)
class CacheShape:
    """L layers, H KV heads, G query heads per KV head, D head dim, d hidden."""

    layers: int
    heads: int
    groups: int
    head_dim: int
    hidden: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "CacheShape":
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ModelError(
                f"{config.model_type} has {', '.join(sorted(kinds - {'full_attention'}))} layers; "
                "use a model in which every layer attends to the whole context."
            )
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            heads=heads,
            groups=config.num_attention_heads // heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            hidden=config.hidden_size,
        )


def decoder(model: PreTrainedModel) -> nn.Module:
    """Returns the backbone, which outputs hidden states and skips the LM head."""
    return model.get_decoder()
