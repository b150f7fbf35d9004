"""Prepared contexts with their teacher's targets, computed once and kept in memory or on disk.

An entry on disk is one safetensors file, named by a hash of all that it depends on (model, RoPE,
template, text, ...): runs with other settings, seeds or evictors share what they have in common,
and nothing stale is ever read. Files are written whole or not at all; deleting them costs time
only.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.cache_utils import Cache

from restorekv import seal
from restorekv.cache.dense import list_dense_layers
from restorekv.cache.sliding import RecentLayer
from restorekv.cache.states import PairlessLayer, StateLayer
from restorekv.compression.eviction import Eviction
from restorekv.compression.full_cache import ScoredContext
from restorekv.data.teacher import hash_tokenizer
from restorekv.errors import RestoreKVError, warn
from restorekv.generation.decoding import get_stop_ids
from restorekv.model import support
from restorekv.model.identity import identify_model
from restorekv.model.prefill import make_empty_cache, make_full_cache, prefill
from restorekv.model.prompt import Context, encode_question, make_context
from restorekv.model.shape import (
    CacheShape,
    find_pairless_layers,
    find_state_layers,
    is_latent_config,
    list_attention_modules,
    list_heads,
    list_windows,
)
from restorekv.seal import FileKind
from restorekv.train.config import ATTENTION, TrainConfig
from restorekv.train.examples import TrainingContext
from restorekv.train.teacher import Teacher, TeacherTarget

VERSION = 2
# What is left free on the disk.
SPARE_BYTES = 2**30
# Entries of a model's config that are not hashed: its origin and versions, the dtype, which is
# recorded separately, and the attention's implementation, which is replaced.
IRRELEVANT_SETTINGS = (
    "name_or_path",
    "architectures",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "attn_implementation",
)
FIX = "delete it to have it computed again"
KIND = FileKind("restorekv-teacher", "1", "a file of a teacher's cache", FIX)
Tensors = dict[str, Tensor]
Check = Callable[[Tensors], bool]
ScoredWithTargets = tuple[ScoredContext, list[TeacherTarget]]


@dataclass
class TensorStore:
    """A folder of entries, each a file of tensors.

    Args:
        folder: The folder.
        identity: What every entry depends on: the model, its dtype and so on.
        is_full: Whether the disk was found nearly full. From then on the folder is only read.
    """

    folder: Path
    identity: dict[str, object] = field(default_factory=dict)
    is_full: bool = False

    def make_entry_path(self, kind: str, key: Mapping[str, object]) -> Path:
        """Return the file of an entry, named by a hash of all that it depends on."""
        text = json.dumps({"version": VERSION, **self.identity, **key}, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return self.folder / kind / f"{digest[:32]}.safetensors"

    def load_or_compute(
        self, kind: str, key: Mapping[str, object], is_valid: Check, compute: Callable[[], Tensors]
    ) -> Tensors:
        """Return an entry's tensors, which are computed and written if it does not exist.

        Args:
            kind: The subfolder: "scores", "prefill", "teacher" or "features".
            key: What the entry depends on in addition to `identity`.
            is_valid: Checks names, dtypes and shapes of tensors that were read.
            compute: Computes the tensors.

        Raises:
            RestoreKVError: The file is damaged or holds other tensors.
        """
        path = self.make_entry_path(kind, key)
        if not path.exists():
            tensors = compute()
            self.write_entry(path, tensors)
            return tensors
        what = f"The cached file {path}"
        _, tensors = seal.read_sealed(path, KIND, what, finite=True)
        if not is_valid(tensors):
            raise RestoreKVError(
                f"{what} is damaged: its tensors have wrong names, dtypes or shapes; {FIX}."
            )
        return tensors

    def write_entry(self, path: Path, tensors: Tensors) -> None:
        """Write an entry. If the disk is nearly full, warn once and write nothing from then on."""
        if self.is_full:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            size = sum(value.nbytes for value in tensors.values())
            free = shutil.disk_usage(path.parent).free
            self.is_full = size + SPARE_BYTES > free
            if self.is_full:
                warn(
                    f"{self.folder} has {free:,} bytes free, too few for the next file ({size:,}) "
                    f"and the {SPARE_BYTES:,} that stay free; the run continues without writing "
                    "there."
                )
                return
            seal.write_sealed(path, KIND, tensors, follow=False)
        except OSError as error:
            raise RestoreKVError(
                f"Cannot write to {self.folder}; choose a writable folder ({error})."
            ) from error


class TeacherCache:
    """Full caches, evictor scores and teacher targets of the training contexts, computed when they
    are first asked for.

    The first `config.keep` pairs of a context and an evictor that are asked for stay in memory. A
    `store_folder` keeps scores and targets on disk, and with `store_prefill` also the full caches,
    which are small enough for that with small models only.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        examples: list[TrainingContext],
        config: TrainConfig,
        store_folder: Path | None = None,
        store_prefill: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.examples = examples
        self.config = config
        self.evictions = config.make_evictions()
        self.teacher = Teacher(
            model, tokenizer, config.max_new_tokens, tuple(config.state_weights())
        )
        self.store_prefill = store_prefill
        self.store: TensorStore | None = None
        if store_folder is not None:
            self.store = TensorStore(store_folder, describe_teacher(model, tokenizer))
        # By the index of the context and of the evictor.
        self.in_memory: dict[tuple[int, int], ScoredWithTargets] = {}
        # The newest one that is not in `in_memory`: the other draws of its step ask for it again.
        self.latest: tuple[tuple[int, int], ScoredWithTargets] | None = None
        support.prepare_model(model)

    @torch.no_grad()
    def get_context(self, example_index: int, evictor_index: int = 0) -> ScoredWithTargets:
        """Return a context, scored by one of the run's evictors, and its targets."""
        index = (example_index, evictor_index)
        if index in self.in_memory:
            return self.in_memory[index]
        if self.latest and self.latest[0] == index:
            return self.latest[1]
        self.latest = None  # frees its full cache before the next one is made
        example = self.examples[example_index]
        context = make_context(self.tokenizer, example.context)
        prepared = self.prepare_context(context, self.evictions[evictor_index])
        targets = self.load_or_compute_targets(prepared, example)
        if len(self.in_memory) < self.config.keep:
            self.in_memory[index] = prepared, targets
        elif self.config.draws > 1:
            self.latest = index, (prepared, targets)
        return prepared, targets

    def prepare_context(self, context: Context, eviction: Eviction) -> ScoredContext:
        """Return prefill and scores of a context, loading each from the store if it has them."""
        if self.store is None:
            return _score_context(eviction, self.model, self.tokenizer, context)
        # Scores depend on text and evictor, a prefill on the text alone: two entries.
        prefill_key = {"ids": hash_ids(context.ids)}
        scores_key = {
            **prefill_key,
            "evictor": eviction.identity(self.model),
            "code": eviction.digest_code(),
        }
        shape = CacheShape.from_model(self.model)
        # Computing scores makes a full cache. It is kept here, so that it is not made twice.
        full: Cache | None = None

        def compute_scores() -> Tensors:
            nonlocal full
            prepared = _score_context(eviction, self.model, self.tokenizer, context)
            full = prepared.full
            # Finite float32, as in a file: a user's evictor may return another dtype, and pin
            # columns with infinity.
            limits = torch.finfo(torch.float32)
            return {"scores": prepared.scores.float().clamp(limits.min, limits.max)}

        scores_size = (torch.float32, (shape.layers, shape.heads, context.text_tokens))
        are_scores = partial(seal.has_sizes, sizes={"scores": scores_size})
        stored = self.store.load_or_compute("scores", scores_key, are_scores, compute_scores)
        if self.store_prefill:

            def compute_prefill() -> Tensors:
                if full is not None:
                    return _pack_cache(full)
                return _pack_cache(prefill(self.model, context.ids))

            sizes = self._list_prefill_sizes(context.num_tokens)
            is_prefill = partial(seal.has_sizes, sizes=sizes)
            entry = self.store.load_or_compute("prefill", prefill_key, is_prefill, compute_prefill)
            full = _unpack_cache(self.model, entry, context.num_tokens)
        if full is None:
            full = prefill(self.model, context.ids)
        scores = stored["scores"].to(self.model.device)
        return ScoredContext(self.model, context, full, scores, config=eviction.config)

    def _list_prefill_sizes(self, positions: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of every tensor of a full cache of S + T positions, by name."""
        heads = list_heads(self.model.config)
        sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        pairless = find_pairless_layers(self.model.config)
        if pairless:
            for index, layer in enumerate(make_empty_cache(self.model).layers):
                if isinstance(layer, PairlessLayer):
                    for name, state in layer.named_tensors.items():
                        sizes[f"states.{index}.{name}"] = (state.dtype, tuple(state.shape))
        for layer, window in enumerate(list_windows(self.model.config)):
            if layer in pairless:
                continue
            # A layer with a window holds its last W - 1 columns, the others all.
            columns = positions
            if window is not None:
                columns = min(columns, window - 1)
            own = heads[layer]
            layer_size = (self.model.dtype, (1, own.heads, columns, own.head_dim))
            sizes[f"keys.{layer}"] = layer_size
            if not is_latent_config(self.model.config):
                sizes[f"values.{layer}"] = layer_size
        return sizes

    def load_or_compute_targets(
        self, prepared: ScoredContext, example: TrainingContext
    ) -> list[TeacherTarget]:
        """Return the targets of a context, from the store if they are there."""
        if self.store is None:
            return self.teacher.make_targets(prepared, example)
        # What a target depends on: the text, the questions, their known answers, and what is
        # recorded.
        key = {
            "ids": hash_ids(prepared.context.ids),
            "questions": list(example.questions),
            "drafts": list(example.drafts),
            "answers": example.answer_ids and [list(ids) for ids in example.answer_ids],
            "limit": self.teacher.max_new_tokens,
            "watch": list(self.teacher.record),
        }
        asked = []
        for text in example.questions:
            asked.append(encode_question(self.tokenizer, prepared.context, text, empty=True)[0])
        is_valid = partial(_are_targets, asked=asked, model=self.model, record=self.teacher.record)

        def compute_targets() -> Tensors:
            return _pack_targets(self.teacher.make_targets(prepared, example))

        entry = self.store.load_or_compute("teacher", key, is_valid, compute_targets)
        return _unpack_targets(entry, len(example.questions), self.model.device)


def _score_context(
    eviction: Eviction, model: PreTrainedModel, tokenizer: Tokenizer, context: Context
) -> ScoredContext:
    """Prefill and score a context."""
    prepared = eviction.prepare(model, tokenizer, context)
    assert isinstance(prepared, ScoredContext), "training does not stream"
    return prepared


def describe_teacher(model: PreTrainedModel, tokenizer: Tokenizer) -> dict[str, object]:
    """Return what prefill, scores and answers depend on, except the text."""
    settings = model.config.get_text_config().to_diff_dict()
    # An origin, such as a path, does not decide what the model computes.
    config = {
        key: value for key, value in settings.items() if key.strip("_") not in IRRELEVANT_SETTINGS
    }
    identity = identify_model(model, tokenizer)
    return {
        "model": identity.fingerprint,
        "dtype": str(model.dtype),
        "rope": identity.rope,
        "config": hashlib.sha256(
            json.dumps(config, sort_keys=True, default=str).encode()
        ).hexdigest()[:16],
        "template": identity.template,
        "tokenizer": hash_tokenizer(tokenizer),
        "stops": sorted(get_stop_ids(model, tokenizer)),
    }


def hash_ids(ids: Tensor) -> str:
    """Return the hash of a context's ids, chat prefix included."""
    return hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()


def _pack_cache(full: Cache) -> Tensors:
    """Return keys and values of every layer, (1, H, S + T, D) each; of layers with a window, the
    last W - 1 columns, and of layers with states the states.
    """
    tensors = {}
    for index, layer in enumerate(list_dense_layers(full)):
        if isinstance(layer, PairlessLayer):
            for name, state in layer.named_tensors.items():
                tensors[f"states.{index}.{name}"] = state
            continue
        keys, values = layer.keys, layer.values
        if isinstance(layer, RecentLayer):
            end = layer.get_seq_length()
            keys, values = layer.take_columns(max(end - layer.window + 1, 0), end)
        tensors[f"keys.{index}"] = keys
        # Those of latent attention are one tensor.
        if values is not keys:
            tensors[f"values.{index}"] = values
    return tensors


def _unpack_cache(model: PreTrainedModel, tensors: Tensors, positions: int) -> DynamicCache:
    """Return the cache of S + T positions whose keys, values and states `_pack_cache` packed."""
    full = make_full_cache(model)
    for index in find_state_layers(model.config):
        prefix = f"states.{index}."
        states = {}
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                states[name.removeprefix(prefix)] = tensor.to(model.device)
        full.layers[index] = StateLayer.from_tensors(states)
    pairless = find_pairless_layers(model.config)
    for index in range(len(list_windows(model.config))):
        if index in pairless:
            continue
        keys = tensors[f"keys.{index}"].to(model.device)
        values = keys
        if not is_latent_config(model.config):
            values = tensors[f"values.{index}"].to(model.device)
        full.update(keys, values, index)
    for layer in list_dense_layers(full):
        if isinstance(layer, RecentLayer):
            # `update` has cut off earlier columns, so those held are the last ones of the text.
            assert layer.keys is not None, "filled above"
            layer.first = positions - layer.keys.shape[-2]
    return full


def _pack_targets(targets: list[TeacherTarget]) -> Tensors:
    """Return the tensors of all targets, the names of each beginning with its number."""
    tensors = {}
    for number, target in enumerate(targets):
        tensors[f"{number}.row"] = target.ids.int()
        tensors[f"{number}.answer"] = torch.tensor(target.answer_length)
        tensors[f"{number}.hidden"] = target.hidden
        for name, state in target.states.items():
            tensors[f"{number}.state.{name}"] = state
    return tensors


def _are_targets(
    tensors: Tensors, asked: Sequence[Tensor], model: PreTrainedModel, record: Sequence[str]
) -> bool:
    """Return whether these are this model's targets for the questions whose ids are `asked`."""
    shape = CacheShape.from_model(model)
    sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.num_embeddings
    missing = torch.tensor(0)
    for number, question in enumerate(asked):
        row = tensors.get(f"{number}.row", missing)
        answer = tensors.get(f"{number}.answer", missing)
        if answer.shape != () or answer.dtype != torch.int64:
            return False
        # At least one token of the answer, and one of the question before it.
        tokens = int(answer)
        if row.ndim != 1 or not 1 <= tokens < len(row) or row.min() < 0 or row.max() >= vocabulary:
            return False
        # A different question of the same length would give other targets.
        if not torch.equal(row[:-tokens].long(), question):
            return False
        sizes[f"{number}.row"] = (torch.int32, (len(row),))
        sizes[f"{number}.answer"] = (torch.int64, ())
        sizes[f"{number}.hidden"] = (model.dtype, (tokens, shape.hidden))
        for name in record:
            layers = model.config.get_text_config().num_hidden_layers
            if name == ATTENTION:
                layers = len(list_attention_modules(model))
            state_size = (model.dtype, (layers, tokens, shape.hidden))
            sizes[f"{number}.state.{name}"] = state_size
    return seal.has_sizes(tensors, sizes)


def _unpack_targets(tensors: Tensors, count: int, device: torch.device) -> list[TeacherTarget]:
    """Return the targets that `_pack_targets` packed, on a device."""
    targets = []
    for number in range(count):
        states = {}
        prefix = f"{number}.state."
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                states[name.removeprefix(prefix)] = tensor.to(device)
        target = TeacherTarget(
            ids=tensors[f"{number}.row"].long(),
            answer_length=int(tensors[f"{number}.answer"]),
            hidden=tensors[f"{number}.hidden"].to(device),
            states=states,
        )
        targets.append(target)
    return targets
