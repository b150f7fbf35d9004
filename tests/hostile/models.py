"""The campaign of random configs of random decoder classes: every model must be refused with a
sentence, or answer as transformers does.

Windows, kinds of layers, kinds of RoPE, heads, biases, caps, scales and multipliers are drawn from
what a class's config has. A model that is accepted must give transformers' logits and greedy tokens
beyond every length that its config mentions, at ratio 1 and below; a model with a window in all
layers up to the window, and not one position more.

python -m tests.hostile.models --count 400 --seed 0
"""

import random
import warnings
from collections import Counter

import transformers

from restorekv.errors import RestoreKVError
from tests.families import LARGE, judge_model
from tests.helpers import decoders
from tests.hostile.campaign import finish, read_options

ROPES = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "original_max_position_embeddings": 40,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "factor": 2.0,
        "original_max_position_embeddings": 48,
    },
)
FLAGS = (
    "attention_bias",
    "mlp_bias",
    "use_qk_norm",
    "qk_layernorm",
    "use_qkv_bias",
    "qkv_bias",
    "tie_word_embeddings",
    "use_sliding_window",
    "parallel_attn",
    "use_parallel_residual",
    "use_cache",
    "attn_temperature_tuning",
)
CHOICES: dict[str, tuple[object, ...]] = {
    "sliding_window": (None, 24, 48, 64, 1000),
    "attention_chunk_size": (24, 48, 64, 1000),
    "num_key_value_heads": (1, 2, 4),
    "head_dim": (8, 16),
    "num_hidden_layers": (2, 3, 4),
    "attn_logit_softcapping": (None, 5.0),
    "final_logit_softcapping": (None, 5.0),
    "logit_scale": (0.5, 2.0),
    "logits_scaling": (0.5, 2.0),
    "embedding_multiplier": (0.5, 3.0),
    "residual_multiplier": (0.5, 1.0),
    "attention_multiplier": (0.2, 0.5),
    "query_pre_attn_scalar": (4, 16),
    "partial_rotary_factor": (0.5, 1.0),
    "max_position_embeddings": (64, 96, 4096),
    "max_window_layers": (0, 1, 2),
    "no_rope_layer_interval": (2, 4),
    "rope_theta": (100.0, 10000.0),
    "clip_qkv": (None, 1.0),
    "scale_attn_by_inverse_layer_idx": (True, False),
}
LAYER_KINDS = ("full_attention", "sliding_attention")


def draw(rng: random.Random, kind: str) -> dict[str, object]:
    """Return random settings among those that the type's config has."""
    known = vars(decoders.tiny_config(kind).get_text_config())
    settings: dict[str, object] = {}
    for name, choices in CHOICES.items():
        if name in known and rng.random() < 0.3:
            settings[name] = rng.choice(choices)
    for name in FLAGS:
        if name in known and rng.random() < 0.3:
            settings[name] = rng.random() < 0.5
    if (
        known.get("rope_parameters") is not None
        and "rope_type" in known["rope_parameters"]
        and rng.random() < 0.5
    ):
        settings["rope_parameters"] = {"rope_theta": 10000.0, **rng.choice(ROPES)}
    layers = int(settings.get("num_hidden_layers", decoders.LAYERS))
    if "layer_types" in known and rng.random() < 0.6:
        own = {*LAYER_KINDS, *(known["layer_types"] or ())}
        settings["layer_types"] = [rng.choice(sorted(own)) for _ in range(layers)]
    elif known.get("layer_types"):
        settings.pop("num_hidden_layers", None)
    return settings


def attempt(kind: str, seed: int, settings: dict[str, object]) -> tuple[str, list[str]]:
    """Return what happened to one model, and what is wrong about that."""
    try:
        model = decoders.build(kind, seed, **settings)
        decoders.run_plainly(model)
    except Exception:  # settings that the class itself refuses or cannot compute
        return "not built", []
    try:
        outcome, _, problems = judge_model(model, seed)
    except RestoreKVError as error:
        return "WRONG", [f"refused in the middle: {error}"]
    except Exception as error:  # what the campaign is looking for
        return "WRONG", [f"{type(error).__name__}: {error}"]
    return "WRONG" if problems else outcome, problems


def run(count: int, seed: int, only: int | None = None) -> tuple[Counter, list[str]]:
    """Try random models; return how often each outcome happened, and all failures."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    counts: Counter = Counter()
    failures: list[str] = []
    kinds = [kind for kind in decoders.causal_types() if kind not in LARGE]
    rotating = [kind for kind in kinds if decoders.has_rope(kind)]
    for number in range(count) if only is None else (only,):
        rng = random.Random(f"{seed}/{number}")
        # Of the others, nearly all are refused.
        kind = rng.choice(rotating if rng.random() < 0.8 else kinds)
        try:
            settings = draw(rng, kind)
        except Exception:  # the class has no tiny config
            counts["not built"] += 1
            continue
        try:
            outcome, problems = attempt(kind, number, settings)
        except KeyboardInterrupt:  # what was counted so far is told
            print(f"interrupted before case {number}", flush=True)
            break
        counts[outcome] += 1
        for problem in problems:
            failures.append(f"case {number} ({kind}, {settings}): {problem}")
            print(failures[-1], flush=True)
        if number % 100 == 99:
            print(f"{number + 1} of {count}, {len(failures)} failures", flush=True)
    return counts, failures


def main() -> None:
    options = read_options(__doc__, 400)
    finish(*run(options.count, options.seed, options.case))


if __name__ == "__main__":
    main()
