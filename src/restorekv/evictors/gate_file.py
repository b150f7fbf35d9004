"""The file of a gate: a small network per layer that predicts an evictor's scores from the
attention module's input.

It is one safetensors file. Tensors are named layers.<l>.<parameter>, with the parameters of the
published gates (R, s and m are sizes of the gate):

fastkvzip     q_proj.weight (H*G*R, d)  q_proj.bias (H*G*R)  k_proj.weight (H*R, d)
              q_norm.weight (R)  k_norm.weight (R)  k_base (H, 1, s, R)  b (H, 1, G)
kvzap-linear  weight (H, d)  bias (H)
kvzap-mlp     0.weight (m, d)  0.bias (m)  2.weight (H, m)  2.bias (H)

The file is sealed (see seal.py); its metadata holds the card.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from restorekv import seal
from restorekv.errors import GateError, RestoreKVError, reraise_as
from restorekv.files import matches_type, parse_record
from restorekv.model import base_weights
from restorekv.model.gate_kinds import TARGETS
from restorekv.model.identity import ModelIdentity, identify_model
from restorekv.model.names import (
    SHIPPING,
    get_install_command,
    is_shipping_installed,
    shipped_path,
)
from restorekv.model.shape import CacheShape
from restorekv.seal import FileKind, digest_tensors

MAKE = "make one with restorekv train-gate, or restorekv convert-gate for a published one"
FILE = FileKind("restorekv-gate", "2", "a gate of restorekv", MAKE)
Layer = Mapping[str, Tensor]


@dataclass(frozen=True)
class GateCard:
    """What a gate was made for: `target` is the evictor whose scores it predicts; the rest informs
    readers.
    """

    kind: str
    model: str
    fingerprint: str
    rope: dict[str, object]
    target: str
    settings: dict[str, object] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    weights: dict[str, object] | None = None

    def __post_init__(self) -> None:
        # A card is read from a file, so nothing about it is certain.
        for each in fields(self):
            if not matches_type(getattr(self, each.name), each.type):
                raise TypeError(f"the field {each.name} of the card has another type")
        if self.kind not in TARGETS:
            raise TypeError("the field kind of the card has another value")

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        kind: str,
        target: str,
        settings: dict | None = None,
        figures: dict | None = None,
    ) -> "GateCard":
        """Return the card for a gate of `model`.

        Args:
            model: The model whose hidden states the gate reads.
            kind: One of `gate_kinds.KINDS`.
            target: The evictor whose scores the gate predicts.
            settings: How it was trained.
            figures: How well it predicts.
        """
        return cls(
            kind=kind,
            target=target,
            settings=settings or {},
            figures=figures or {},
            **base_weights.describe_base(identify_model(model)),
        )


@dataclass(frozen=True)
class Gate:
    """A mapping of parameters per layer, the card, and, if read from a file, 16 hex digits of the
    parameters.
    """

    layers: Sequence[Layer]
    card: GateCard
    digest: str = ""


def write_gate(path: Path, gate: Gate) -> None:
    """Write the file completely or not at all; refuse numbers that are not finite."""
    tensors = {}
    for index, layer in enumerate(gate.layers):
        for parameter, tensor in layer.items():
            name = f"layers.{index}.{parameter}"
            # A diverged training would otherwise write a gate that scores NaN.
            if not torch.isfinite(tensor).all():
                raise GateError(
                    f"The gate's {name} has numbers that are not finite; "
                    "train it again with a lower lr."
                )
            tensors[name] = tensor.detach().cpu().contiguous()
    card = json.dumps(asdict(gate.card), sort_keys=True)
    seal.write_sealed(path, FILE, tensors, {"card": card})


def read_gate(path: Path) -> Gate:
    """Read a gate, once; refuse a file that differs in any way from what `write_gate` wrote."""
    card, tensors = read_card(path)
    check_numbers(path, tensors)
    return Gate(split_layers(path, tensors), card, digest_tensors(tensors)[:16])


def read_card(path: Path) -> tuple[GateCard, dict[str, Tensor]]:
    """Return the card and the tensors of a gate, which are not checked."""
    if path.is_dir() or not path.exists():
        raise GateError(f"There is no gate file {path}; {MAKE}.")
    with reraise_as(GateError):
        metadata, tensors = seal.read_sealed(path, FILE, f"The gate {path}")
    try:
        card = GateCard(**parse_record(metadata["card"], "The card"))
    except (KeyError, TypeError, RestoreKVError) as error:
        raise GateError(f"The gate {path} is damaged; {MAKE}.") from error
    return card, tensors


def check_numbers(name: object, tensors: Mapping[str, Tensor]) -> None:
    """Refuse parameters that are not finite numbers of a kind and size that gates have."""
    with reraise_as(GateError):
        seal.check_weights(tensors, f"The gate {name}", MAKE)


def split_layers(name: object, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return a mapping per layer from the names of a file's tensors; refuse other names."""
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        head, _, rest = key.partition(".")
        number, _, parameter = rest.partition(".")
        # A tensor of another name makes a layer of its own, which the check below refuses.
        layers.setdefault(number if head == "layers" else key, {})[parameter] = tensor
    if set(layers) != {str(index) for index in range(len(layers))}:
        raise GateError(f"The gate {name} has tensors that no gate has, or lacks a layer; {MAKE}.")
    return [layers[str(index)] for index in range(len(layers))]


