"""The restore pass (Eqs. 4-6): n learned tokens read the full cache once, and their pairs join what eviction keeps.

    C_restore = KV(E; theta + LoRA, C_full)     at positions T+1 .. T+n, causally, before anything is dropped

LoRA belongs to this pass alone. PEFT builds its layers, and they stand in the model only while the pass runs:
outside of it the model *is* the frozen model. (PEFT's own switch would also set requires_grad, and a backward pass
after switching off would find no LoRA gradient.)
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from restorekv import adapter_file
from restorekv.adapter_file import Card, Stored
from restorekv.errors import AdapterError, RestoreKVWarning
from restorekv.models import CacheShape, decoder, model_fingerprint, model_name, rope_fingerprint

NAME = "restorekv"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class RestoreAdapter(nn.Module):
    """`embeddings` (n, d) and the LoRA of every target layer, float32, trainable unless fixed; nothing else.

    It works on the one `model` it was made for. Several adapters of one model do not disturb each other.
    """

    embeddings: nn.Parameter

    def __init__(self, model: PreTrainedModel, config: LoraConfig, embeddings: Tensor, card: Card) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(embeddings.to(model.device, torch.float32), card.embeddings == "learned")
        self.config, self.card = config, card
        layers = build(model, config)
        self.tensors = {
            f"{path}.{part}.weight": getattr(layer, part)[NAME].weight
            for path, layer in layers.items()
            for part in ("lora_A", "lora_B")
        }
        self.lora = nn.ParameterList(self.tensors.values())
        # In a tuple and a list, because an attribute would make the backbone a part of this module.
        self._model = (model,)
        self._places = [(model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], layer)
                        for path, layer in layers.items()]  # fmt: skip

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
        """An untrained adapter: embeddings of n tokens of the vocabulary drawn with `seed`, LoRA that adds zero.

        Controls of the paper: with `fixed`, all n embeddings are that token's and are never trained; with no `targets`
        there is no LoRA.
        """
        if n < 1 or rank < 1:
            raise AdapterError(f"A restore adapter needs at least one token and rank 1, not {n} and {rank}.")
        if fixed is not None and not targets:
            raise AdapterError("Fixed embeddings without LoRA leave nothing to train; give LoRA targets or learn them.")
        config = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=sorted(targets), lora_dropout=0.0, bias="none",
            task_type="CAUSAL_LM", base_model_name_or_path=model_name(model), inference_mode=True,
        )  # fmt: skip
        table = model.get_input_embeddings().weight.detach()
        card = Card(model_name(model), model_fingerprint(model), rope_fingerprint(model.config), n)
        card = replace(card, embeddings="learned" if fixed is None else "fixed")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            rows = torch.randint(len(table), (n,)) if fixed is None else torch.full((n,), fixed)
            return cls(model, config, table[rows.to(table.device)].float().clone(), card)

    @classmethod
    def from_pretrained(cls, model: PreTrainedModel, name: str | Path, evictor: str | None = None) -> RestoreAdapter:
        """From a folder or a hub id. Refuses an adapter of another model, warns if `evictor` is not its own."""
        stored = adapter_file.read(name)
        n, hidden = stored.embeddings.shape
        if hidden != CacheShape.of(model).hidden:
            raise AdapterError(
                f"The adapter {name} is for a model of width {hidden}, this one has {CacheShape.of(model).hidden}; "
                "load the model it was trained for."
            )
        fresh = Card(model_name(model), model_fingerprint(model), rope_fingerprint(model.config), n)
        if stored.card is not None:
            check_model(name, stored.card, fresh)
        adapter = cls(model, stored.config, stored.embeddings, stored.card or fresh)
        adapter.load_lora(name, stored.lora)
        if evictor is not None:
            adapter.check_use(evictor)
        return adapter

    @property
    def restore_tokens(self) -> int:
        """n."""
        return self.embeddings.shape[0]

    @property
    def model(self) -> PreTrainedModel:
        return self._model[0]

    @contextmanager
    def active(self) -> Iterator[None]:
        """LoRA is part of the model inside the block and gone after it, however the block ends."""
        try:
            for parent, name, layer in self._places:
                setattr(parent, name, layer)
            yield
        finally:
            for parent, name, layer in self._places:
                setattr(parent, name, layer.get_base_layer())

    def append(self, full: Cache, count: int | None = None) -> None:
        """One pass of the n tokens, or the first `count`, over `full`, which grows by their pairs.

        `full` is a dense cache of S + T columns or an evicted one. Gradients reach E and LoRA.
        """
        first, embeddings = full.get_seq_length(), self.embeddings[:count].to(self.model.dtype)
        positions = torch.arange(first, first + len(embeddings), device=embeddings.device)
        with self.active():
            decoder(self.model)(
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
    ) -> None:
        """Records what the adapter is being trained with."""
        self.card = replace(
            self.card, evictor=evictor, prefix_policy=prefix_policy, ratio_range=ratio_range,
            allocation=allocation, restore_from=restore_from,
        )  # fmt: skip

    def check_use(
        self,
        evictor: str,
        allocation: str | None = None,
        restore_from: str | None = None,
        prefix_policy: str | None = None,
    ) -> None:
        """An adapter restores what its own eviction loses; with another one it may do worse than none.

        Compares what is given with what the adapter's card tells; published adapters have no card.
        """
        card = self.card
        if card.evictor is None:
            return
        for what, trained, used in (
            ("evictor", card.evictor, evictor),
            ("allocation", card.allocation, allocation),
            ("restore pass over the cache", card.restore_from, restore_from),
            ("prefix policy", card.prefix_policy, prefix_policy),
        ):
            if None not in (trained, used) and trained != used:
                message = f"The adapter was trained with the {what} {trained}, not {used}; expect worse answers."
                warnings.warn(message, RestoreKVWarning, stacklevel=2)

    def trainable_state(self) -> dict[str, Tensor]:
        """Copies of everything that training changes, by name."""
        return {name: value.detach().clone() for name, value in self._trainable().items()}

    def load_trainable_state(self, state: dict[str, Tensor]) -> None:
        """The counterpart of `trainable_state`."""
        with torch.no_grad():
            for name, parameter in self._trainable().items():
                parameter.copy_(state[name])

    def identity(self) -> dict[str, object]:
        """For the records: a hash of embeddings and LoRA, n, and what the adapter was trained with; plain JSON."""
        digest = hashlib.sha256()
        for name, value in sorted(self._trainable().items()):
            digest.update(name.encode() + value.detach().cpu().numpy().tobytes())
        return {
            "hash": digest.hexdigest()[:16],
            "restore_tokens": self.restore_tokens,
            "evictor": self.card.evictor,
            "prefix_policy": self.card.prefix_policy,
            "ratio_range": self.card.ratio_range and list(self.card.ratio_range),
            "allocation": self.card.allocation,
            "restore_from": self.card.restore_from,
        }

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """The published format and `restorekv.json`; `dtype` is that of the LoRA weights in the file."""
        lora = {name: value.detach().to("cpu", dtype) for name, value in self.tensors.items()}
        card = replace(self.card, dtype=str(dtype).removeprefix("torch."))
        adapter_file.write(Path(folder), Stored(self.config, lora, self.embeddings.detach().cpu(), card))

    def load_lora(self, name: str | Path, lora: dict[str, Tensor]) -> None:
        """Copies the LoRA tensors of a file; each must be there and fit."""
        if lora.keys() != self.tensors.keys():
            strange = sorted(lora.keys() ^ self.tensors.keys())[0]
            raise AdapterError(f"The adapter {name} does not fit this model or its own config (see {strange}).")
        with torch.no_grad():
            for key, parameter in self.tensors.items():
                if lora[key].shape != parameter.shape:
                    raise AdapterError(
                        f"The adapter {name} is for another model: {key} is {tuple(lora[key].shape)}, "
                        f"not {tuple(parameter.shape)}."
                    )
                parameter.copy_(lora[key])

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {"embeddings": self.embeddings, **self.tensors}


def build(model: PreTrainedModel, config: LoraConfig) -> dict[str, LoraLayer]:
    """PEFT's layers around the targets, by module name, float32; the model is handed back as it was."""
    if config.target_modules is not None and not config.target_modules:
        return {}
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise AdapterError("The model carries PEFT adapters already; merge or unload them first.")
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        inject_adapter_in_model(config, model, NAME)
        layers = {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}
    except (ValueError, TypeError) as error:
        reason = str(error).split(". ")[0].rstrip(".")
        raise AdapterError(
            f"The adapter's LoRA does not fit {type(model).__name__} ({reason}); name linear layers that the model has."
        ) from error
    finally:
        remove(model)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
    wanted = config.target_modules
    missing = set() if isinstance(wanted, str) or wanted is None else {
        name for name in wanted if not any(path == name or path.endswith(f".{name}") for path in layers)
    }  # fmt: skip
    if missing:
        raise AdapterError(
            f"{type(model).__name__} has no linear layer {sorted(missing)[0]!r} for LoRA; name layers that it has."
        )
    for layer in layers.values():
        layer.eval()
        for part in (layer.lora_A[NAME], layer.lora_B[NAME]):
            part.float().requires_grad_(True)
    return layers


def remove(model: PreTrainedModel) -> None:
    """Takes every PEFT layer out again."""
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    for path, module in found:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module.get_base_layer())
    vars(model).pop("peft_config", None)


def check_model(name: str | Path, card: Card, own: Card) -> None:
    """The weights and the rotation of the keys must be those the adapter was trained with."""
    if card.rope != own.rope:
        raise AdapterError(
            f"The adapter {name} was trained with RoPE {card.rope}, the model has {own.rope}; "
            "load the model with the same RoPE configuration."
        )
    if card.fingerprint != own.fingerprint:
        raise AdapterError(f"The adapter {name} was trained for another model ({card.model}); load that one.")
