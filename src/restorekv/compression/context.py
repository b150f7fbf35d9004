"""What `compress` returns: a small cache that answers questions, can be saved and says what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.compression import context_file, generate, portable
from restorekv.compression.context_checks import check_model
from restorekv.compression.context_file import CacheFile, Manifest
from restorekv.compression.portable import Portable
from restorekv.errors import CacheFileError, RestoreKVError, warn
from restorekv.model import attention
from restorekv.model.prompt import Context, template_hash


@dataclass(frozen=True, repr=False)
class CompressedContext:
    """`cache` never changes: every question gets a fork of it, and the cache itself refuses to be written to."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    context: Context
    cache: RaggedCache
    manifest: Manifest

    def __post_init__(self) -> None:
        attention.prepare(self.cache.layers)
        self.cache.lock()

    def ask(
        self, question: str | Sequence[str], max_new_tokens: int | Sequence[int] = 128,
        stream: bool | generate.OnText = False, answer_prefix: str = "", graph: bool = False,
    ) -> str | list[str]:  # fmt: skip
        """Returns one answer for one question, a list for a list, whose questions are answered in one batch.

        stream=True prints the answer while it grows; a function gets the pieces instead. graph=True makes every step
        the same work, which a GPU replays as a CUDA graph (decode_graph.py).
        """
        questions = [question] if isinstance(question, str) else list(question)
        on_text = show if stream is True else (stream or None)
        asked = self.model, self.tokenizer, self.context, self.cache, questions
        answers = generate.ask(*asked, max_new_tokens, on_text, answer_prefix, graph)
        if stream is True:
            show("\n")
        return answers[0] if isinstance(question, str) else answers

    def inputs(self, question: str, answer_prefix: str = "", plain: bool = False) -> dict[str, Tensor]:
        """Returns inputs for model.generate(**compressed.inputs(question), past_key_values=compressed.cache.fork()).

        With plain=True they go with compressed.cache.to_dynamic_cache(), which does not know how many tokens were seen.
        The answer is result[:, input_ids.shape[1]:].
        """
        asked = self.tokenizer, self.context, self.cache, question, answer_prefix, plain
        return {name: x.to(self.model.device) for name, x in generate.generate_inputs(*asked).items()}

    def generate(self, question: str, answer_prefix: str = "", **options: Any) -> str:
        """Returns the answer of transformers' own `generate` with its options; greedy unless they say otherwise."""
        inputs = self.inputs(question, answer_prefix)
        stops = generate.stop_ids(self.model, self.tokenizer)
        options = {"do_sample": False, "max_new_tokens": 128, "eos_token_id": sorted(stops), **options}
        options.setdefault("pad_token_id", self.tokenizer.pad_token_id or 0)
        rows = max(options.get("num_beams", 1), options.get("num_return_sequences", 1))
        with torch.no_grad():
            result = self.model.generate(**inputs, past_key_values=self.cache.fork(rows), **options)
        return generate.answer_text(self.tokenizer, result[0, inputs["input_ids"].shape[1] :].tolist(), stops)

    def portable(self) -> Portable:
        """Returns the cache as an ordinary prefix of m tokens for other engines; needs allocation="per-head"."""
        return portable.portable(self.model, self.context, self.cache, self.manifest)

    def save(self, path: str | Path, key: bytes | None = None) -> None:
        """Writes one safetensors file; the previous one stays if anything goes wrong.

        `key`, or RESTOREKV_KEY, signs the file: whoever has the key can tell it from a stranger's.
        """
        context_file.write(path, self.cache, self.context, self.manifest, key)

    @classmethod
    def load(
        cls, file: str | Path | CacheFile, model: PreTrainedModel, tokenizer: Tokenizer, key: bytes | None = None
    ) -> CompressedContext:
        """Reads a cache file, or takes one that was read.

        Refuses a damaged one, one that contradicts itself, a model that is not the one it was made with and, with a
        key, a file that was not signed with it.
        """
        stored = file if isinstance(file, CacheFile) else context_file.read(file, key)
        check(stored, model, tokenizer)
        attention.install(model)
        return cls(model, tokenizer, stored.context, stored.cache(model.device), stored.manifest)

    def __repr__(self) -> str:
        m = self.manifest
        what = m.evictor + (f" + {m.restore_tokens} restore tokens" if m.restore_tokens else "")
        full = (m.tokens + m.prefix) * m.shape["layers"] * m.shape["heads"]
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in m.seconds.items())
        return (
            f"CompressedContext({what}, r = {float(Fraction(m.ratio)):g}, prefix {m.prefix_policy})\n"
            f"  tokens   T = {m.tokens:,}, chat prefix S = {m.prefix:,}\n"
            f"  pairs    {m.pairs:,} budgeted, {m.pairs_held:,} held of {full:,}\n"
            f"  bytes    {size(m.bytes_held)} held of {size(m.bytes_full)}\n"
            f"  seconds  {phases}"
        )


def ask_many(
    asked: Iterable[tuple[CompressedContext, str | Sequence[str]]], max_new_tokens: int = 128, answer_prefix: str = ""
) -> list[str | list[str]]:
    """Answers the questions of several compressed contexts in one batch: one answer for one question, a list for a
    list, as `ask` gives them alone.

    The contexts may differ in all but the model and its chat template; one may come up more than once.
    """
    asked = [(each, [given] if isinstance(given, str) else list(given), given) for each, given in asked]
    rows = [(each.context, each.cache, question) for each, questions, _ in asked for question in questions]
    if not rows:
        return [[] for _ in asked]
    first = asked[0][0]
    for each, _, _ in asked:
        if each.model is not first.model:
            raise RestoreKVError("A batch has one model; load the cache files with the same model object.")
        if template_hash(each.tokenizer) != template_hash(first.tokenizer):
            raise RestoreKVError("A batch has one chat template; load the cache files with the same tokenizer.")
    written = iter(generate.ask_each(first.model, first.tokenizer, rows, max_new_tokens, None, answer_prefix))
    answers = [[next(written) for _ in questions] for _, questions, _ in asked]
    return [own[0] if isinstance(given, str) else own for own, (_, _, given) in zip(answers, asked, strict=True)]


def check(stored: CacheFile, model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Refuses a model other than the one that the cache was computed with."""
    path, manifest, ids = stored.path, stored.manifest, (stored.context.ids, stored.context.suffix)
    check_model(path, manifest, model)
    if max(int(each.max()) for each in ids if each.numel()) >= model.get_input_embeddings().weight.shape[0]:
        raise CacheFileError(f"{path} has token ids that the model's vocabulary lacks; compress the context again.")
    if manifest.template != template_hash(tokenizer):
        warn(f"{path} was made with another chat template; answers may suffer.")


def show(piece: str) -> None:
    """Prints a piece of text to the terminal at once."""
    print(piece, end="", flush=True)


def size(count: float) -> str:
    """1536 -> '1.5 KB'."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
