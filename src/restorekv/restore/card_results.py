"""What `restorekv eval --json` measured with an adapter, as rows for its model card."""

from __future__ import annotations

import json
from pathlib import Path

from restorekv.errors import AdapterError
from restorekv.restore.adapter_file import Card, Stored

CONVENTIONS = ("prefix_policy", "allocation", "restore_from")
PLACE = ("model", "fingerprint", "benchmark", "protocol")  # asked the same questions
BASE = ("evictor", "ratio", "prefix_policy", "allocation", "offset")
MEASURED = {"score": "restored", "low": "low", "high": "high", "gain": "gain"}


def read(path: Path, stored: Stored) -> list[dict]:
    """Rows with benchmark, ratio, base, restored, full, interval and gain, in points: what this very adapter restored.

    Conventions other than the adapter's own are named in the rows. Raises AdapterError for results of other weights,
    another base model or another evictor.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [line(row, rows, stored.card) for row in own(path, rows, stored)]
    except AdapterError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        raise AdapterError(f"{path} is not what `restorekv eval --json` writes; give its file.") from error


def own(path: Path, rows: list[dict], stored: Stored) -> list[dict]:
    """The rows of this adapter with the model and the evictor that it is for."""
    card, weights = stored.card, stored.weights_hash()
    alike = [row for row in rows if row["fingerprint"] == card.fingerprint]
    if not alike:
        raise AdapterError(f"{path} was measured with another base model ({rows[0]['model']}); evaluate this one.")
    measured = [row for row in alike if row["adapter"] == weights]
    if not measured:
        raise AdapterError(f"{path} has no results of this adapter ({weights}); evaluate it with SPEC@FOLDER.")
    found = [row for row in measured if card.evictor in (None, row["method"])]
    if not found:
        used = measured[0]["method"]
        raise AdapterError(
            f"{path} was measured with the evictor {used}; evaluate the adapter with its {card.evictor}."
        )
    return found


def line(row: dict, rows: list[dict], card: Card) -> dict:
    """A restored cell beside its base and the full cache."""
    alike = [other for other in rows if all(other[key] == row[key] for key in PLACE)]
    base = next(r for r in alike if not r["restored"] and all(r[key] == row[key] for key in BASE))
    full = next(r for r in alike if r["evictor"] == "full")
    told = {"benchmark": row["benchmark"], "ratio": row["ratio"], "base": round(base["score"], 1)}
    told |= {name: round(row[key], 1) for key, name in MEASURED.items()}
    told |= {"full": round(full["score"], 1), "questions": row["questions"], "documents": row["samples"]}
    told |= {} if row["protocol"] == "kvpress" else {"protocol": row["protocol"]}
    return told | {key: row[key] for key in CONVENTIONS if row[key] != getattr(card, key)}


def joined(before: list[dict] | None, found: list[dict]) -> list[dict]:
    """New rows in place of older ones of the same kind."""
    kinds = [kind(row) for row in found]
    return [row for row in before or () if kind(row) not in kinds] + found


def kind(row: dict) -> tuple:
    return tuple(row.get(key) for key in ("benchmark", "protocol", "ratio", *CONVENTIONS))
