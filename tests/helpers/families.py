"""The model families of examples/families.py, which has the only table of their configs."""

import importlib.util
from pathlib import Path

from transformers import CONFIG_MAPPING, PreTrainedModel

from restorekv.cache.states import HAS_STATES
from tests.helpers.decoders import HAS_LAYER_CONFIGS
from tests.helpers.exactness import TOKENIZER

PATH = Path(__file__).resolve().parents[2] / "examples" / "families.py"
_spec = importlib.util.spec_from_file_location("families", PATH)
assert _spec is not None and _spec.loader is not None
example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(example)
STATES = {"linear_attention", "conv"}


def _is_known(kind: str, settings: dict) -> bool:
    """Return whether this version of transformers has a family. Before configs could name a layer's
    own sizes, layers shared pairs in a different way, and each class had its own way to keep
    states; both are refused.
    """
    if kind not in CONFIG_MAPPING:
        return False
    if not HAS_STATES and STATES & set(settings.get("layer_types", ())):
        return False
    if not HAS_STATES and {"kv_lora_rank", "mamba_d_ssm"} & settings.keys():
        # Latent attention cached whole keys and values then, and Falcon-H1 had its own cache.
        return False
    return HAS_LAYER_CONFIGS or not {"global_head_dim", "num_kv_shared_layers"} & settings.keys()


FAMILIES: list[str] = [
    family for family, (kind, settings) in example.FAMILIES.items() if _is_known(kind, settings)
]


def build_family(family: str, seed: int = 0) -> PreTrainedModel:
    """Return a small random model of a family, for the tests' tokenizer."""
    model = example.build_model(family, max(len(TOKENIZER), 320), seed)
    model.set_experts_implementation("eager")  # the others have no float64
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
