"""One-token decoding steps that do the same work every time, so that a GPU can replay them as a
CUDA graph.
"""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from restorekv.cache.multi_context import MultiContextLayer
from restorekv.cache.tail import TailLayer
from restorekv.errors import summarize_error, warn
from restorekv.generation import step_self_test
from restorekv.model.attention import self_tests
from restorekv.model.cache_argument import pass_cache
from restorekv.model.shape import CacheShape, leave_out_router_logits

# Replays of a model's first graph that are checked: the second shows whether positions and masks
# have moved.
CHECKED_REPLAYS = 2
GRAPHED: WeakSet[PreTrainedModel] = WeakSet()  # models with replays that were right
# Models that cannot be captured, or had replays that were wrong.
NEVER_GRAPHED: WeakSet[PreTrainedModel] = WeakSet()


def can_graph(model: PreTrainedModel, device: torch.device) -> bool:
    """Return whether fixed steps pass their self-test on a device, for the shape of a model."""
    if not self_tests.needs_self_test(device):
        return True
    shape = CacheShape.from_model(model)
    return self_tests.passed_self_test(
        "graph", device, shape.heads, shape.groups, shape.head_dim, model.dtype
    )


class FixedSteps:
    """At most `count` one-token steps of a batch that do the same work every time, so that
    torch.compile traces them once.

    Ids, positions, mask and the place in the tails are tensors on the device, which a step reads
    and advances; tails are buffers of one size, and the mask hides what is not written yet. Rows
    that have ended continue with the others. On a GPU the second step is captured as a CUDA graph
    and later ones replay it. The first replays of a model are compared with steps that are computed
    as usual; if a model cannot be captured, or its replays differ, all its steps are computed as
    usual.

    Args:
        model: The model that made the cache.
        cache: A cache with the questions in its tails.
        ids: The ids (B, 1) that come next.
        positions: Their positions (B, 1).
        visible: (B, columns) bool marks what each row sees of the tails.
        count: The most steps that will be taken.
        strict: Raise the errors of a capture and compare nothing, for a self-test that compares
            every step itself.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        ids: Tensor,
        positions: Tensor,
        visible: Tensor,
        count: int,
        strict: bool = False,
    ) -> None:
        self.model = model
        self.cache = cache
        self.graph: torch.cuda.CUDAGraph | None = None
        self.taken = 0
        # The columns by which the tails have grown, on the device, so that a replay can advance it.
        self.columns_grown = torch.zeros((), dtype=torch.long, device=ids.device)
        self.width = visible.shape[1]
        for layer in cache.layers:
            assert isinstance(layer, TailLayer | MultiContextLayer), "fork_caches makes no other"
            layer.make_static(count, self.columns_grown)
        self.ids = ids.clone()
        self.positions = positions.clone()
        self.marked = ids.clone()  # the same ids, but -1 in rows with logits that are not finite
        self.visible = torch.nn.functional.pad(visible, (0, count), value=False)
        self.logits_to_keep = locate_last_logits(ids)
        # (B, V) of the latest step; a replay writes to the same memory.
        self.logits: Tensor | None = None
        self.can_capture = can_record(ids.device) and model not in NEVER_GRAPHED
        self.unchecked = 0 if strict or model in GRAPHED else CHECKED_REPLAYS
        self.strict = strict

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Return the likeliest next ids (B, 1), -1 for logits that are not finite, in a tensor that
        the next step overwrites.
        """
        if self.taken and self.can_capture:
            self.replay()
        else:
            self.step()
        self.taken += 1
        return self.marked

    def step(self) -> Tensor:
        """Decode one token of every row; return the logits (B, V)."""
        self.visible.index_fill_(1, (self.columns_grown + self.width).view(1), True)
        output = self.model(
            input_ids=self.ids,
            attention_mask=self.visible[:, None, None],
            position_ids=self.positions,
            **pass_cache(self.model, self.cache),
            **leave_out_router_logits(self.model),
            use_cache=True,
            logits_to_keep=self.logits_to_keep,
        )
        logits: Tensor = output.logits[:, -1]
        self.logits = logits
        ids, marked = find_likeliest(logits)
        self.ids.copy_(ids)
        self.marked.copy_(marked)
        self.positions += 1
        self.columns_grown += 1
        return logits

    def replay(self) -> None:
        """Decode one token of every row with the graph. It is captured if there is none yet, and
        its first replays are checked.
        """
        try:
            graph = self.graph or self.capture()
        except Exception as error:  # what a capture cannot hold differs from model to model
            if self.strict:
                raise
            self.give_up(
                f"its steps cannot be captured ({type(error).__name__}: {summarize_error(error)})"
            )
            self.step()
            return
        graphed = self.logits  # of the capture; a usual step will replace it by another tensor
        if not self.unchecked:
            graph.replay()
            return
        # Replay the step, undo it, compute it again as usual, and compare.
        before = [x.clone() for x in self.state()]
        graph.replay()
        assert graphed is not None, "a step comes before the first replay"
        found = graphed.clone()
        ids = self.ids.clone()
        for state, value in zip(self.state(), before, strict=True):
            state.copy_(value)
        usual = self.step()
        error = step_self_test.measure_distance(found, usual)
        if not error <= step_self_test.get_tolerance(usual.dtype) or not agree_on_ids(found, ids):
            self.give_up(f"a replay's logits are off by {error:.1e} of the highest")
            return
        self.logits = graphed
        self.unchecked -= 1
        if not self.unchecked:
            GRAPHED.add(self.model)

    def state(self) -> tuple[Tensor, ...]:
        """Return the tensors that a step advances, to undo it. A step also writes a column of the
        tails, but when it is computed again it overwrites that.
        """
        return self.ids, self.positions, self.visible, self.columns_grown

    def capture(self) -> torch.cuda.CUDAGraph:
        """Capture a step as a graph without computing it. An earlier step must have compiled and
        allocated everything.
        """
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.ids.device)
        try:
            # Work of other threads must not end the capture. Their self-tests would, so they wait.
            with (
                self_tests.exclude_self_tests(),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                self.step()
        except BaseException:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own stream in place
            raise
        self.graph = graph
        return graph

    def give_up(self, reason: str) -> None:
        """Compute all further steps of this model as usual."""
        self.graph = None
        self.can_capture = False
        NEVER_GRAPHED.add(self.model)
        device = self_tests.describe_device(self.ids.device)
        warn(
            f"{type(self.model).__name__} is not run as a CUDA graph on {device}: {reason}. "
            f"Steps are computed one by one, more slowly. Please {self_tests.REPORT}."
        )


def find_likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest ids (B, 1) of logits (B, V), and the same with -1 where logits are NaN
    or infinite.

    Of equal logits `max` takes the first, as argmax does, but it is faster; it returns NaN if there
    is one. Nothing here waits for a GPU.
    """
    best = logits.max(-1, keepdim=True)
    return best.indices, torch.where(best.values.isfinite(), best.indices, -1)


def agree_on_ids(logits: Tensor, ids: Tensor) -> bool:
    """Return whether ids (B, 1) have the highest of the logits (B, V)."""
    return bool((logits.gather(-1, ids) == logits.amax(-1, keepdim=True)).all())


def can_record(device: torch.device) -> bool:
    """Return whether a device can capture steps as a CUDA graph."""
    return device.type == "cuda"


def locate_last_logits(ids: Tensor) -> Tensor | int:
    """Return the value of `logits_to_keep` that selects the last token.

    On a CPU it is an index: 1 makes a strided slice, with which the LM head is fifty times slower
    in bfloat16. On a GPU it is 1: an index would have to be copied there in every step.
    """
    return torch.tensor([ids.shape[1] - 1]) if ids.device.type == "cpu" else 1
