"""Compress with models of many families, and compare their answers with transformers' own.

python examples/families.py             # every family of the table; a minute or two on a CPU
python examples/families.py gpt-oss     # some of them

The models are small and have random weights, made from each family's own config class: nothing is
downloaded, and what they say makes no sense. At ratio 1 nothing is lost, so answers from a
compressed text must equal those of `generate`, which reads text and question together.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from restorekv import compress

HERE = Path(__file__).resolve().parent
TOKENIZER = HERE.parent / "distributions/restorekv-tiny/restorekv_tiny/model"
WINDOW = 32
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
MIXED = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# Embeddings of ids that are added in every layer, and last layers that share the pairs of others.
SHARING = {
    "sliding_window": WINDOW,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 4096,
}
GRANITE = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
# Linear attention or short convolutions in every other layer, which keep a state.
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "initializer_range": 0.1,
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
MAMBA = {
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "initializer_range": 0.1,
}
STATE_SPACE = {
    **MAMBA,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "shared_intermediate_size": 48,
}
# Blocks of experts and of an MLP are layers of their own here, which hold nothing.
NEMOTRON = {
    "layer_types": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 1,
    "n_routed_experts": 4,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "initializer_range": 0.1,
}
# All query heads of a layer read one vector of each token.
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}
# The name of each family, its model type, and what its config has in addition to SIZES.
FAMILIES: dict[str, tuple[str, dict]] = {
    "Llama": ("llama", {}),
    "Qwen2": ("qwen2", {}),
    "Qwen2 with windows": ("qwen2", {**MIXED, "use_sliding_window": True}),
    "Qwen3": ("qwen3", {}),
    "Qwen3 with windows": ("qwen3", {**MIXED, "use_sliding_window": True}),
    # Caps as low as these bend most logits.
    "Gemma 2": (
        "gemma2",
        {
            **MIXED,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "Gemma 3": (
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "query_pre_attn_scalar": 20,
        },
    ),
    "Gemma 3n": ("gemma3n_text", {**SHARING, "laurel_rank": 4, "altup_num_inputs": 2}),
    # The layers that see the whole text have larger heads than the others.
    "Gemma 4": (
        "gemma4_text",
        {
            **MIXED,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "Gemma 4 with shared pairs": ("gemma4_text", {**SHARING, "global_head_dim": 16}),
    "Qwen3.5": ("qwen3_5_text", LINEAR),
    "Qwen3.5 with experts": ("qwen3_5_moe_text", {**LINEAR, **EXPERTS}),
    "Qwen3-Next": ("qwen3_next", {**LINEAR, **EXPERTS}),
    "OLMo Hybrid": ("olmo_hybrid", LINEAR),
    "LFM2": ("lfm2", CONVOLUTIONS),
    "LFM2 with experts": ("lfm2_moe", {**CONVOLUTIONS, **EXPERTS}),
    "Granite with state-space layers": ("granitemoehybrid", {**GRANITE, **STATE_SPACE, **EXPERTS}),
    "Nemotron-H": ("nemotron_h", NEMOTRON),
    # Pairs and a state in every layer.
    "Falcon-H1": ("falcon_h1", {**MAMBA, "mamba_d_ssm": 64}),
    "DeepSeek V2": (
        "deepseek_v2",
        {**LATENT, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    ),
    "DeepSeek V3": (
        "deepseek_v3",
        {**LATENT, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    ),
    "GLM-4.7-Flash": (
        "glm4_moe_lite",
        {**LATENT, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    ),
    "MiniCPM3": ("minicpm3", LATENT),
    "gpt-oss": ("gpt_oss", {**MIXED, **EXPERTS}),
    "Flint": ("flint", {**EXPERTS, "sliding_window": WINDOW}),
    "Cohere 2": ("cohere2", {"sliding_window": WINDOW}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", {"sliding_window": WINDOW}),
    "EXAONE 4": ("exaone4", {"sliding_window": WINDOW}),
    "Phi": ("phi", {"partial_rotary_factor": 0.5}),
    "Phi-3": ("phi3", {"sliding_window": None}),
    "GLM": ("glm", {"attention_bias": True}),
    "GLM-4": ("glm4", {}),
    "Granite": ("granite", GRANITE),
    "Granite with windows": ("granite_swa", {**GRANITE, "sliding_window": WINDOW}),
    "Mistral within its window": ("mistral", {"sliding_window": 1024}),
    "GPT-NeoX (Pythia)": (
        "gpt_neox",
        {"num_key_value_heads": 4, "rotary_pct": 0.25, "max_position_embeddings": 4096},
    ),
    "StableLM": ("stablelm", {"use_qkv_bias": True}),
    "SmolLM3": ("smollm3", {}),
    "Starcoder 2": ("starcoder2", {"sliding_window": None, "use_bias": True}),
}
TEXT = (HERE / "lighthouse.txt").read_text(encoding="utf-8")[:600]
QUESTIONS = ["Who built it?", "Where does the keeper live?", "What is its height?", "Why?"]


def build_model(family: str, words: int, seed: int = 0) -> PreTrainedModel:
    """Return a small random model of a family, for `words` token ids."""
    kind, settings = FAMILIES[family]
    config = AutoConfig.for_model(kind, vocab_size=words, **{**SIZES, **settings})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    # Biases, norms and sinks start as zeros and ones; make them random, so that they matter.
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += 0.3 * torch.randn(parameter.shape)
    return model


def answer_alike(family: str) -> bool:
    """Return whether RestoreKV and transformers give the same answers."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    model: Any = build_model(family, len(tokenizer))

    small = compress(model, tokenizer, TEXT, ratio=1, evictor="snapkv", adapter=None)
    answers = small.ask(QUESTIONS, max_new_tokens=8, details=True)

    model.set_attn_implementation("eager")
    for question, answer in zip(QUESTIONS, answers, strict=True):
        asked = small.inputs(question)["input_ids"]
        written = model.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=0,
        )
        if written[0, asked.shape[1] :].tolist() != list(answer.ids):
            return False
    return True


def main(*families: str) -> None:
    if not set(families) <= set(FAMILIES):
        raise SystemExit(f"{__doc__}\nFamilies: {', '.join(FAMILIES)}")
    for family in families or FAMILIES:
        print(f"{family:26} {'equal' if answer_alike(family) else 'different'}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
