"""Greedy answers from compressed caches: any number of questions over one shared context, or over several.

Questions of different lengths are padded on the left, behind the restore cache; the mask hides the padding and
the positions skip it, so a batch answers as each question would alone. Decoding stops at any EOS id, also when
it comes first; a batch is as small as the answers that are still being written.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.cache_utils import Cache

from restorekv.cache.multi_context import forked
from restorekv.cache.ragged import RaggedCache
from restorekv.compression.decode_graph import Steps, last_of
from restorekv.errors import RestoreKVError
from restorekv.model.attention.naive import causal
from restorekv.model.prompt import Context, question_ids, tell_beyond

BATCH = 16
OnText = Callable[[str], None]


def ask(
    model: PreTrainedModel, tokenizer: Tokenizer, context: Context, cache: RaggedCache, questions: Sequence[str],
    max_new_tokens: int | Sequence[int] = 128, on_text: OnText | None = None, answer_prefix: str = "",
    graph: bool = False,
) -> list[str]:  # fmt: skip
    """Returns one answer per question; `cache` itself does not change. The options are those of `ask_each`."""
    rows = [(context, cache, question) for question in questions]
    return ask_each(model, tokenizer, rows, max_new_tokens, on_text, answer_prefix, graph)


def ask_each(
    model: PreTrainedModel, tokenizer: Tokenizer, rows: Sequence[tuple[Context, RaggedCache, str]],
    max_new_tokens: int | Sequence[int] = 128, on_text: OnText | None = None, answer_prefix: str = "",
    graph: bool = False,
) -> list[str]:  # fmt: skip
    """Returns the answer to each row's question from the row's context and cache.

    `max_new_tokens` is one limit or one per row; `on_text` gets the pieces of a single row's answer; `graph` makes
    every token's step the same work, on a GPU a CUDA graph (decode_graph.py).
    """
    limits = [max_new_tokens] * len(rows) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != len(rows) or any(limit < 1 for limit in limits):
        raise RestoreKVError("max_new_tokens is a number of at least 1, or one such number per question.")
    if on_text and len(rows) > 1:
        raise RestoreKVError("Only a single question can be streamed; ask the others one by one.")
    prompts = [question_ids(tokenizer, context, question, answer_prefix)[0] for context, _, question in rows]
    stops = stop_ids(model, tokenizer)
    pieces = Pieces(tokenizer, stops, on_text) if on_text else None
    ids = answer_ids(model, tokenizer, [cache for _, cache, _ in rows], prompts, limits, pieces, graph=graph)
    answers = [answer_text(tokenizer, answer.tolist(), stops) for answer in ids]
    if pieces and len(answers[0]) > pieces.sent:
        on_text(answers[0][pieces.sent :])
    return answers


def answer_ids(
    model: PreTrainedModel, tokenizer: Tokenizer, caches: RaggedCache | Sequence[RaggedCache],
    prompts: Sequence[Tensor], max_new_tokens: int | Sequence[int], on_ids: Callable[[list[int]], None] | None = None,
    first_may_stop: bool = True, graph: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Returns the ids of each answer to prompts (q,) or (1, q), with the EOS that ended it, if any.

    `caches` is one for all prompts or one for each; neighbors with one cache share its context.
    """
    prompts = [prompt.flatten().cpu() for prompt in prompts]
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    caches = [caches] * len(prompts) if isinstance(caches, RaggedCache) else list(caches)
    ends = [each.get_seq_length() + len(ids) + limit for each, ids, limit in zip(caches, prompts, limits, strict=True)]
    tell_beyond(model, max(ends, default=0), "A question with the longest answer allowed")
    answers, stops = [], stop_ids(model, tokenizer)
    for start in range(0, len(prompts), BATCH):
        part = slice(start, start + BATCH)
        answers += greedy(model, caches[part], prompts[part], limits[part], stops, on_ids, first_may_stop, graph)
    return [torch.tensor(answer, dtype=torch.long) for answer in answers]


