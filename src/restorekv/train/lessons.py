"""Prepared contexts with their teacher's answers, made once and remembered in memory or on disk."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression.generate import stop_ids
from restorekv.compression.prepared import ScoredContext
from restorekv.data.manifest import tokenizer_hash
from restorekv.model import attention
from restorekv.model.load import model_fingerprint, rope_fingerprint
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context, make_context, template_hash
from restorekv.train.config import TrainConfig
from restorekv.train.example import Example
from restorekv.train.store import Store
from restorekv.train.teacher import Teacher, TeacherTarget

# of a config, what says where it is from and not what the model computes
SPEAKING = ("name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "attn_implementation")
Taught = tuple[ScoredContext, list[TeacherTarget]]


class TeacherCache:
    """`self[index]`: a context without a restore cache, and its lessons.

    The first `config.keep` contexts stay in memory. With a `store`, scores and lessons are kept there, and with
    `store_prefill` the full caches too, which only small models can afford.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        examples: list[Example],
        config: TrainConfig,
        store: Path | None = None,
        store_prefill: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.examples, self.config = model, tokenizer, examples, config
        self.eviction = config.eviction()
        self.teacher = Teacher(model, tokenizer, config.max_new_tokens, tuple(config.watched()))
        self.store_prefill = store_prefill
        self.store = None if store is None else Store(store, facts(model, tokenizer))
        self.kept: dict[int, Taught] = {}
        attention.install(model)

    def __len__(self) -> int:
        return len(self.examples)

    @torch.no_grad()
    def __getitem__(self, index: int) -> Taught:
        if index in self.kept:
            return self.kept[index]
        example = self.examples[index]
        prepared = self.prepared(make_context(self.tokenizer, example.context))
        lessons = self.taught(prepared, example)
        if len(self.kept) < self.config.keep:
            self.kept[index] = prepared, lessons
        return prepared, lessons

    def prepared(self, context: Context) -> ScoredContext:
        """Prefill and scores, each from the store if it is there."""
        if self.store is None:
            return self.eviction.prepare(self.model, self.tokenizer, context)
        text = {"ids": digest(context.ids)}
        scored = text | {"evictor": self.eviction.identity(self.model)}
        scores, full = self.store.find("scores", scored), None
        if scores is None:
            made = self.eviction.prepare(self.model, self.tokenizer, context)
            self.store.put("scores", scored, {"scores": made.scores})
            scores, full = {"scores": made.scores}, made.full
        if full is None or self.store_prefill:
            full = self.prefilled(context, text, full)
        stored = scores["scores"].to(self.model.device)
        return ScoredContext(self.model, context, full, stored, self.eviction.conventions)

    def prefilled(self, context: Context, key: dict, full: DynamicCache | None) -> DynamicCache:
        """The full cache, from the store if it is kept there."""
        if not self.store_prefill:
            return prefill(self.model, context.ids)
        held = self.store.get("prefill", key, lambda: packed(full or prefill(self.model, context.ids)))
        return unpacked(held, self.model.device)

    def taught(self, prepared: ScoredContext, example: Example) -> list[TeacherTarget]:
        """The lessons, from the store if they are there."""
        if self.store is None:
            return self.teacher.teach(prepared, example)
        key = {
            "ids": digest(prepared.context.ids), "questions": list(example.questions), "drafts": list(example.drafts),
            "answers": example.answer_ids and [list(ids) for ids in example.answer_ids],
            "limit": self.teacher.max_new_tokens, "watch": list(self.teacher.watch),
        }  # fmt: skip
        held = self.store.get("teacher", key, lambda: written(self.teacher.teach(prepared, example)))
        return read(held, len(example.questions), self.model.device)


def facts(model: PreTrainedModel, tokenizer: Tokenizer) -> dict[str, object]:
    """What prefill, scores and answers depend on beside the text."""
    told = model.config.get_text_config().to_diff_dict()
    config = {key: value for key, value in told.items() if key.strip("_") not in SPEAKING}
    return {
        "model": model_fingerprint(model), "dtype": str(model.dtype), "rope": rope_fingerprint(model.config),
        "config": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16],
        "template": template_hash(tokenizer), "tokenizer": tokenizer_hash(tokenizer),
        "stops": sorted(stop_ids(model, tokenizer)),
    }  # fmt: skip


def digest(ids: Tensor) -> str:
    """Of a context's ids, chat prefix included."""
    return hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()


def packed(full: DynamicCache) -> dict[str, Tensor]:
    """Keys and values of every layer, (1, H, S + T, D) each."""
    layers = enumerate(full.layers)
    return {f"{name}.{index}": getattr(layer, name) for index, layer in layers for name in ("keys", "values")}


def unpacked(held: dict[str, Tensor], device: torch.device) -> DynamicCache:
    """The counterpart of `packed`."""
    full = DynamicCache()
    for index in range(len(held) // 2):
        full.update(held[f"keys.{index}"].to(device), held[f"values.{index}"].to(device), index)
    return full


def written(lessons: list[TeacherTarget]) -> dict[str, Tensor]:
    """Targets as named tensors."""
    held = {}
    for number, lesson in enumerate(lessons):
        parts = {"row": lesson.ids.int(), "answer": torch.tensor(lesson.answer), "hidden": lesson.hidden}
        parts |= {f"state.{name}": value for name, value in lesson.states.items()}
        held |= {f"{number}.{name}": value for name, value in parts.items()}
    return held


def read(held: dict[str, Tensor], count: int, device: torch.device) -> list[TeacherTarget]:
    """The counterpart of `written`."""
    lessons = []
    for number in range(count):
        own = {name.partition(".")[2]: x for name, x in held.items() if name.partition(".")[0] == str(number)}
        states = {name.removeprefix("state."): x.to(device) for name, x in own.items() if name.startswith("state.")}
        lessons.append(TeacherTarget(own["row"].long(), int(own["answer"]), own["hidden"].to(device), states))
    return lessons
