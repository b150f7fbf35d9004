"""The restore pass (Eqs. 4-6): n learned tokens read the full cache once, and their pairs join what
eviction keeps.

    C_restore = KV(E; theta + LoRA, C_full)

at positions S+T .. S+T+n-1, causally, before anything is dropped (with restore_from="evicted", over
what eviction has left). An adapter that knows the ratio moves E with it.

Only this pass uses LoRA. It runs through `adapted_model`, a second set of modules with PEFT's
layers that shares the model's weights; the model itself is never changed. (PEFT's own switch would
also set requires_grad, and a backward pass after switching off would find no LoRA gradient.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from restorekv.cache.states import PairlessLayer, clone_saved_states
from restorekv.cache.tail import CompressedLayer
from restorekv.errors import AdapterError, warn
from restorekv.model import base_weights
from restorekv.model.attention import install_attention
from restorekv.model.cache_argument import pass_cache
from restorekv.model.embeddings_argument import pass_embeddings
from restorekv.model.identity import ModelIdentity, identify_model
from restorekv.model.names import NAMES as MODEL_NAMES
from restorekv.model.names import get_model_name, to_hub_id
from restorekv.model.prefill import skip_sharing_layers
from restorekv.model.shape import get_backbone, get_dtype_name
from restorekv.model.support import refuse_beyond_exact
from restorekv.restore import adapter_file, publish
from restorekv.restore.adapter_file import AdapterCard, StoredAdapter, to_plain_json
from restorekv.restore.choices import LARGEST_ALPHA, LINEAR_LAYERS
from restorekv.restore.hub import fetch_adapter, recognize_copy
from restorekv.restore.licenses import inherit_license, normalize_license
from restorekv.restore.lora import (
    LORA_A,
    LORA_B,
    attach_lora,
    check_lora_fit,
    extend_rank,
    list_own_modules,
    pad_rank,
    refuse_other_adapters,
)
from restorekv.restore.lora import NAME as LORA_NAME
from restorekv.restore.use_warnings import warn_of_other_use

# The ratio at which ratio vectors add nothing to the embeddings.
REFERENCE_RATIO = 0.1


class RestoreAdapter(nn.Module):
    """Learned restore embeddings (n, d) and a LoRA for every target layer, all float32.

    An adapter that knows the ratio also has `ratio_vectors` (n, d): the restore pass for a ratio r
    reads embeddings + ln(r / 0.1) * ratio_vectors. At small ratios much was evicted, so the restore
    pairs must replace it. At large ratios almost everything is kept, so they should add little.

    Everything is trainable, except embeddings created with `fixed`. An adapter works only with the
    `model` object that it was made for. Several adapters of one model do not disturb each other.
    """

    embeddings: nn.Parameter
    ratio_vectors: nn.Parameter | None

    def __init__(
        self,
        model: PreTrainedModel,
        config: LoraConfig,
        embeddings: Tensor,
        card: AdapterCard,
        ratio_vectors: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(
            embeddings.to(model.device, torch.float32),
            requires_grad=card.embeddings == "learned",
        )
        self.ratio_vectors = None
        if ratio_vectors is not None:
            self.ratio_vectors = nn.Parameter(ratio_vectors.to(model.device, torch.float32))
        self.lora_config = config
        self.card = card
        adapted, layers = attach_lora(model, config)
        self.lora_parameters: dict[str, nn.Parameter] = {}
        for path, layer in layers.items():
            self.lora_parameters[path + LORA_A] = layer.lora_A[LORA_NAME].weight
            self.lora_parameters[path + LORA_B] = layer.lora_B[LORA_NAME].weight
        self.lora = nn.ParameterList(self.lora_parameters.values())
        # In a tuple, so that nn.Module does not register both as submodules.
        self._models = (model, adapted)
        # What the adapted model was copied from; see `is_current`.
        self._own_modules = list_own_modules(model)
        # The folder that it was loaded from. Its README.md may name a license, which is looked up
        # when the adapter is trained further, saved or published.
        self._folder: Path | None = None

    @classmethod
    def create(
        cls,
        model: PreTrainedModel,
        n: int = 8,
        *,
        rank: int = 8,
        alpha: float = 16.0,
        targets: Sequence[str] = LINEAR_LAYERS,
        seed: int = 0,
        fixed: int | None = None,
    ) -> RestoreAdapter:
        """Return an untrained adapter: embeddings of n random tokens of the vocabulary, and LoRA
        that adds zero.

        Args:
            model: The model that it is for.
            n: The number of restore tokens.
            rank: The rank of LoRA.
            alpha: LoRA's alpha, its scale times the rank.
            targets: The names of the layers with LoRA; without any (a control), there is none.
            seed: The seed of the random tokens.
            fixed: A token id. All n restore tokens use its embedding, which is not trained (a
                control of the paper). None draws random tokens and trains their embeddings.

        Raises:
            AdapterError: Nothing would be left to train, or the model lacks such layers or such a
                token.
        """
        if type(n) is not int or type(rank) is not int or n < 1 or rank < 1:
            raise AdapterError(
                f"A restore adapter needs at least one token and rank 1, not {n!r} and {rank!r}."
            )
        if isinstance(targets, str):  # its letters would be names
            targets = [targets]
        if fixed is not None and not targets:
            raise AdapterError(
                "Fixed embeddings without LoRA leave nothing to train; name LoRA targets or learn "
                "the embeddings."
            )
        if not 0 <= alpha <= LARGEST_ALPHA:
            raise AdapterError(f"alpha must be from 0 to {LARGEST_ALPHA:,.0f}, not {alpha:g}.")
        config = LoraConfig(
            r=rank,
            # PEFT declares an integer and scales by any number.
            lora_alpha=alpha,  # type: ignore[arg-type]
            target_modules=sorted(targets),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=to_hub_id(get_model_name(model)),
            inference_mode=True,
        )
        card = replace(
            make_card(n, identify_model(model)),
            embeddings="learned" if fixed is None else "fixed",
        )
        # The layer and not its matrix: Gemma's scales what it looks up.
        layer: Any = model.get_input_embeddings()
        weight = layer.weight
        if fixed is not None and not 0 <= fixed < len(weight):
            raise AdapterError(
                f"The fixed token {fixed} is not one of the model's, which go from 0 to "
                f"{len(weight) - 1}."
            )
        # The caller's random state does not change.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            if fixed is None:
                embeddings = _draw_embeddings(layer, n)
            else:
                embeddings = layer(torch.full((n,), fixed, device=weight.device))
            adapter = cls(model, config, embeddings, card)
        adapter._refuse_unused_targets()
        return adapter

    @classmethod
    def from_pretrained(
        cls,
        model: PreTrainedModel,
        name: str | Path,
        evictor: str | None = None,
        *,
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | Path | None = None,
        identity: ModelIdentity | None = None,
    ) -> RestoreAdapter:
        """Load an adapter.

        Warn if it was trained on other weights of this model, or for an evictor other than
        `evictor`. Its license is looked up when it is trained further, saved or published.

        Args:
            model: The model that it was trained for.
            name: A folder or a hub id.
            evictor: The spec of the evictor that it will be used with.
            revision: A revision of the hub's repository.
            token: For a private repository.
            cache_dir: Where the hub's client keeps the files; its own cache unless given.
            identity: The model's identity, if it is already known.

        Raises:
            AdapterError: The adapter is missing, damaged or for a different model.
        """
        identity = identity or identify_model(model)
        folder = fetch_adapter(name, revision, token, cache_dir, identity)
        stored = adapter_file.read_adapter(folder)
        n, hidden = stored.embeddings.shape
        model_hidden = identity.shape.hidden
        # A model of a different width cannot be this one, whatever the card says.
        if hidden != model_hidden:
            raise AdapterError(
                f"The adapter {name} is for a model of width {hidden}, this one has "
                f"{model_hidden}; load the model that it was trained for."
            )
        card = stored.card
        if card is None:
            # An adapter that a different program wrote has no record; a published one is known.
            card = recognize_copy(make_card(n, identity), name, folder)
        else:
            base_weights.check_base(f"adapter {name}", card, identity, AdapterError)
        check_lora_fit(name, model, stored.lora)
        adapter = cls(model, stored.config, stored.embeddings, card, stored.ratio_vectors)
        adapter.load_lora(name, stored.lora)
        adapter._folder = folder
        if evictor is not None:
            warn_of_other_use(adapter.card, evictor)
        return adapter

    @property
    def restore_tokens(self) -> int:
        """The number n of restore tokens."""
        return self.embeddings.shape[0]

    @property
    def knows_ratio(self) -> bool:
        """Whether the restore pass depends on the ratio, so that each ratio needs its own pass."""
        return self.ratio_vectors is not None

    @property
    def model(self) -> PreTrainedModel:
        return self._models[0]

    @property
    def adapted_model(self) -> PreTrainedModel:
        """The model with LoRA in it: separate modules over the same weights."""
        return self._models[1]

    @property
    def is_current(self) -> bool:
        """Whether the model still has the modules that it had when the adapter was made. The
        adapted model has others for them, which would not change with the model's.
        """
        is_copy = self.adapted_model is not self.model
        return not is_copy or list_own_modules(self.model) == self._own_modules

    def truncate(self, count: int) -> RestoreAdapter:
        """Return an adapter with only the first `count` restore tokens.

        Warns unless it was trained nested, that is, to work with fewer of its tokens.
        """
        if type(count) is not int or not 1 <= count <= self.restore_tokens:
            raise AdapterError(
                f"restore_tokens must be from 1 to {self.restore_tokens}, the adapter's number of "
                f"restore tokens, not {count!r}."
            )
        if count == self.restore_tokens:
            return self
        if not (self.card.settings or {}).get("nested"):
            warn(
                f"The adapter was not trained to work with {count} of its {self.restore_tokens} "
                "restore tokens (train it with --nested); expect worse answers."
            )
        # The results were measured with all of the tokens.
        card = replace(self.card, restore_tokens=count, results=None)
        # The same LoRA: the restore pass is causal, so the first tokens do not see the others.
        return self._copy_with_tokens(torch.arange(count), card)

    def extend(self, count: int, rank: int | None = None, seed: int = 0) -> RestoreAdapter:
        """Return an adapter to train further, with more restore tokens or a LoRA of higher rank.

        The first n of its `count` tokens are this adapter's. New token i starts as a copy of token
        i mod n. Its pairs differ all the same, because it is at a later position and sees those
        before it, so training can move the two apart. The first n do not see the others (the pass
        is causal): truncated to n, it is this adapter again until it is trained.

        A higher rank changes no output before training: the new rows of A are random, the new
        columns of B zero, and alpha grows with the rank, so that the scale stays.

        Settings and measurements of this adapter say nothing about the result, so its record has
        none. Data and license stay, since they are those of the adapter that it began with.

        Args:
            count: The number of restore tokens, at least this adapter's n.
            rank: The rank of LoRA, at least this adapter's, which is the default.
            seed: The seed of the new rows.

        Raises:
            AdapterError: `count` or `rank` is lower than the adapter's, or a higher rank is asked
                for and its layers have ranks or scales of their own.
        """
        n = self.restore_tokens
        if type(count) is not int or count < n:
            raise AdapterError(
                f"An adapter of {n} restore tokens cannot be extended to {count!r}; pass {n} or "
                "more."
            )
        config = self.lora_config
        if rank is not None and rank != config.r:
            config = extend_rank(config, rank)
        if count == n and config is self.lora_config:
            return self
        # A copy of a published adapter gets its license by its source, which is removed below.
        self._look_up_license()
        card = replace(
            self.card,
            restore_tokens=count,
            source=None,
            settings=None,
            results=None,
            helps_up_to=None,
            also_for=None,
            helps_from=None,
        )
        return self._copy_with_tokens(torch.arange(count) % n, card, config, seed)

    def _copy_with_tokens(
        self, source: Tensor, card: AdapterCard, config: LoraConfig | None = None, seed: int = 0
    ) -> RestoreAdapter:
        """Return an adapter with the same LoRA; its token i is a copy of token `source[i]`.

        Args:
            source: The copied token of each of its tokens, by index.
            card: Its record.
            config: The config of its LoRA, of this adapter's rank or a higher one; this adapter's
                by default.
            seed: The seed of the rows that a higher rank adds.
        """
        source = source.to(self.embeddings.device)
        embeddings = self.embeddings.detach()[source].clone()
        vectors = None
        if self.ratio_vectors is not None:
            vectors = self.ratio_vectors.detach()[source].clone()
        # The caller's random state does not change.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            other = type(self)(self.model, config or self.lora_config, embeddings, card, vectors)
        lora = {}
        for name, value in self.lora_parameters.items():
            lora[name] = pad_rank(name, value.detach(), other.lora_parameters[name].detach())
        other.load_lora(card.model, lora)
        other._folder = self._folder
        return other

    def add_ratio_vectors(self) -> None:
        """Add zero ratio vectors, so that training can make the pass depend on the ratio."""
        if self.ratio_vectors is None:
            self.ratio_vectors = nn.Parameter(torch.zeros_like(self.embeddings))

    def make_inputs(self, ratio: float | Fraction | None = None) -> Tensor:
        """Return the input embeddings of the restore tokens at a ratio, (n, d) float32."""
        if self.ratio_vectors is None:
            return self.embeddings
        if ratio is None:
            raise AdapterError("The adapter's restore pass depends on the ratio; pass ratio=...")
        return self.embeddings + math.log(float(ratio) / REFERENCE_RATIO) * self.ratio_vectors

    def run_restore_pass(
        self, cache: Cache, count: int | None = None, ratio: float | Fraction | None = None
    ) -> None:
        """Run the restore tokens over a cache, which grows by their pairs.

        Gradients reach the embeddings and LoRA.

        Args:
            cache: An evicted cache, or a view of the full cache of S + T columns. The pairs of the
                restore tokens are appended to it; the full cache that a view shows is not changed.
                Nor are the states of layers that keep them: the tokens read them, and questions
                continue from where the text ended.
            count: How many of the n restore tokens run, the first ones; all by default.
            ratio: The ratio of the cache that the pairs are for. An adapter that knows the ratio
                needs it.

        Raises:
            AdapterError: The model was given adapters of PEFT or other modules after this one was
                made, or `ratio` is missing.
        """
        # The model's PEFT layers and its attention may have changed since the adapter was made.
        refuse_other_adapters(self.model)
        if not self.is_current:
            raise AdapterError(
                "Modules of the model were replaced after the adapter was made for it, and the "
                "adapter would run the old ones; load the adapter again."
            )
        if any(isinstance(layer, CompressedLayer) for layer in cache.layers):
            # No other attention can read such a layer.
            install_attention(self.model)
        # The restore tokens come right after everything that was read.
        first = cache.get_seq_length()
        embeddings = self.make_inputs(ratio)[:count].to(self.model.dtype)
        refuse_beyond_exact(self.model, first + len(embeddings), "The text with its restore tokens")
        positions = torch.arange(first, first + len(embeddings), device=embeddings.device)
        # The model with LoRA runs; its pairs are appended by the cache's own `update`.
        backbone = get_backbone(self.adapted_model)
        layers: list[Any] = []
        for layer in cache.layers:
            layers.append(layer.copy() if isinstance(layer, PairlessLayer) else layer)
        with clone_saved_states(layers):
            backbone(
                position_ids=positions[None],
                **pass_embeddings(backbone, embeddings[None]),
                **pass_cache(backbone, Cache(layers=layers)),
                **skip_sharing_layers(backbone),
                use_cache=True,
            )

    def record_training(
        self,
        *,
        evictor: str,
        prefix_policy: str | None = None,
        ratio_range: tuple[float, float] | None = None,
        allocation: str = "global",
        restore_from: str = "full",
        settings: dict | None = None,
        data: list[dict] | None = None,
        license: str | None = None,
        separator: str | None = None,
    ) -> None:
        """Record what the adapter was trained with, and the weights of its model.

        Warn if its license, or one of its data's, forbids commercial use.

        Args:
            evictor: The spec of the evictor, or several with commas between.
            prefix_policy: "free" or "counted".
            ratio_range: The smallest and the largest ratio.
            allocation: The spec of the allocation: which pairs competed with which.
            restore_from: Which cache the restore pass read, "full" or "evicted".
            settings: The settings of the training.
            data: One row for each source.
            license: The license by the hub's name; unless given, it is inherited from the data, the
                base model and the adapter that training began with.
            separator: The text between document and question.
        """
        self._look_up_license()
        trained_on = make_card(self.restore_tokens, identify_model(self.model))
        data = to_plain_json(data)
        if license is None:
            license = inherit_license(self.card, data)
        else:
            license = normalize_license(license)
        self.card = replace(
            self.card,
            model=trained_on.model,
            fingerprint=trained_on.fingerprint,
            local=trained_on.local,
            weights=trained_on.weights,
            evictor=evictor,
            prefix_policy=prefix_policy,
            ratio_range=ratio_range,
            allocation=allocation,
            restore_from=restore_from,
            settings=to_plain_json(settings),
            data=data,
            separator=separator,
            license=license,
            # The old values belonged to the adapter that training started from.
            source=None,
            results=None,
            helps_up_to=None,
            also_for=None,
            helps_from=None,
        )
        publish.warn_if_noncommercial(self.card)

    def record_results(
        self,
        results: list[dict],
        helps_up_to: float | None = None,
        also_for: Sequence[str] | None = None,
        helps_from: Mapping[str, float] | None = None,
    ) -> None:
        """Record measurements for the model card, all of them on texts kept out of training.

        Args:
            results: Rows with benchmark, ratio, base, restored, full and more.
            helps_up_to: The highest ratio at which restoring did no harm; "auto" restores nothing
                above it. None keeps what the card says.
            also_for: Specs of other evictors whose caches the adapter restores about as well as one
                of their own; they use it without a warning. None keeps what the card says.
            helps_from: For evictors of `also_for` that restoring harmed at low ratios: the lowest
                ratio at which it did no harm; "auto" restores nothing below it. None keeps what the
                card says.
        """
        if helps_up_to is None:
            helps_up_to = self.card.helps_up_to
        other_evictors = self.card.also_for
        if also_for is not None:
            other_evictors = list(also_for)
        lowest_ratios = self.card.helps_from
        if helps_from is not None:
            lowest_ratios = dict(helps_from) or None
        self.card = replace(
            self.card,
            results=to_plain_json(results),
            helps_up_to=helps_up_to,
            also_for=other_evictors,
            helps_from=lowest_ratios,
        )

    def trainable_state(self) -> dict[str, Tensor]:
        """Return copies of everything that training changes, by name."""
        return {name: value.detach().clone() for name, value in self._get_trainable().items()}

    def load_trainable_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `trainable_state` returned."""
        with torch.no_grad():
            for name, parameter in self._get_trainable().items():
                parameter.copy_(state[name])

    def identity(self) -> dict[str, object]:
        """Return plain JSON for records: a hash of all weights, n, and the evictor and the settings
        of eviction that the adapter was trained with.
        """
        identity = {
            "hash": self.to_stored().weights_hash(),
            "restore_tokens": self.restore_tokens,
            "evictor": self.card.evictor,
            "prefix_policy": self.card.prefix_policy,
            "ratio_range": self.card.ratio_range,
            "allocation": self.card.allocation,
            "restore_from": self.card.restore_from,
        }
        return to_plain_json(identity)

    def to_stored(self, dtype: torch.dtype = torch.float32) -> StoredAdapter:
        """Return the adapter as its files hold it, with LoRA weights of `dtype`."""
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise AdapterError(
                f"LoRA weights cannot be saved as {dtype!r}; pass torch.float32, torch.bfloat16 or "
                "torch.float16."
            )
        lora = {
            name: value.detach().to("cpu", dtype) for name, value in self.lora_parameters.items()
        }
        dtype_name = get_dtype_name(dtype)
        card = adapter_file.change_lora_dtype(self.card, dtype_name)
        card = replace(card, knows_ratio=self.knows_ratio)
        vectors = None
        if self.ratio_vectors is not None:
            vectors = self.ratio_vectors.detach().cpu()
        return StoredAdapter(self.lora_config, lora, self.embeddings.detach().cpu(), card, vectors)

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the published format, `restorekv.json` and a model card, with LoRA weights of
        `dtype`.
        """
        self._look_up_license()
        publish.save_adapter(Path(folder), self.to_stored(dtype))

    def push_to_hub(
        self,
        repo: str,
        *,
        private: bool = False,
        token: str | None = None,
        dtype: torch.dtype = torch.float32,
        license: str | None = None,
        commit_message: str | None = None,
    ) -> str:
        """Publish what `save_pretrained` writes as the hub's repository `repo`.

        Args:
            repo: The name of the repository, OWNER/NAME.
            private: Whether only the owner may see the repository.
            token: A token for the hub; the one of `hf auth login` unless given.
            dtype: The dtype of the LoRA weights in the file.
            license: The license by the hub's name; the recorded one unless given.
            commit_message: The message of the commit.

        Returns:
            The address of the commit.

        Raises:
            AdapterError: The hub refuses or cannot be reached, or the license allows more than the
                recorded one.
        """
        self._look_up_license()
        return publish.push_adapter(
            repo,
            self.to_stored(dtype),
            private=private,
            token=token,
            license=license,
            commit_message=commit_message,
        )

    def load_lora(self, name: str | Path, lora: dict[str, Tensor]) -> None:
        """Copy the LoRA tensors of a file; each one must be there and fit."""
        for key in sorted(lora.keys() | self.lora_parameters.keys()):
            is_in_both = key in lora and key in self.lora_parameters
            if not is_in_both or lora[key].shape != self.lora_parameters[key].shape:
                raise AdapterError(
                    f"The adapter {name} does not fit this model or its own config (see {key})."
                )
        with torch.no_grad():
            for key, parameter in self.lora_parameters.items():
                parameter.copy_(lora[key])

    def _get_trainable(self) -> dict[str, nn.Parameter]:
        """Return what training changes, by name."""
        trainable = {"embeddings": self.embeddings, **self.lora_parameters}
        if self.ratio_vectors is not None:
            trainable["ratio_vectors"] = self.ratio_vectors
        return trainable

    def _refuse_unused_targets(self) -> None:
        """Refuse LoRA on a layer that the restore pass does not run, such as the LM head: training
        would never change it.
        """
        running = set(get_backbone(self.model).modules())
        for name in self.lora_parameters:
            path = name.rsplit(".", 2)[0]
            if self.model.get_submodule(path) not in running:
                raise AdapterError(
                    f"The restore pass does not run {path!r}; name linear layers before it as LoRA "
                    "targets."
                )

    def _look_up_license(self) -> None:
        """Add to the card a license that the adapter's files name; see `publish.add_license`."""
        if self._folder is not None:
            self.card = publish.add_license(self.card, self._folder)
            self._folder = None


def _draw_embeddings(layer: nn.Module, n: int) -> Tensor:
    """Return the embeddings (n, d) of n tokens drawn from the vocabulary.

    A token whose embedding is all zeros, as that of padding may be, is replaced by the next one
    that has another: Gemma 3n divides by the length of an embedding, which has no gradient at 0.
    """
    table: Any = layer.weight
    tokens = torch.randint(len(table), (n,)).to(table.device)
    embeddings = layer(tokens)
    for _ in range(len(table)):
        is_zero = ~embeddings.any(-1)
        if not is_zero.any():
            break
        tokens = torch.where(is_zero, (tokens + 1) % len(table), tokens)
        embeddings = layer(tokens)
    return embeddings


def make_card(n: int, identity: ModelIdentity) -> AdapterCard:
    """Return the card of an untrained adapter with n restore tokens for the model of `identity`."""
    is_local = identity.name not in MODEL_NAMES and Path(identity.name).exists()
    base = base_weights.describe_base(identity)
    return AdapterCard(restore_tokens=n, local=is_local, **base)
