"""What a gate learns from: attention inputs and the scores of an evictor, of some tokens of every context.

The scores are those of the evictor as it is run (restorekv's kvzip or kvzip+, passes of 2,048 tokens). Fast KVzip's
authors used passes of 2,000 in bfloat16; KVzap's trained on one pass over the whole text, softmax over all tokens and
rows of the repeated text alone. One file a context, so an interruption loses at most the context at hand.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import evictors
from restorekv.errors import RestoreKVError
from restorekv.files import replacing
from restorekv.model import attention
from restorekv.model.load import model_fingerprint
from restorekv.model.observer import LayerView, observe_layers
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context, make_context
from restorekv.model.shape import CacheShape

Progress = Callable[[int, int, str], None]  # done, of how many, what


@dataclass(frozen=True)
class Features:
    """N tokens: hidden (N, L, d) in the model's dtype, target (N, L, H) float32, document (N,) the context's number."""

    hidden: Tensor
    target: Tensor
    document: Tensor

    def where(self, rows: Tensor) -> "Features":
        """The tokens `rows` (a mask or indices)."""
        return Features(self.hidden[rows], self.target[rows], self.document[rows])

    def part(self, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """hidden (L, M, d) and target (L, H, M), float32, of M tokens."""
        hidden = self.hidden[rows].to(device, torch.float32).transpose(0, 1)
        return hidden, self.target[rows].to(device).permute(1, 2, 0)

    def held_out(self, share: float) -> tuple["Features", "Features"]:
        """Whole contexts, evenly spread, are left out of training: (train, held out)."""
        count = int(self.document.max()) + 1
        if count < 2:
            raise RestoreKVError("One context leaves none to check the gate on; give at least two.")
        most = min(max(round(share * count), 1), count - 1)
        chosen = torch.linspace(0, count - 1, most).round().long()
        held = torch.isin(self.document, chosen)
        return self.where(~held), self.where(held)


def collect(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    target: str,
    tokens: int,
    seed: int,
    folder: Path,
    resume: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> Features:
    """At most `tokens` random tokens of every text, from `folder` as far as they are there already (`resume`)."""
    if folder.is_dir() and any(folder.glob("*.safetensors")) and not resume:
        raise RestoreKVError(f"{folder} holds features already; use them with --resume or name another --features.")
    folder.mkdir(parents=True, exist_ok=True)
    attention.install(model)
    made_by = [model_fingerprint(model), str(model.dtype), target, tokens, seed]
    parts = []
    for index, text in enumerate(texts):
        context = make_context(tokenizer, text)
        path, origin = folder / f"{index:05d}.safetensors", identity(made_by, context)
        if not path.exists():
            chosen = choose(context, tokens, f"{seed} {index}")
            with replacing(path) as temporary:
                found = observe(model, tokenizer, context, target, chosen)
                temporary.write_bytes(safetensors.torch.save(found, {"origin": origin}))
        parts.append(read(path, origin))
        progress(index + 1, len(texts), f"{target} scores")
    hidden, scores = torch.cat([part["hidden"] for part in parts]), torch.cat([part["target"] for part in parts])
    document = torch.cat([torch.full((len(part["target"]),), index) for index, part in enumerate(parts)])
    return Features(hidden, scores, document)


def identity(made_by: list[object], context: Context) -> str:
    """16 hex digits of everything that decides a context's features."""
    return hashlib.sha256(json.dumps([made_by, context.ids.tolist()]).encode()).hexdigest()[:16]


def choose(context: Context, tokens: int, seed: str) -> Tensor:
    """Columns of the text, in ascending order."""
    generator = torch.Generator().manual_seed(int(hashlib.sha256(seed.encode()).hexdigest()[:8], 16))
    return torch.randperm(context.tokens, generator=generator)[:tokens].sort().values


@torch.no_grad()
def observe(
    model: PreTrainedModel, tokenizer: Tokenizer, context: Context, target: str, chosen: Tensor
) -> dict[str, Tensor]:
    """Attention inputs hidden (M, L, d) and scores target (M, L, H) of the chosen columns of the text."""
    shape, chosen = CacheShape.of(model), chosen.to(model.device)
    hidden = torch.empty(shape.layers, context.positions, shape.hidden, dtype=model.dtype, device=model.device)

    def on_layer(view: LayerView) -> None:
        end = view.key.shape[1]
        hidden[view.layer, end - view.hidden.shape[0] : end] = view.hidden

    with observe_layers(model, on_layer):
        full = prefill(model, context.ids)
    scores = evictors.make(target).score(model, tokenizer, context, full)
    return {
        "hidden": hidden[:, context.prefix + chosen].transpose(0, 1).contiguous().cpu(),
        "target": scores[..., chosen].permute(2, 0, 1).contiguous().cpu(),
    }


def read(path: Path, origin: str) -> dict[str, Tensor]:
    """A context's file, if it was made with the settings at hand."""
    try:
        with safe_open(path, "pt") as file:
            same = (file.metadata() or {}).get("origin") == origin
        found = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise RestoreKVError(f"The features {path} are damaged; delete that file and go on with --resume.") from error
    if not same:
        raise RestoreKVError(f"{path} is from other data, settings or another model; name another --features.")
    return found
