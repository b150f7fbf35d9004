"""What `restorekv eval --json` measured with an adapter, as rows for its model card."""

from __future__ import annotations

import json
from pathlib import Path

from restorekv.adapter_file import Card, Stored
from restorekv.errors import AdapterError

CONVENTIONS = ("prefix_policy", "allocation", "restore_from")
MEASURED = {"score": "restored", "low": "low", "high": "high", "gain": "gain"}


def read(path: Path, stored: Stored) -> list[dict]:
    """Rows with benchmark, ratio, base, restored, full, interval and gain, in points: what this very adapter restored.

    Conventions other than the adapter's own are named in the rows. Raises AdapterError for results of other weights,
    another base model or another evictor.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows, conventions = found["rows"], found["conventions"]
        evictor = evictor_of(path, conventions, stored)
        scores = {(row["evictor"], row["restored"], row["ratio"]): row for row in rows}
        return [
            line(row, scores, conventions, stored.card) for key, row in scores.items() if key[:2] == (evictor, True)
        ]
    except AdapterError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterError(f"{path} is not what `restorekv eval --json` writes; give its file.") from error


def evictor_of(path: Path, conventions: dict, stored: Stored) -> str:
    """Under which name the adapter was measured."""
    card, weights = stored.card, stored.weights_hash()
    if conventions["fingerprint"] != card.fingerprint:
        raise AdapterError(f"{path} was measured with another base model ({conventions['model']}); evaluate this one.")
    named = [name for name, adapter in conventions["adapters"].items() if adapter and adapter["hash"] == weights]
    if not named:
        raise AdapterError(f"{path} has no results of this adapter ({weights}); evaluate it with SPEC@FOLDER.")
    own = [name for name in named if card.evictor in (None, conventions["methods"][name])]
    if not own:
        used = conventions["methods"][named[0]]
        raise AdapterError(
            f"{path} was measured with the evictor {used}; evaluate the adapter with its {card.evictor}."
        )
    return own[0]


def line(row: dict, scores: dict, conventions: dict, card: Card) -> dict:
    """A restored cell beside its base and the full cache."""
    base, full = scores[row["evictor"], False, row["ratio"]], scores["full", False, 1.0]
    told = {"benchmark": f"{conventions['suite']} suite", "ratio": row["ratio"], "base": round(base["score"], 1)}
    told |= {name: round(row[key], 1) for key, name in MEASURED.items()}
    told |= {"full": round(full["score"], 1), "questions": row["questions"], "documents": conventions["documents"]}
    return told | {key: conventions[key] for key in CONVENTIONS if conventions[key] != getattr(card, key)}


def joined(before: list[dict] | None, found: list[dict]) -> list[dict]:
    """New rows in place of older ones of the same kind."""
    kinds = [kind(row) for row in found]
    return [row for row in before or () if kind(row) not in kinds] + found


def kind(row: dict) -> tuple:
    return tuple(row.get(key) for key in ("benchmark", "ratio", *CONVENTIONS))
