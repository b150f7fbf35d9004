"""The model that wrote a mixture's answers: what identifies it, and the check that a given model is
the same.
"""

import json
from pathlib import Path

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.build_folder import is_compared
from restorekv.errors import RestoreKVError, make_printable
from restorekv.generation.decoding import get_stop_ids
from restorekv.model.identity import identify_model
from restorekv.model.shape import get_dtype_name
from restorekv.model.tokenize import tokenize_text
from restorekv.seal import short_hash

PROBE = "Kv 0123456789: naïve, “tabs”\t\n\n日本 😀 What? Yes! (a; b) 'c' - d/e."
_COMPARED_KEYS = {
    "fingerprint": "model",
    "template": "chat template",
    "tokenizer": "tokenizer",
    "stops": "set of ids that end an answer",
}


def describe_model(model: PreTrainedModel, tokenizer: Tokenizer) -> dict:
    """Return what identifies the teacher, its answers and their ids."""
    identity = identify_model(model, tokenizer)
    return {
        "name": identity.name,
        "fingerprint": identity.fingerprint,
        "dtype": get_dtype_name(model.dtype),
        "template": identity.template,
        "tokenizer": hash_tokenizer(tokenizer),
        "rope": identity.rope,
        "stops": sorted(get_stop_ids(model, tokenizer)),
    }


def hash_tokenizer(tokenizer: Tokenizer) -> str:
    """Return 16 hex digits that hash the vocabulary and the ids of a text that tokenizers split
    differently.
    """
    # Two tokenizers with the same vocabulary may split spaces, accents, symbols or emoji
    # differently.
    facts = [sorted(tokenizer.get_vocab().items()), tokenize_text(tokenizer, PROBE)]
    return short_hash(json.dumps(facts))


def check_model(manifest: dict, model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Refuse answers of a different model: they are not this teacher's, and their ids may mean
    other words.
    """
    now = describe_model(model, tokenizer)
    before = manifest["model"]
    for key, what in _COMPARED_KEYS.items():
        if is_compared(key, before) and now[key] != before.get(key):
            raise RestoreKVError(
                f"The data in {folder} was made by the model {make_printable(before.get('name'))} "
                f"with a different {what} ({make_printable(before.get(key))}, not {now[key]}); "
                "build it for this model."
            )
