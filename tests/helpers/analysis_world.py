"""Made-up files of analyses, in the formats of `python -m paper.analysis`."""

import json
import random
from pathlib import Path

from tests.helpers.report_world import CONVENTIONS, HEADS, LAYERS, RESTORE


def write_analyses(folder: Path) -> Path:
    """Write one file of every kind of analysis."""
    rng = random.Random(0)
    (folder / "analysis").mkdir(parents=True, exist_ok=True)
    for kind, figures in {
        "attention": attention(rng),
        "divergence": divergence(),
        "survivors": survivors(rng),
        "restore_attention": restore_attention(rng),
    }.items():
        told = {
            "analysis": kind,
            "label": "tiny-kvzip",
            "conventions": CONVENTIONS,
            "documents": 26,
            "questions": 92,
            "definitions": {"context": "mass on <non-sink> context columns"},
            "figures": {"0.05": figures},
        }
        (folder / "analysis" / f"{kind}-tiny-kvzip.json").write_text(json.dumps(told))
    return folder


def attention(rng: random.Random) -> dict:
    layers = 8
    caches = {}
    for cache, level in {"full": 0.03, "base": 0.004, "restored": 0.013}.items():
        context = [level * (0.3 + rng.random() * 1.6) for _ in range(layers)]
        restore = [0.02 if cache == "restored" else 0.0] * layers
        sinks = [0.55] * layers
        mean = sum(context) / layers
        caches[cache] = {
            "context": context,
            "sinks": sinks,
            "restore": restore,
            "question": [1 - c - s - r for c, s, r in zip(context, sinks, restore, strict=True)],
            "average": {
                "context": mean,
                "sinks": 0.55,
                "restore": restore[0],
                "question": 0.45 - mean - restore[0],
            },
            "context_interval": [0.9 * mean, 1.1 * mean],
            "layers_below": sum(c < 0.001 for c in context),
        }
        if cache != "full":
            kl = {"base": 0.2, "restored": 0.16}[cache]
            caches[cache] |= {
                "kl_profile": kl,
                "kl_profile_interval": [kl - 0.02, kl + 0.02],
                "kl_attention": kl / 3,
                "kl_attention_interval": [kl / 4, kl / 2],
                "kl_profile_backward": kl,
                "kl_profile_backward_interval": [kl, kl],
                "kl_attention_per_layer": [kl * rng.random() for _ in range(layers)],
            }
    return {"caches": caches}


def divergence() -> dict:
    def figures(level: float) -> dict:
        return {
            "forward": level,
            "forward_interval": [level - 0.5, level + 0.5],
            "backward": level / 2,
            "backward_interval": [level / 2 - 0.2, level / 2 + 0.2],
            "symmetric": 0.75 * level,
            "symmetric_interval": [0.7 * level, 0.8 * level],
            "agreement": 1 / level,
        }

    return {
        "caches": {
            "base": {"first": figures(7.3), "answer": figures(3.1)},
            "restored": {"first": figures(3.8), "answer": figures(1.9)},
        }
    }


def survivors(rng: random.Random) -> dict:
    def cache() -> dict:
        layers = [rng.random() for _ in range(LAYERS)]
        kinds = {"number": 0.06, "name": 0.1, "punctuation": 0.14, "other": 0.7}
        return {
            "share_per_layer": [share / sum(layers) for share in layers],
            "kept_per_head": [[rng.random() * 0.1 for _ in range(HEADS)] for _ in range(LAYERS)],
            "kept_per_position": [0.03 + 0.04 * rng.random() for _ in range(20)],
            "classes": {
                kind: {"tokens": part, "kept": rng.random() / 5, "held": part}
                for kind, part in kinds.items()
            },
            "forgotten": 0.3,
        }

    overlap = {
        "jaccard": 0.8,
        "jaccard_interval": [0.78, 0.82],
        "jaccard_per_layer": [0.8] * LAYERS,
    }
    return {"caches": {"base": cache(), "restored": cache()}, "overlap": overlap}


def restore_attention(rng: random.Random) -> dict:
    shares = {"kept": 0.3, "evicted": 0.1, "sinks": 0.5, "restore": 0.05, "itself": 0.05}
    masses = {part: [[share] * RESTORE for _ in range(LAYERS)] for part, share in shares.items()}
    words = [
        {"text": "<Marta>", "position": 511, "weight": 0.08},
        {"text": " blue", "position": 12, "weight": 0.05},
    ]
    return {
        "average": shares,
        **masses,
        "kept_share": {"seen": 0.7, "blind": 0.04},
        "histogram": [[0.05] * 20 for _ in range(RESTORE)],
        "entropy": masses["kept"],
        "entropy_uniform": 7.1,
        "examples": [{"document": "0", "tokens": [words] * RESTORE}],
    }
