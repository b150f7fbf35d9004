"""What a gate learns from: attention inputs and an evictor's scores, for some tokens of every
context.

The scores are those of the evictor as it is run (restorekv's kvzip or kvzip+, passes of 2,048
tokens). Fast KVzip's authors used passes of 2,000 in bfloat16; KVzap's trained on one pass over the
whole text, with the softmax over all tokens, and used only the rows of the repeated text. Each
context has its own file, so an interruption loses at most one.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import evictors, seal, spec
from restorekv.compression.progress import OnStep
from restorekv.errors import RestoreKVError
from restorekv.model import support
from restorekv.model.observer import LayerView, observe_layers
from restorekv.model.position_limits import fit_context
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context, make_context
from restorekv.model.shape import CacheShape
from restorekv.train.teacher_cache import TensorStore, describe_teacher, hash_ids

# The dtype of the attention inputs, which are nearly all of a file: half of float32, and precise
# enough to learn from.
HIDDEN_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Features:
    """N tokens: hidden (N, L, d), target (N, L, H) float32, document (N,) the context's number."""

    hidden: Tensor
    target: Tensor
    document: Tensor

    def select(self, rows: Tensor) -> "Features":
        """Return the tokens `rows` (a mask or indices)."""
        return Features(self.hidden[rows], self.target[rows], self.document[rows])

    def select_by_layer(self, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return hidden (L, M, d) and target (L, H, M), float32, of M tokens."""
        hidden = self.hidden[rows].to(device, torch.float32).transpose(0, 1)
        return hidden, self.target[rows].to(device).permute(1, 2, 0)

    def split_held_out(self, share: float) -> tuple["Features", "Features"]:
        """Split off whole contexts, evenly spaced: (train, held out)."""
        count = int(self.document.max()) + 1
        if count < 2:
            raise RestoreKVError("One context leaves none to check the gate on; give at least two.")
        contexts = min(max(round(share * count), 1), count - 1)
        numbers = torch.linspace(0, count - 1, contexts).round().long()
        is_held_out = torch.isin(self.document, numbers)
        return self.select(~is_held_out), self.select(is_held_out)


def collect_features(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    target: str,
    tokens: int,
    seed: int,
    folder: Path,
    resume: bool = False,
    progress: OnStep = lambda done, total, what: None,
) -> Features:
    """Return the features of random tokens of every text.

    Args:
        model: The model that the gate is for.
        tokenizer: The model's own.
        texts: The contexts; one too long for the model is cut.
        target: The evictor whose scores the gate learns.
        tokens: Most tokens of a text.
        seed: Decides the tokens.
        folder: Where each text's features are kept.
        resume: Reuse the features that are in `folder`.
        progress: Called after each text.

    Raises:
        RestoreKVError: `folder` holds features already, or a damaged file of them.
    """
    if folder.is_dir() and any(folder.glob("features/*.safetensors")) and not resume:
        raise RestoreKVError(
            f"{folder} holds features already; use them with --resume or name another --features."
        )
    folder.mkdir(parents=True, exist_ok=True)
    support.prepare_model(model)
    shape = CacheShape.from_model(model)
    # Scores also depend on the template, since evictors read its text after a question, and on the
    # evictor's code.
    store = TensorStore(folder, describe_teacher(model, tokenizer))
    evictor = evictors.make_evictor(target)
    key = {"evictor": evictor.identity(model), "code": spec.digest_code(type(evictor))}
    contexts = [fit_context(model, make_context(tokenizer, text))[0] for text in texts]
    rows = [min(tokens, context.text_tokens) for context in contexts]
    # Filled context by context, since a list of them next to the whole would take twice the memory.
    hidden = torch.empty(sum(rows), shape.layers, shape.hidden, dtype=HIDDEN_DTYPE)
    scores = torch.empty(sum(rows), shape.layers, shape.heads, dtype=torch.float32)
    start = 0
    for index, context in enumerate(contexts):
        columns = _draw_columns(context, tokens, f"{seed} {index}")
        sizes = {
            "hidden": (HIDDEN_DTYPE, (rows[index], shape.layers, shape.hidden)),
            "target": (torch.float32, (rows[index], shape.layers, shape.heads)),
        }
        part = store.load_or_compute(
            "features",
            key | {"ids": hash_ids(context.ids), "columns": hash_ids(columns)},
            partial(seal.has_sizes, sizes=sizes),
            partial(observe_context, model, tokenizer, context, target, columns),
        )
        end = start + rows[index]
        hidden[start:end] = part["hidden"]
        scores[start:end] = part["target"]
        start = end
        progress(index + 1, len(texts), f"{target} scores")
    return Features(hidden, scores, torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)))


def _draw_columns(context: Context, tokens: int, seed: str) -> Tensor:
    """Draw columns of the text and return them in ascending order."""
    # A hash of the text that names the draw, since Python's own hash differs between processes.
    number = int(hashlib.sha256(seed.encode()).hexdigest()[:8], 16)
    generator = torch.Generator().manual_seed(number)
    return torch.randperm(context.text_tokens, generator=generator)[:tokens].sort().values


@torch.no_grad()
def observe_context(
    model: PreTrainedModel, tokenizer: Tokenizer, context: Context, target: str, columns: Tensor
) -> dict[str, Tensor]:
    """Return attention inputs "hidden" (M, L, d), in `HIDDEN_DTYPE`, and scores "target" (M, L, H)
    of columns of the text.
    """
    shape = CacheShape.from_model(model)
    columns = columns.to(model.device)
    hidden = torch.empty(
        shape.layers, context.num_tokens, shape.hidden, dtype=model.dtype, device=model.device
    )

    # A long context is read piece by piece: `view` has the states of the latest piece only.
    def store_hidden(view: LayerView) -> None:
        end = view.key.shape[1]
        assert view.hidden is not None, "`observe_layers` records the input of every layer"
        hidden[view.layer, end - view.hidden.shape[0] : end] = view.hidden

    with observe_layers(model, store_hidden):
        full = prefill(model, context.ids)
    # The evictor as it is run, over the cache that was just filled.
    scores = evictors.make_evictor(target).score(model, tokenizer, context, full)
    return {
        "hidden": hidden[:, context.prefix_length + columns].transpose(0, 1).to(HIDDEN_DTYPE).cpu(),
        "target": scores[..., columns].permute(2, 0, 1).contiguous().cpu(),
    }