def compute_shapes(kind: str, shape: CacheShape, layer: Layer) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a layer of this kind must have; raise KeyError or IndexError if
    sizes are missing.
    """
    heads = shape.heads
    groups = shape.groups
    hidden = shape.hidden
    if kind == "kvzap-linear":
        return {"weight": (heads, hidden), "bias": (heads,)}
    if kind == "kvzap-mlp":
        width = layer["0.weight"].shape[0]
        return {
            "0.weight": (width, hidden),
            "0.bias": (width,),
            "2.weight": (heads, width),
            "2.bias": (heads,),
        }
    # Sizes that the gate chooses come from its own tensors; the model decides the others.
    rank = layer["q_norm.weight"].shape[0]
    sinks = layer["k_base"].shape[2]
    return {
        "q_proj.weight": (heads * groups * rank, hidden),
        "q_proj.bias": (heads * groups * rank,),
        "k_proj.weight": (heads * rank, hidden),
        "q_norm.weight": (rank,),
        "k_norm.weight": (rank,),
        "k_base": (heads, 1, sinks, rank),
        "b": (heads, 1, groups),
    }


def check_shapes(name: object, kind: str, layers: Sequence[Layer], shape: CacheShape) -> None:
    """Check that every layer of the model has a gate of its shape.

    Args:
        name: What messages call the gate.
        kind: One of `gate_kinds.KINDS`.
        layers: The gate's parameters.
        shape: The shape of the model.

    Raises:
        GateError: If a layer is missing, or has parameters of other names or shapes.
    """
    if len(layers) != shape.layers:
        raise GateError(
            f"The gate {name} has {len(layers)} layers, the model {shape.layers}; {MAKE}."
        )
    for index, layer in enumerate(layers):
        found = {parameter: tuple(tensor.shape) for parameter, tensor in layer.items()}
        is_empty = any(0 in sizes for sizes in found.values())
        try:
            fits = found == compute_shapes(kind, shape, layer) and not is_empty
        except (KeyError, IndexError):
            fits = False
        if not fits:
            raise GateError(
                f"Layer {index} of the gate {name} lacks the shape of a {kind} gate for this "
                f"model; {MAKE}."
            )


def check_gate(
    name: object,
    gate: Gate,
    kinds: Sequence[str],
    identity: ModelIdentity,
) -> None:
    """Check that the gate has one of `kinds` and was made for this model; warn if for other
    weights of it.

    Args:
        name: What messages call the gate.
        gate: As read from its file.
        kinds: Those that the evictor can use.
        identity: That of the model that it shall score for.

    Raises:
        GateError: If it has another kind or was made for another model.
    """
    card = gate.card
    if card.kind not in kinds:
        raise GateError(
            f"The gate {name} is of the kind {card.kind}, not {' or '.join(kinds)}; {MAKE}."
        )
    base_weights.check_base(f"gate {name}", card, identity, GateError, f"load that one, or {MAKE}")
    check_shapes(name, card.kind, gate.layers, identity.shape)


def find_shipped_gate(kinds: Sequence[str], identity: ModelIdentity) -> Path:
    """Return the gate in the package for a model, of the first of `kinds` that exists.

    A gate for exactly these weights precedes one for other weights of the model.
    """
    candidates = []
    for kind, shipping in product(kinds, SHIPPING):
        path = shipped_path(shipping, "gates", f"{kind}.safetensors")
        if path.is_file():
            card = read_card(path)[0]
            candidates.append((path, card.fingerprint, card.weights))
    found = base_weights.find_made_for(identity, candidates)
    if found is not None:
        return found
    name = identity.name
    if name in SHIPPING and not is_shipping_installed(name):
        raise GateError(
            f"The gates for {name} are not installed; {get_install_command(name)}, "
            "or name a gate with gate=FILE."
        )
    described = f"the model {name}" if name else "this model"
    raise GateError(
        f"No {kinds[0]} gate ships for {described}; {MAKE}, and name it with gate=FILE."
    )


# Per model, by everything that a gate on its device depends on.
_loaded: WeakKeyDictionary[PreTrainedModel, dict[tuple, Gate]] = WeakKeyDictionary()


def load_gate(model: PreTrainedModel, source: str, kinds: Sequence[str]) -> Gate:
    """Return the gate `source`, "auto" or a path, on the model's device; read it again only if
    the file changes.
    """
    path = None if source == "auto" else Path(source)
    state = None
    if path and path.is_file():
        stat = path.stat()
        state = stat.st_mtime_ns, stat.st_size
    # A file that changed, or a model that moved, needs another copy.
    key = (source, tuple(kinds), state, model.device)
    gates = _loaded.setdefault(model, {})
    if key not in gates:
        identity = identify_model(model)
        path = path or find_shipped_gate(kinds, identity)
        gate = read_gate(path)
        check_gate(path, gate, kinds, identity)
        layers = []
        for layer in gate.layers:
            layers.append({name: tensor.to(model.device) for name, tensor in layer.items()})
        gates[key] = replace(gate, layers=layers)
    return gates[key]
