"""Agreement of CPU and device on many model families: do they keep the same pairs and give the same
answers?

The models have random weights, the tiny model's vocabulary, and layers of different kinds. Their
windows are shorter than the texts and than answers of 128 tokens.
"""

import copy
from collections.abc import Callable

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.agreement import count_agreement
from restorekv.compression.config import CompressionConfig
from restorekv.context import CompressedContext
from restorekv.model.load import load_model
from restorekv.pipeline import compress
from restorekv.restore.adapter import RestoreAdapter
from restorekv.tiny.suite import draw_documents
from restorekv.tiny.world import WorldDocument

WINDOW = 64
RATIO = 0.2
RESTORE_TOKENS = 4
COMMON = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    # Large enough for attention that is not flat, and for logits without near ties.
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXED = {
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
}
# By transformers' model type: how the config differs from COMMON.
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"num_hidden_layers": 4},
    "glm": {"num_hidden_layers": 4},  # half of each key is rotated
    "gemma3_text": {
        "num_hidden_layers": 6,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "rope_parameters": TWO_ROPES,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
    },
    "qwen3": {**MIXED, "use_sliding_window": True},
    "cohere2": {**MIXED, "logit_scale": 1.0},
    "gpt_oss": {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
}
SETTINGS = {
    "": CompressionConfig(),
    ", int8 numbers": CompressionConfig(kv_dtype="int8"),
    ", 256 tokens at a time": CompressionConfig(streaming_chunk=256),
}


def build_family(kind: str, vocabulary: int) -> PreTrainedModel:
    """Return a model of random float32 weights on the CPU, the same at every call."""
    settings = {**COMMON, **FAMILIES[kind], "vocab_size": vocabulary}
    config = AutoConfig.for_model(kind, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def compare_families(
    device: str, texts: int, seed: int, tell: Callable[[str], None] = lambda what: None
) -> list[dict]:
    """Return how many pairs and answers are the same on both devices, for every family and setting.

    Args:
        device: What is compared with the CPU.
        texts: How many texts of the tiny world are compressed.
        seed: The seed of these texts.
        tell: Called with what is compared next.
    """
    _, tokenizer = load_model("tiny")
    documents = list(draw_documents(tokenizer, texts, f"restore {seed}", seed, 500, 700))
    rows = []
    for kind in FAMILIES:
        on_cpu = build_family(kind, len(tokenizer))
        on_device = copy.deepcopy(on_cpu)
        nn.Module.to(on_device, device)
        # One for each side: the same random embeddings, and an untrained LoRA, which adds nothing.
        adapters = {
            side: RestoreAdapter.create(side, RESTORE_TOKENS, targets=["q_proj", "v_proj"])
            for side in (on_cpu, on_device)
        }
        for name, config in SETTINGS.items():
            tell(kind + name)

            def make_small(
                model: PreTrainedModel,
                document: WorldDocument,
                config: CompressionConfig = config,
                adapters: dict = adapters,
            ) -> CompressedContext:
                # A streamed text never has a full cache, which the restore pass would need.
                adapter = None if config.streaming_chunk else adapters[model]
                return compress(
                    model, tokenizer, document.text, ratio=RATIO, adapter=adapter, config=config
                )

            counts = count_agreement(on_cpu, on_device, documents, make_small)
            rows.append({"what": kind + name, **counts})
    return rows
