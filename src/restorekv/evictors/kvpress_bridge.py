"""Any scorer of kvpress 0.5.5 (github.com/NVIDIA/kvpress) as an evictor: `FromKVPress(press)`.

A spec names the press, then its settings after a colon, separated by semicolons:
"kvpress:press=SnapKVPress:window_size=32;kernel_size=7". Only its scores are used. A press that
reads its own compression_ratio while it scores, as StreamingLLMPress and CompactorPress do, needs
that setting.

The press sees what kvpress would show it: its own pass over the whole context, prefix included, not
in chunks. With eager=true this includes the attention weights, S+T by S+T for every head, which
ObservedAttentionPress needs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache

from restorekv import spec
from restorekv.errors import RestoreKVError, summarize_error
from restorekv.evictors.base import Cache, Context, Evictor, Model, Tokenizer
from restorekv.model.cache_argument import find_cache, pass_cache
from restorekv.model.prefill import make_full_cache
from restorekv.model.shape import (
    find_attention,
    find_pairless_layers,
    get_backbone,
    is_latent_config,
    list_full_layers,
)
from restorekv.model.support import get_support

MISSING = (
    "The evictor kvpress needs kvpress 0.5.5, which needs transformers < 5.3; "
    "run pip install kvpress==0.5.5 in an environment of its own."
)


@dataclass(frozen=True)
class FromKVPress(Evictor):
    """`press` is given as a `kvpress.ScorerPress` or its spec and kept as its spec; `scorer` is the
    object.

    Settings that are neither numbers, words nor flags, such as a press inside a press, do not
    appear in the spec.
    """

    name: ClassVar[str] = "kvpress"
    streams: ClassVar[bool] = False
    offloads: ClassVar[bool] = False

    press: str = ""
    eager: bool = False
    scorer: ClassVar[Any]  # set on every object; not a setting

    def __post_init__(self) -> None:
        kvpress = _import_kvpress()
        press: Any = self.press
        if isinstance(press, str):
            press = _parse_press(press, kvpress)
        if not isinstance(press, kvpress.ScorerPress):
            raise RestoreKVError(
                f"FromKVPress takes a ScorerPress of kvpress, not {type(press).__name__}."
            )
        # Commas separate the evictor's own settings, so the press's are separated by semicolons.
        text = spec.format_spec(type(press).__name__, press).replace(",", ";")
        # The dataclass is frozen.
        object.__setattr__(self, "scorer", press)
        object.__setattr__(self, "press", text)

    @torch.no_grad()
    def score(
        self,
        model: Model,
        tokenizer: Tokenizer,
        context: Context,
        full: Cache,
        observer: None = None,
    ) -> Tensor:
        """Return (L, H, T) in any range.

        Refuses models with learned sinks or a cap on logits, since presses compute attention
        weights without them, and latent attention, since presses expect keys and values of every
        head.
        """
        if is_latent_config(model.config):
            raise RestoreKVError(
                f"kvpress cannot score the latent attention of {type(model).__name__}; use an "
                "evictor of restorekv, such as snapkv."
            )
        support = get_support(model)
        if support.has_cap:
            raise RestoreKVError(
                "kvpress computes attention without the cap on the logits of "
                f"{type(model).__name__}; use an evictor of restorekv, such as snapkv."
            )
        if support.has_sinks:
            raise RestoreKVError(
                f"kvpress computes attention without the learned sinks of {type(model).__name__}; "
                "use an evictor of restorekv, such as snapkv."
            )
        scores: dict[int, Tensor] = {}

        def after_layer(module: Any, args: tuple, kwargs: dict[str, Any], output: tuple) -> None:
            cache: Any = find_cache(kwargs)
            layer = cache.layers[module.layer_idx]
            layer_scores = self.scorer.score(
                module, kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs
            )
            scores[module.layer_idx] = layer_scores[0].float()

        try:
            # Presses that read the model's config do so here.
            self.scorer.post_init_from_model(model)
            attention = _use_eager_attention(model) if self.eager else nullcontext()
            with _hook_attention(model, after_layer), attention:
                backbone = get_backbone(model)
                # Windows are shown whole, but states need layers of their own.
                pairless = find_pairless_layers(model.config)
                cache = make_full_cache(model) if pairless else DynamicCache()
                backbone(
                    input_ids=context.ids.to(model.device),
                    **pass_cache(backbone, cache),
                    use_cache=True,
                )
        # A press asserts what it needs, fetches files, and reads attributes that models may lack.
        except (AssertionError, ValueError, AttributeError, OSError) as error:
            reason = summarize_error(error)
            raise RestoreKVError(
                f"{self.press} cannot score this context; use another press ({reason})."
            ) from error
        stacked = torch.stack([scores[layer] for layer in sorted(scores)])
        # The first layers would be kept whole, and nothing of the others.
        if stacked[0, 0].numel() > 1 and bool((stacked == stacked[0, 0, 0]).all()):
            raise RestoreKVError(
                f"{self.press} gives all pairs the same score, as a press does that lacks its own "
                "compression_ratio; for ratio=0.1 write "
                "kvpress:press=StreamingLLMPress:compression_ratio=0.9, for example."
            )
        return stacked[..., context.prefix_length :]


@contextmanager
def _hook_attention(model: Model, after_layer: Callable[..., None]) -> Iterator[None]:
    """Call `after_layer` after every attention module, which meanwhile has a `rotary_emb`, as
    presses expect, if the model has one.
    """
    backbone: Any = get_backbone(model)
    full_attention = list_full_layers(model.config)
    modules = [find_attention(backbone.layers[index]) for index in full_attention]
    # Newer versions of transformers pass positions instead, and some presses still ask the module.
    bare = [module for module in modules if not hasattr(module, "rotary_emb")]
    # LFM2 with experts has another name for it, and models without RoPE have none.
    rotary = getattr(backbone, "rotary_emb", None) or getattr(backbone, "pos_emb", None)
    if rotary is None:
        bare = []
    handles = [module.register_forward_hook(after_layer, with_kwargs=True) for module in modules]
    try:
        for module in bare:
            module.rotary_emb = rotary
        yield
    # Hooks and attributes are taken away even if the press fails.
    finally:
        for handle in handles:
            handle.remove()
        for module in bare:
            del module.rotary_emb


@contextmanager
def _use_eager_attention(model: Model) -> Iterator[None]:
    """Use transformers' own attention, which returns its weights."""
    before: Any = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _import_kvpress() -> ModuleType:
    """Import kvpress when it is first needed."""
    try:
        import kvpress
    except ImportError as error:
        raise RestoreKVError(MISSING) from error
    return kvpress


def _parse_press(text: str, kvpress: ModuleType) -> Any:
    """Return the press of a spec."""
    base = kvpress.ScorerPress
    presses = {}
    for name, member in sorted(vars(kvpress).items()):
        if isinstance(member, type) and issubclass(member, base) and member is not base:
            presses[name] = member
    try:
        return spec.parse_spec(text.replace(";", ","), presses, "press of kvpress")
    except (AssertionError, TypeError) as error:
        raise RestoreKVError(
            f"{text!r} makes no press; make it in Python, for FromKVPress ({error})."
        ) from error
