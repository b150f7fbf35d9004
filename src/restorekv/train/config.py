"""The settings of a training run; the defaults are the paper's ("Training Setup Details")."""
# ruff: noqa: RUF009 (`setting` returns a dataclass field)

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, Self, get_args, get_type_hints

from restorekv.compression.budget import PrefixPolicy
from restorekv.data.config import require_at_least, setting
from restorekv.errors import RestoreKVError, check_choice, make_printable
from restorekv.files import matches_type, parse_json
from restorekv.restore.choices import LARGEST_ALPHA, LINEAR_LAYERS, RestoreFrom
from restorekv.spec import split_specs

if TYPE_CHECKING:
    from restorekv.compression.eviction import Eviction

RatioLaw = Literal["uniform", "log-uniform"]
Direction = Literal["symmetric", "forward", "reverse"]
Reduction = Literal["mean", "sum"]
# Names of states that can be matched: the output of a layer, and of its attention.
HIDDEN = "hidden"
ATTENTION = "attention"
AT_LEAST_ONE = (
    "restore_tokens",
    "rank",
    "steps",
    "contexts",
    "questions",
    "draws",
    "max_new_tokens",
    "checkpoint_every",
)
LARGEST = {
    "alpha": LARGEST_ALPHA,
    "lr": 1e6,
    "weight_decay": 1e6,
    "hidden_weight": 1e6,
    "attention_weight": 1e6,
    "ratio_weight": 100,
    "loss_power": 100,
}
LEAST_DECAY = 0.01  # tokens: so few that only the first token of an answer counts
AT_LEAST_ZERO = (
    "alpha",
    "lr",
    "weight_decay",
    "warmup",
    "clip",
    "keep",
    "hidden_weight",
    "attention_weight",
    "ratio_weight",
    "loss_power",
    "answer_decay",
)


