"""The restore pass (Eqs. 4-6): n learned tokens read the full cache once, and their pairs join what
eviction keeps.

    C_restore = KV(E; theta + LoRA, C_full)     at positions T+1 .. T+n, causally, before anything is dropped

LoRA belongs to this pass alone, which runs through a twin of the model: PEFT's layers are in the
twin's modules, the weights are the model's own, and the model *is* the frozen model. (PEFT's own
switch would also set requires_grad, and a backward pass after switching off would find no LoRA
gradient.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from restorekv.errors import AdapterError, make_printable, warn
from restorekv.model import base_weights
from restorekv.model.identity import ModelIdentity
from restorekv.model.names import NAMES, get_model_name, to_hub_id
from restorekv.model.shape import CacheShape, get_backbone
from restorekv.model.support import refuse_beyond
from restorekv.restore import adapter_file, publish
from restorekv.restore.adapter_file import AdapterCard, StoredAdapter, to_plain_json
from restorekv.restore.lora import NAME, attach_lora, check_lora_fit
from restorekv.restore.model_card import inherit_license, normalize_license
from restorekv.spec import split_specs

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class RestoreAdapter(nn.Module):
    """`embeddings` (n, d) and the LoRA of every target layer, float32, trainable unless fixed;
    nothing else.

    It works on the one `model` that it was made for. Several adapters of one model do not disturb
    each other.
    """

    embeddings: nn.Parameter

    def __init__(
        self, model: PreTrainedModel, config: LoraConfig, embeddings: Tensor, card: AdapterCard
    ) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(
            embeddings.to(model.device, torch.float32), card.embeddings == "learned"
        )
        self.config = config
        self.card = card
        adapted, layers = attach_lora(model, config)
        self.tensors = {
            f"{path}.{part}.weight": getattr(layer, part)[NAME].weight
            for path, layer in layers.items()
            for part in ("lora_A", "lora_B")
        }
        self.lora = nn.ParameterList(self.tensors.values())
        # In a tuple, because attributes would make both a part of this module.
        self._models = (model, adapted)

    @classmethod
    def create(
        cls,
        model: PreTrainedModel,
        n: int = 8,
        *,
        rank: int = 8,
        alpha: float = 16.0,
        targets: Sequence[str] = TARGETS,
        seed: int = 0,
        fixed: int | None = None,
    ) -> RestoreAdapter:
        """Returns an untrained adapter: embeddings of n random tokens of the vocabulary, and LoRA
        that adds zero.

        Controls of the paper: with `fixed`, all n embeddings are that token's and are never
        trained; with no `targets` there is no LoRA.
        """
        if n < 1 or rank < 1:
            raise AdapterError(
                f"A restore adapter needs at least one token and rank 1, not {n} and {rank}."
            )
        if fixed is not None and not targets:
            raise AdapterError(
                "Fixed embeddings without LoRA leave nothing to train; give LoRA targets or learn them."
            )
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=sorted(targets),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=to_hub_id(get_model_name(model)),
            inference_mode=True,
        )
        # Itself and not its matrix: Gemma's scales what it looks up.
        layer = model.get_input_embeddings()
        card = replace(make_card(model, n), embeddings="learned" if fixed is None else "fixed")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            rows = (
                torch.randint(len(layer.weight), (n,)) if fixed is None else torch.full((n,), fixed)
            )
            return cls(model, config, layer(rows.to(layer.weight.device)), card)

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
        """Loads an adapter from a folder or, at a `revision`, a hub id; refuses an adapter of
        another model.

        Warns if it was trained on other weights of this model or with another evictor than
        `evictor`, and of a license that forbids commercial use.
        """
        folder = publish.fetch_adapter(name, revision, token, cache_dir)
        stored = adapter_file.read_adapter(folder)
        n, hidden = stored.embeddings.shape
        if hidden != CacheShape.from_model(model).hidden:
            raise AdapterError(
                f"The adapter {name} is for a model of width {hidden}, this one has {CacheShape.from_model(model).hidden}; "
                "load the model that it was trained for."
            )
        if stored.card is not None:
            base_weights.check_base(
                f"adapter {name}", stored.card, model, AdapterError, identity=identity
            )
        card = publish.with_origin(
            stored.card or make_card(model, n), name, folder, bare=stored.card is None
        )
        check_lora_fit(name, model, stored.lora)
        adapter = cls(model, stored.config, stored.embeddings, card)
        adapter.load_lora(name, stored.lora)
        publish.warn_of_license(name, card)
        if evictor is not None:
            adapter.warn_of_other_use(evictor)
        return adapter

    @property
    def restore_tokens(self) -> int:
        """Returns n."""
        return self.embeddings.shape[0]

    @property
    def model(self) -> PreTrainedModel:
        return self._models[0]

    @property
    def adapted_model(self) -> PreTrainedModel:
        """The model with LoRA in it: modules of its own over the model's weights."""
        return self._models[1]

    def first(self, count: int) -> RestoreAdapter:
        """Returns an adapter of the first `count` tokens; warns unless they were trained to work
        alone.
        """
        if not 1 <= count <= self.restore_tokens:
            raise AdapterError(
                f"restore_tokens is a number from 1 to the adapter's {self.restore_tokens}, not {count}."
            )
        if count == self.restore_tokens:
            return self
        if not (self.card.settings or {}).get("nested"):
            message = f"The adapter was not trained to work with {count} of its {self.restore_tokens} restore tokens"
            warn(f"{message} (train it with --nested); expect worse answers.")
        card = replace(self.card, restore_tokens=count)
        embeddings = self.embeddings.detach()[:count].clone()
        short = type(self)(self.model, self.config, embeddings, card)
        short.load_lora(card.model, {name: value.detach() for name, value in self.tensors.items()})
        return short

    def append(self, full: Cache, count: int | None = None) -> None:
        """Runs the n tokens, or the first `count`, over `full`, which grows by their pairs.

        `full` is a dense cache of S + T columns or an evicted one. Gradients reach E and LoRA.
        """
        first = full.get_seq_length()
        embeddings = self.embeddings[:count].to(self.model.dtype)
        refuse_beyond(self.model, first + len(embeddings), "The text with its restore tokens")
        positions = torch.arange(first, first + len(embeddings), device=embeddings.device)
        get_backbone(self.adapted_model)(
            inputs_embeds=embeddings[None],
            position_ids=positions[None],
            past_key_values=full,
            use_cache=True,
        )

    def describe(
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
        between: str | None = None,
    ) -> None:
        """Records what the adapter is being trained with, the model's weights included.

        The license, unless given, is passed on from the data and from an adapter that was
        non-commercial before. `between` is the text between document and question.
        """
        own = make_card(self.model, self.restore_tokens)
        data = to_plain_json(data)
        self.card = replace(
            self.card,
            model=own.model,
            fingerprint=own.fingerprint,
            local=own.local,
            weights=own.weights,
            evictor=evictor,
            prefix_policy=prefix_policy,
            ratio_range=ratio_range,
            allocation=allocation,
            restore_from=restore_from,
            settings=to_plain_json(settings),
            data=data,
            between=between,
            license=inherit_license(self.card, data)
            if license is None
            else normalize_license(license),
        )

    def report(self, results: list[dict]) -> None:
        """Records measurements for the model card: rows with benchmark, ratio, base, restored, full
        and more.
        """
        self.card = replace(self.card, results=to_plain_json(results))

    def warn_of_other_use(
        self,
        evictor: str,
        allocation: str | None = None,
        restore_from: str | None = None,
        prefix_policy: str | None = None,
        between: str | None = None,
    ) -> None:
        """Warns of a use other than the training's: an adapter restores what its own eviction
        loses.
        """
        card = self.card
        messages = []
        # Kvpress counts the prefix, the authors' code does not.
        if card.source is not None and prefix_policy == "free":
            messages.append(
                f"{card.source} is used in kvpress with the chat prefix in the budget (prefix_policy='counted'); "
                "its authors do not state how it was trained."
            )
        for what, trained, used in (
            (
                "evictor",
                evictor if evictor in split_specs(card.evictor or "") else card.evictor,
                evictor,
            ),
            ("allocation", card.allocation, allocation),
            ("restore pass over the cache", card.restore_from, restore_from),
            ("prefix policy", card.prefix_policy, prefix_policy),
            ("text between document and question", card.between, between),
        ):
            if card.evictor and None not in (trained, used) and trained != used:
                before, now = (
                    make_printable(text) if text else repr(text) for text in (trained, used)
                )
                messages.append(
                    f"The adapter was trained with the {what} {before}, not {now}; expect worse answers."
                )
        for message in messages:
            warn(message)

    def trainable_state(self) -> dict[str, Tensor]:
        """Returns copies of everything that training changes, by name."""
        return {name: value.detach().clone() for name, value in self._trainable().items()}

    def load_trainable_state(self, state: dict[str, Tensor]) -> None:
        """Restores what `trainable_state` returned."""
        with torch.no_grad():
            for name, parameter in self._trainable().items():
                parameter.copy_(state[name])

    def identity(self) -> dict[str, object]:
        """Returns plain JSON for records: a hash of embeddings and LoRA, n, and the conventions of
        the training.
        """
        conventions = ("evictor", "prefix_policy", "ratio_range", "allocation", "restore_from")
        identity = {"hash": self.to_stored().weights_hash(), "restore_tokens": self.restore_tokens}
        return identity | to_plain_json({key: getattr(self.card, key) for key in conventions})

    def to_stored(self, dtype: torch.dtype = torch.float32) -> StoredAdapter:
        """Returns what a file holds; `dtype` is that of the LoRA weights in it."""
        lora = {name: value.detach().to("cpu", dtype) for name, value in self.tensors.items()}
        card = replace(self.card, dtype=str(dtype).removeprefix("torch."))
        return StoredAdapter(self.config, lora, self.embeddings.detach().cpu(), card)

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Writes the published format, `restorekv.json` and a model card, with LoRA weights of
        `dtype`.
        """
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
        """Publishes what `save_pretrained` writes as the hub's repository `repo`; returns its
        address.
        """
        options = {
            "private": private,
            "token": token,
            "license": license,
            "commit_message": commit_message,
        }
        return publish.push_adapter(repo, self.to_stored(dtype), **options)

    def load_lora(self, name: str | Path, lora: dict[str, Tensor]) -> None:
        """Copies the LoRA tensors of a file; each one must be there and fit."""
        for key in sorted(lora.keys() | self.tensors.keys()):
            if (
                key not in lora
                or key not in self.tensors
                or lora[key].shape != self.tensors[key].shape
            ):
                raise AdapterError(
                    f"The adapter {name} does not fit this model or its own config (see {key})."
                )
        with torch.no_grad():
            for key, parameter in self.tensors.items():
                parameter.copy_(lora[key])

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {"embeddings": self.embeddings, **self.tensors}


def make_card(model: PreTrainedModel, n: int) -> AdapterCard:
    """Returns the card of an untrained adapter of `model`."""
    name = get_model_name(model)
    local = name not in NAMES and Path(name).exists()
    return AdapterCard(restore_tokens=n, local=local, **base_weights.describe_base(model))