@torch.no_grad()
def greedy(
    model: PreTrainedModel, caches: Sequence[RaggedCache], prompts: Sequence[Tensor], limits: Sequence[int],
    stops: set[int], on_ids: Callable[[list[int]], None] | None = None, first_may_stop: bool = True,
    graph: bool = False,
) -> list[list[int]]:  # fmt: skip
    """Returns the generated ids of each row, a cache and a prompt of ids (q,), with the EOS that ended it.

    `first_may_stop` is false where an EOS id that comes first ends nothing, as in kvpress.
    """
    cache, (ids, positions, visible) = forked(caches), padded(model, caches, prompts)
    hides, width = not bool(visible.all()), ids.shape[1]
    mask = visible[:, None, None] & causal(width, visible.shape[1], model.device) if hides else None
    answers, running = [[] for _ in prompts], list(range(len(prompts)))

    def take(tokens: list[int]) -> list[int]:
        """Returns the places in `running` of the rows that continue after these tokens."""
        for row, token in zip(running, tokens, strict=True):
            answers[row].append(token)
        if on_ids:
            on_ids(answers[0])
        ends = [
            token in stops and (first_may_stop or len(answers[row]) > 1)
            for row, token in zip(running, tokens, strict=True)
        ]
        return [place for place, row in enumerate(running) if not ends[place] and len(answers[row]) < limits[row]]

    ids = next_ids(model, ids, mask, positions, cache)
    going, positions = take(ids[:, 0].tolist()), positions[:, -1:] + 1
    steps = Steps(model, cache, ids, positions, visible, max(limits)) if graph and going else None
    while going:
        chosen = [running[place] for place in going]
        if steps:
            tokens, running = steps()[:, 0].tolist(), chosen
            going = take([tokens[row] for row in running])
            continue
        if len(going) < len(running):
            places = torch.tensor(going)
            cache.batch_select_indices(places)
            ids, positions, visible = (x[places.to(x.device)] for x in (ids, positions, visible))
        running, visible = chosen, torch.nn.functional.pad(visible, (0, 1), value=True)
        ids = next_ids(model, ids, visible[:, None, None] if hides else None, positions, cache)
        going, positions = take(ids[:, 0].tolist()), positions + 1
    return answers


def padded(model: PreTrainedModel, caches: Sequence[RaggedCache], prompts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns ids and positions (B, q) of the prompts, padded on the left, and the mask (B, n + q) of the tails."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
    pad = torch.tensor([[width - len(prompt)] for prompt in prompts])
    first = torch.tensor([[each.get_seq_length()] for each in caches])
    columns = torch.arange(width)
    restored = max(each.restore for each in caches)
    visible = torch.cat([pad.new_ones(len(pad), restored, dtype=torch.bool), columns >= pad], -1)
    return tuple(x.to(model.device) for x in (ids, first + (columns - pad).clamp(min=0), visible))


def next_ids(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache) -> Tensor:
    """Returns the likeliest ids (B, 1) after ids (B, q) under a mask (B, 1, q, columns), causal for None."""
    output = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
        logits_to_keep=last_of(ids),
    )  # fmt: skip
    return output.logits[:, -1].max(-1, keepdim=True).indices  # the first of equals, as argmax, which is slower


def stop_ids(model: PreTrainedModel, tokenizer: Tokenizer) -> set[int]:
    """Returns every EOS id of the generation config, or else the tokenizer's."""
    ids = model.generation_config.eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    return set(ids) if isinstance(ids, list | tuple) else {ids} - {None}


def generate_inputs(
    tokenizer: Tokenizer, context: Context, cache: RaggedCache, question: str, answer_prefix: str = "",
    plain: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Returns inputs for model.generate(..., past_key_values=cache.fork()), or cache.to_dynamic_cache() if `plain`.

    As always with a filled cache, ids and mask span everything seen: context, one placeholder per restore token or
    position of an offset, question. A plain cache has seen only what it holds: placeholders stand for that, and
    positions say where the question goes on. The answer is result[:, input_ids.shape[1]:].
    """
    asked = question_ids(tokenizer, context, question, answer_prefix)
    placeholder = tokenizer.pad_token_id or 0
    if plain:
        held, first = cache.layers[0].bounds[1] + cache.restore, cache.get_seq_length()
        ids = torch.cat([asked.new_full((1, held), placeholder), asked], -1)
        positions = torch.cat([torch.arange(held), torch.arange(first, first + asked.shape[1])])[None]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}
    between = cache.positions - context.positions + cache.restore
    ids = torch.cat([context.ids, asked.new_full((1, between), placeholder), asked], -1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def answer_text(tokenizer: Tokenizer, ids: list[int], stops: set[int]) -> str:
    """Returns the text of an answer, without the EOS that ended it."""
    return tokenizer.decode(ids[:-1] if ids and ids[-1] in stops else ids, skip_special_tokens=True)


class Pieces:
    """Passes on the text of a growing answer as soon as its characters are complete."""

    def __init__(self, tokenizer: Tokenizer, stops: set[int], on_text: OnText) -> None:
        self.tokenizer, self.stops, self.on_text, self.sent = tokenizer, stops, on_text, 0

    def __call__(self, ids: list[int]) -> None:
        text = answer_text(self.tokenizer, ids, self.stops)
        if len(text) > self.sent and not text.endswith("\ufffd"):
            self.on_text(text[self.sent :])
            self.sent = len(text)