@dataclass(frozen=True)
class TrainConfig:
    """The settings of one run; the same settings and data give the same adapter."""

    evictor: str = setting(
        "kvzip",
        "Evictor to restore, with its settings: kvzip, snapkv:window=64. Of several, separated by "
        "commas, each step draws one.",
    )
    prefix_policy: PrefixPolicy = setting(
        "free", "Chat prefix: free (kept, and not counted in the budget) or counted."
    )
    allocation: str = setting(
        "global", "Which pairs compete: global, per-layer, per-head or adakv."
    )
    restore_from: RestoreFrom = setting(
        "full", "Cache that the restore pass reads: full, or evicted (a control of the paper)."
    )
    restore_tokens: int = setting(8, "Number n of restore tokens.")
    rank: int = setting(8, "Rank of the LoRA.")
    alpha: float = setting(16.0, "The LoRA's scale is alpha / rank.")
    targets: tuple[str, ...] = setting(
        LINEAR_LAYERS,
        "Linear layers that get a LoRA, separated by commas; none: a control without LoRA.",
    )
    init: str = setting(
        "",
        "Adapter to start from: a folder, a hub id, or one that ships, such as smollm2:kvzip; a "
        "new one by default.",
    )
    embeddings: str = setting(
        "learned", "Restore embeddings: learned, or fixed (a control with n line breaks)."
    )
    knows_ratio: bool = setting(
        False,
        "Learn vectors that tell the restore tokens the ratio, so that they carry much where much "
        "was evicted and little where little was.",
    )
    lr: float = setting(2e-4, "Peak learning rate.")
    weight_decay: float = setting(0.01, "Weight decay of AdamW.")
    warmup: int = setting(50, "Steps of linear warm-up before the cosine.")
    clip: float = setting(1.0, "Maximum norm of the gradient; 0: no limit.")
    steps: int = setting(5000, "Optimizer steps.")
    contexts: int = setting(1, "Contexts per process and step; their gradients are averaged.")
    questions: int = setting(4, "Maximum number of questions per context and step.")
    draws: int = setting(
        1,
        "Number of ratios that every context of a step is evicted to, each with its own questions; "
        "the context is read once.",
    )
    ratio_min: float = setting(0.025, "Lowest ratio that is drawn: a share of the pairs to keep.")
    ratio_max: float = setting(0.25, "Highest ratio that is drawn: a share of the pairs to keep.")
    ratio_law: RatioLaw = setting(
        "uniform", "How ratios are drawn: uniform, or log-uniform (low ratios more often)."
    )
    ratio_weight: float = setting(
        0.0,
        "Power of r / ratio_max that a step's loss is multiplied by: above 0, high ratios weigh "
        "more.",
    )
    loss_power: float = setting(
        1.0,
        "Power of a context's loss that is minimized. Below 1, mild ratios, whose loss is small, "
        "weigh more; 0 minimizes the logarithm, so that all ratios weigh the same.",
    )
    nested: bool = setting(
        False, "Draw the number of restore tokens used, so that the first few work alone."
    )
    kl: Direction = setting(
        "symmetric", "Divergence to minimize: symmetric, forward (KL(teacher, student)) or reverse."
    )
    reduction: Reduction = setting(
        "mean", "Loss of an answer: mean over its tokens, or sum (long answers weigh more)."
    )
    answer_decay: float = setting(
        0.0,
        "Tokens after which an answer's token weighs 1/e of its first one, since the first ones "
        "decide what the answer is about; 0: all weigh the same.",
    )
    hidden_weight: float = setting(
        0.0, "Weight of matching the teacher's hidden states at the answer."
    )
    attention_weight: float = setting(
        0.0, "Weight of matching the teacher's attention outputs at the answer."
    )
    max_new_tokens: int = setting(
        512, "Maximum length of a teacher's answer in tokens, unless data build has written it."
    )
    seed: int = setting(0, "Seed of embeddings, LoRA, order and ratios.")
    keep: int = setting(
        0,
        "Number of contexts, each with its evictor, whose scores and targets all stay in memory.",
    )
    checkpoint_every: int = setting(50, "Steps between checkpoints.")

    def __post_init__(self) -> None:
        check_choice("embeddings", self.embeddings, ("learned", "fixed"))
        check_choice("ratio_law", self.ratio_law, get_args(RatioLaw))
        check_choice("kl", self.kl, get_args(Direction))
        check_choice("reduction", self.reduction, get_args(Reduction))
        require_at_least(1, self, AT_LEAST_ONE)
        require_at_least(0, self, AT_LEAST_ZERO)
        # Far above what trains. With more, a run would end in numbers that are not finite.
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            if value > largest:
                raise RestoreKVError(f"{name} must be at most {largest:,.0f}, not {value:g}.")
        if 0 < self.answer_decay < LEAST_DECAY:
            raise RestoreKVError(
                f"answer_decay must be 0 or at least {LEAST_DECAY}, not {self.answer_decay:g}."
            )
        if not 1e-6 <= self.ratio_min <= self.ratio_max <= 1:
            raise RestoreKVError(
                "Training ratios need 0.000001 <= ratio_min <= ratio_max <= 1, not "
                f"{self.ratio_min:g} and {self.ratio_max:g}."
            )
        # Makes every evictor once, which refuses unknown ones and contradicting settings. Last,
        # because it imports PyTorch, which refusing a wrong number does not need.
        self.make_evictions()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote; settings that it lacks take their defaults."""
        hints = get_type_hints(cls)
        values = parse_json(text, "The settings")
        settings = {}
        for key, value in values.items():
            if key not in hints or not matches_type(value, hints[key]):
                raise RestoreKVError(
                    f"The setting {make_printable(key)} is unknown or has the wrong type; "
                    "train again."
                )
            # JSON has no tuples.
            settings[key] = tuple(value) if isinstance(value, list) else value
        return cls(**settings)

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        return json.dumps(asdict(self), sort_keys=True)

    def state_weights(self) -> dict[str, float]:
        """Return the weights of the states that are matched in addition to the logits."""
        weights = {HIDDEN: self.hidden_weight, ATTENTION: self.attention_weight}
        return {name: weight for name, weight in weights.items() if weight}

    def make_evictions(self) -> list[Eviction]:
        """Return the evictions that the adapter is trained to restore; contexts too short for n
        restore tokens get fewer.
        """
        from restorekv.compression.eviction import Eviction

        evictions = []
        for spec in split_specs(self.evictor) or [self.evictor]:
            eviction = Eviction.make(
                spec,
                prefix_policy=self.prefix_policy,
                on_small_budget="fewer",
                allocation=self.allocation,
                restore_from=self.restore_from,
            )
            evictions.append(eviction)
        return evictions


def compute_learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of a step: linear warm-up, then a cosine to zero."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))
