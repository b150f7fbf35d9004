"""Small GGUF files, written with llama.cpp's own package from models made in memory."""

import json
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel, PreTrainedTokenizerFast

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


# Where those of Gemma 3 differ: it has a norm before and after each half of a layer.
GEMMA3_PARTS = {
    **PARTS,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def name_of(parameter: str, architecture: str = "llama") -> str:
    """Return llama.cpp's name of a parameter of transformers' Llama, Qwen3, Starcoder 2 or
    Gemma 3.
    """
    if parameter in NAMES:
        return NAMES[parameter]
    _, _, layer, part = parameter.split(".", 3)
    parts = GEMMA3_PARTS if architecture == "gemma3" else PARTS
    module, _, kind = part.rpartition(".")  # weight or bias
    return f"blk.{layer}.{parts[module]}.{kind}"


def places(parameter: str, rows: int, model: PreTrainedModel) -> np.ndarray:
    """Return the indices in transformers' matrix of the rows of llama.cpp's.

    They differ for queries and keys of the architecture llama: llama.cpp interleaves the two halves
    of a head's RoPE pairs.
    """
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((count for part, count in heads.items() if part in parameter), None)
    if config.model_type != "llama" or count is None:
        return np.arange(rows)
    half = rows // count // 2
    order = [(head, side, pair) for head in range(count) for pair in range(half) for side in (0, 1)]
    return np.array([(head * 2 + side) * half + pair for head, side, pair in order])


def write(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    kind: Kind = Kind.Q4_1,
    without: str = "",
    architecture: str | None = None,
    extra: dict[str, object] | None = None,
    order: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """Write a model to a GGUF file and return its path.

    Matrices are quantized to `kind`, the parameter `without` is left out, `extra` fields are added
    or replaced, and `order` is the order of the bytes of a number.
    """
    config = model.config
    architecture = architecture or config.model_type.removesuffix("_text")
    rope = config.rope_parameters
    if architecture == "gemma3":
        rope = rope["full_attention"]  # that of windows is not in the file
        extra = {"gemma3.attention.sliding_window": config.sliding_window, **(extra or {})}
    writer = gguf.GGUFWriter(path, architecture, endianess=order)
    fields = {
        "general.name": "Run 7 Ep2",
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_Q4_1),
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.attention.value_length": config.head_dim,
        f"{architecture}.vocab_size": config.vocab_size,
        f"{architecture}.rope.freq_base": float(rope["rope_theta"]),
        **tokenizer_fields(tokenizer),
        **(extra or {}),
    }
    for key, value in fields.items():
        add(writer, key, value)
    for parameter, weight in model.state_dict().items():
        values = weight.numpy()
        values = values[places(parameter, len(values), model)]
        if architecture == "gemma3" and "norm" in parameter:
            values = values + 1  # Gemma's norms multiply by 1 + w, and llama.cpp by what it reads
        its = kind if values.ndim > 1 else Kind.F32
        is_tied = parameter == "lm_head.weight" and config.tie_word_embeddings
        if parameter != without and not is_tied:
            name = name_of(parameter, architecture)
            writer.add_tensor(name, gguf.quants.quantize(values, its), raw_dtype=its)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """Add a field with the type that llama.cpp uses for such a value."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def tokenizer_fields(tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    """Return the fields of a byte-level BPE tokenizer."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    special = {each["content"] for each in state["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def dequantized(path: Path, model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Return every weight under transformers' name and in its order of rows.

    The package gguf computes them from the file alone.
    """
    tensors = {each.name: each for each in gguf.GGUFReader(path).tensors}
    found = {}
    for parameter in model.state_dict():
        tensor = tensors[name_of(parameter)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[parameter] = values[np.argsort(places(parameter, len(values), model))]
    return found
