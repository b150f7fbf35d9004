"""A logits processor that makes a model write a given text."""

import torch
from transformers import LogitsProcessor


class Dictate(LogitsProcessor):
    """A processor that makes the model write a text, whatever it would say."""

    def __init__(self, tokenizer, text):
        self.ids = tokenizer.encode(text, add_special_tokens=False)
        self.first = None  # tokens that were read before the answer

    def __call__(self, ids, scores):
        if self.first is None:
            self.first = ids.shape[1]
        forced = torch.full_like(scores, -torch.inf)
        forced[0, self.ids[ids.shape[1] - self.first]] = 0
        return forced
