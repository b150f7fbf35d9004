"""A tiny random model of every decoder class of the installed transformers, made from its own
config class.
"""

import inspect
from collections.abc import Iterator

import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# The oldest versions of transformers refuse, or compute otherwise, what some tests are about.
IS_OLD = Version(transformers.__version__) < Version("5.3")
# Versions whose configs can name a layer's own sizes know Gemma 4.
HAS_LAYER_CONFIGS = hasattr(PretrainedConfig, "per_layer_config")
VOCABULARY = 320
LAYERS = 4
WINDOW = 48  # of every kind of window or chunk that a config mentions
POSITIONS = 96  # that a config mentions
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8

# What the configs call their sizes. A config gets those that it has.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HEADS * HEAD_DIM,
    "n_embd": HEADS * HEAD_DIM,
    "d_model": HEADS * HEAD_DIM,
    "dim": HEADS * HEAD_DIM,
    "embedding_size": HEADS * HEAD_DIM,
    "embed_dim": HEADS * HEAD_DIM,
    "hidden_dim": HEADS * HEAD_DIM,
    "word_embed_proj_dim": HEADS * HEAD_DIM,
    "intermediate_size": 48,
    "n_inner": 48,
    "ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "ffn_hidden_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "dense_intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "expert_ffn_hidden_size": 24,
    "num_hidden_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_attention_heads": HEADS,
    "n_head": HEADS,
    "n_heads": HEADS,
    "num_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "d_kv": HEAD_DIM,
    "kv_channels": HEAD_DIM,
    "rotary_dim": 4,
    "max_position_embeddings": POSITIONS,
    "n_positions": POSITIONS,
    "max_seq_len": POSITIONS,
    "n_ctx": POSITIONS,
    "max_sequence_length": POSITIONS,
    "max_target_positions": POSITIONS,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "window_size": WINDOW,
    "local_attention": WINDOW,
    "attention_window_size": WINDOW,
    "sliding_window_size": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "zero_expert_num": 1,
    "num_experts_per_token": 2,
    "top_k_experts": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 16,
    "index_block_size": 8,
    "index_topk_blocks": 2,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "state_size": 8,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "n_groups": 1,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "attention_dropout": 0.0,
    "attn_dropout": 0.0,
    "dropout": 0.0,
    "hidden_dropout": 0.0,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "is_decoder": True,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "tie_word_embeddings": False,
    "use_cache": True,
}
# What single classes need besides.
MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
MLA = {"head_dim": 8, "num_key_value_heads": HEADS, "qk_head_dim": 16}
SPECIAL: dict[str, dict[str, object]] = {
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "longcat_flash",
            "minicpm3",
            "sarvam_mla",
            "youtu",
        ),
        MLA,
    ),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "mamba2": {"head_dim": 16, "expand": 2},
    "dots3_note": {"num_key_value_heads": HEADS},
    "dots3_note_text": {"num_key_value_heads": HEADS},
    **{key: {"layer_types": ["conv", "full_attention"] * 2} for key in ("lfm2", "lfm2_moe")},
    **{
        key: {"layer_types": ["linear_attention", "full_attention"] * 2}
        for key in ("bailing_hybrid", "granitemoehybrid")
    },
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        **MLA,
    },
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    # Every sixth layer or so sees the whole text, and tiny models have four.
    **{key: {"layer_types": MIXED} for key in ("gemma3", "gemma3_text", "kolibri1")},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": MIXED},
    **{key: {"global_head_dim": 16} for key in ("gemma4", "gemma4_text", "gemma4_unified_text")},
    "gemma4_unified_assistant": {"num_kv_shared_layers": 0},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"] * 2},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        }
    },
}


def causal_types() -> list[str]:
    """Return the model types that have a class for causal language models."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING.keys()))


def class_name(kind: str) -> str:
    """Return the name of a model type's class."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return found if isinstance(found, str) else found[0]


def tiny_config(kind: str, **overrides: object) -> PretrainedConfig:
    """Return a small config of a model type, with windows and positions of a few tokens."""
    config_class = type(CONFIG_MAPPING[kind]())
    if "text_config" in getattr(config_class, "sub_configs", {}):
        return tiny_text_config(config_class, kind, overrides)
    return config_class(**{**sizes_of(config_class), **SPECIAL.get(kind, {}), **overrides})


def has_rope(kind: str) -> bool:
    """Return whether a type's config says how keys are rotated."""
    try:
        return bool(getattr(tiny_config(kind).get_text_config(), "rope_parameters", None))
    except Exception:  # there is no tiny config of the type
        return False


def windowed_variants(kind: str) -> list[dict[str, object]]:
    """Return settings that give windows to some layers, for a type with a config that has none by
    default.
    """
    text = tiny_config(kind).get_text_config()
    kinds = getattr(text, "layer_types", None)
    if not hasattr(text, "sliding_window") or not kinds or set(kinds) != {"full_attention"}:
        return []
    mixed = {
        "layer_types": MIXED,
        "sliding_window": WINDOW,
    }
    return [mixed | ({"use_sliding_window": True} if hasattr(text, "use_sliding_window") else {})]


def hybrid_variants(kind: str) -> list[dict[str, object]]:
    """Return settings with which every other layer sees the whole text, for a type with windows in
    all layers of so small a model.
    """
    text = tiny_config(kind).get_text_config()
    if set(getattr(text, "layer_types", None) or ()) != {"sliding_attention"}:
        return []
    return [{"layer_types": MIXED}]


def sharing_variants(kind: str) -> list[dict[str, object]]:
    """Return settings with which the last layers share the pairs of earlier ones, for a type that
    has such layers.
    """
    if not hasattr(tiny_config(kind).get_text_config(), "num_kv_shared_layers"):
        return []
    kinds = [*MIXED, *MIXED[:2]]
    return [{"num_hidden_layers": len(kinds), "layer_types": kinds, "num_kv_shared_layers": 2}]


def tiny_text_config(
    config_class: type[PretrainedConfig], kind: str, overrides: dict
) -> PretrainedConfig:
    """Return a config with a small text model."""
    text_class = type(config_class().get_text_config())
    text = text_class(**{**sizes_of(text_class), **SPECIAL.get(kind, {}), **overrides})
    return config_class(text_config=text.to_dict())


def sizes_of(config_class: type[PretrainedConfig]) -> dict[str, object]:
    """Return those of SIZES that a config class has under these names."""
    default = config_class()
    names = set(inspect.signature(config_class.__init__).parameters) | set(vars(default))
    mapped = getattr(config_class, "attribute_map", {})
    sizes = {}
    for name, value in SIZES.items():
        if name not in names or mapped.get(name, name) != name:
            continue
        sizes[name] = value
    return sizes


def build(kind: str, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """Return a random float32 model of a model type."""
    return build_from(tiny_config(kind, **overrides), seed)


def build_from(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a random float32 model of a config; norms, biases and sinks are random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in one_dimensional(model):
        # Norms, biases, sinks.
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def one_dimensional(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters that are initialized to ones or zeros, which are norms, biases and
    sinks.
    """
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1 and parameter.is_floating_point():
            yield name, parameter


@torch.no_grad()
def run_plainly(model: PreTrainedModel) -> None:
    """Pass a few tokens through transformers' own model; it raises if its config makes no sense."""
    model(input_ids=torch.tensor([[3, 4, 5, 6, 7, 8]]))
