"""One-token steps of a batch that are the same work every time: a CUDA graph replays it, torch.compile traces it once.

Ids, positions, mask and the place in the tails are tensors on the device, which a step reads and advances; tails are
buffers of one size, and the mask hides what is not written yet. Rows that have ended continue with the others. On a GPU
the second step is captured and later ones are replayed; elsewhere every step runs as it is written here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


class Steps:
    """Decodes at most `count` steps from `cache`, whose tails hold the questions.

    `ids` (B, 1) at `positions` (B, 1) come next; `visible` (B, columns) bool marks what each row sees of the tails.
    """

    def __init__(
        self, model: PreTrainedModel, cache: Cache, ids: Tensor, positions: Tensor, visible: Tensor, count: int
    ) -> None:
        self.model, self.cache, self.graph, self.taken = model, cache, None, 0
        self.moved, self.width = torch.zeros((), dtype=torch.long, device=ids.device), visible.shape[1]
        for layer in cache.layers:
            layer.fix(count, self.moved)
        self.ids, self.positions = ids.clone(), positions.clone()
        self.visible = torch.nn.functional.pad(visible, (0, count), value=False)
        self.last = last_of(ids)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Returns the likeliest next ids (B, 1), in a tensor that the next step overwrites."""
        if self.graph is not None:
            self.graph.replay()
        elif self.taken and self.ids.is_cuda:
            self.capture()
        else:
            self.step()
        self.taken += 1
        return self.ids

    def step(self) -> None:
        """Decodes one token of every row."""
        self.visible.index_fill_(1, (self.moved + self.width).view(1), True)
        output = self.model(
            input_ids=self.ids, attention_mask=self.visible[:, None, None], position_ids=self.positions,
            past_key_values=self.cache, use_cache=True, logits_to_keep=self.last,
        )  # fmt: skip
        self.ids.copy_(output.logits[:, -1].max(-1, keepdim=True).indices)
        self.positions += 1
        self.moved += 1

    def capture(self) -> None:
        """Captures a step, once the first one has compiled and allocated everything, and replays it: this step."""
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()
        self.graph.replay()


def last_of(ids: Tensor) -> Tensor | int:
    """Returns `logits_to_keep` for the last token. On a CPU it is an index: 1 makes a strided slice, with which the LM
    head is fifty times slower in bfloat16. An index would have to be copied to a GPU in every step."""
    return torch.tensor([ids.shape[1] - 1]) if ids.device.type == "cpu" else 1
