"""The loop that writes answers from compressed caches: to any number of questions over one context,
or over several.

Questions of different lengths are padded on the left, after the restore cache; the mask hides the
padding and the positions skip it, so a batch answers as each question would alone. Where layers
keep states, which padding would change, questions of different lengths are read by passes of their
own and then decoded together. Decoding stops at any EOS id, also when it comes first. A row leaves
the batch when its answer has ended, except in steps of a fixed shape, which compute all rows and
drop the tokens of those that have ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.cache_utils import Cache

from restorekv.cache.flat import Block, FlatLayer, StackedLayer
from restorekv.cache.multi_context import MultiContextLayer, SeparateStates, fork_caches
from restorekv.cache.ragged import ContextLayer, RaggedCache, list_tails
from restorekv.cache.states import (
    EmptyLayer,
    StateLayer,
    join_states,
    list_state_layers,
    split_joined_states,
)
from restorekv.errors import RestoreKVError
from restorekv.generation import fixed_steps, step_self_test
from restorekv.generation.fixed_steps import (
    FixedSteps,
    can_graph,
    find_likeliest,
)
from restorekv.generation.sampling import refuse_not_finite
from restorekv.model.attention import install_attention
from restorekv.model.attention.reference import make_causal_mask
from restorekv.model.cache_argument import pass_cache
from restorekv.model.channels import find_shown_ids
from restorekv.model.position_limits import check_question_positions
from restorekv.model.prompt import check_vocabulary
from restorekv.model.shape import leave_out_router_logits
from restorekv.model.support import refuse_autocast
from restorekv.model.tokenize import decode_continuation, decode_ids

BATCH = 16
# Set when the asyncio task that waits for the answer is cancelled.
CANCELLED: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)
T = TypeVar("T")


@dataclass(frozen=True)
class PaddedPrompts:
    """The prompts of a batch, padded on the left to the longest of them.

    Args:
        ids: (B, q), 0 where padding is.
        positions: (B, q), the position of each id in its text; padding has the one of the first id.
        visible: (B, n + q) bool marks the columns of the tail that a row sees: its n restore tokens
            and its own prompt, not the padding.
    """

    ids: Tensor
    positions: Tensor
    visible: Tensor


class Sampler(Protocol):
    """Chooses the tokens of one answer, greedily or at random."""

    def sample(self, logits: Tensor) -> int:
        """Return the next id; logits (V,) are the model's."""
        ...

    def ends(self) -> bool:
        """Return whether the answer ends with its latest token."""
        ...


def generate_ids(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    caches: RaggedCache | Sequence[RaggedCache],
    prompts: Sequence[Tensor],
    max_new_tokens: int | Sequence[int],
    first_may_stop: bool = True,
    graph: bool | None = None,
    samplers: Sequence[Sampler] | None = None,
    batch: int = BATCH,
) -> list[Tensor]:
    """Return the ids of each answer, with the EOS that ended it, if any.

    Args:
        model: The model that made the caches.
        tokenizer: Its tokenizer.
        caches: One cache for all prompts, or one for each; neighbors with one cache share its
            context.
        prompts: The ids (q,) or (1, q) of the questions.
        max_new_tokens: How long an answer may be: one limit, or one for each prompt.
        first_may_stop: Whether an EOS id that comes first ends an answer; in kvpress it does not.
        graph: Use steps of fixed shapes, on a GPU a CUDA graph; without samplers only. None uses a
            CUDA graph on a GPU when there are no samplers.
        samplers: What chooses the tokens of each answer; None takes the likeliest ones.
        batch: How many answers are written at once.

    Raises:
        RestoreKVError: A limit is not a number of at least 1, a prompt is empty or has an id that
            the model does not know, the logits are not finite, or the task was cancelled.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    for row, token in generate_tokens(
        model, tokenizer, caches, prompts, max_new_tokens, first_may_stop, graph, samplers, batch
    ):
        answers[row].append(token)
    return [torch.tensor(answer, dtype=torch.long) for answer in answers]


def generate_tokens(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    caches: RaggedCache | Sequence[RaggedCache],
    prompts: Sequence[Tensor],
    max_new_tokens: int | Sequence[int],
    first_may_stop: bool = True,
    graph: bool | None = False,
    samplers: Sequence[Sampler] | None = None,
    batch: int = BATCH,
) -> Iterator[tuple[int, int]]:
    """Yield the answers token by token, as (row, id). A consumer may raise or stop at any token.

    Args:
        model: The model that made the caches.
        tokenizer: Its tokenizer.
        caches: One cache for all prompts, or one for each.
        prompts: The ids (q,) or (1, q) of the questions.
        max_new_tokens: How long an answer may be: one limit, or one for each prompt.
        first_may_stop: Whether an EOS id that comes first ends an answer; in kvpress it does not.
        graph: Use steps of fixed shapes, on a GPU a CUDA graph; without samplers only. None uses a
            CUDA graph on a GPU when there are no samplers.
        samplers: What chooses the tokens of each answer; None takes the likeliest ones.
        batch: How many answers are written at once.

    Raises:
        RestoreKVError: A limit is not a number of at least 1, a prompt is empty, has an id that the
            model does not know or ends beyond the model's positions, the logits are not finite, or
            the task was cancelled.
    """
    # Steps of fixed shapes take the likeliest token themselves.
    assert not (graph and samplers), "a graph has no samplers"
    if graph is None:
        graph = not samplers and fixed_steps.can_record(model.device)
    prompts = [prompt.flatten().cpu() for prompt in prompts]
    limits = parse_limits(max_new_tokens, len(prompts))
    if isinstance(caches, RaggedCache):
        caches = [caches] * len(prompts)
    for prompt in prompts:
        if not len(prompt):
            # In a batch its row would answer what pads it.
            raise RestoreKVError("A question has no tokens; ask something.")
        check_vocabulary(model, prompt)
    firsts = [cache.get_seq_length() for cache in caches]
    check_question_positions(model, firsts, [len(prompt) for prompt in prompts], limits)
    stop_ids = get_stop_ids(model, tokenizer)
    for start in range(0, len(prompts), batch):
        part = slice(start, start + batch)
        written = decode_batch(
            model,
            fork_caches(caches[part], [len(prompt) for prompt in prompts[part]]),
            pad_prompts(model, caches[part], prompts[part]),
            limits[part],
            stop_ids,
            first_may_stop,
            graph,
            samplers[part] if samplers else None,
        )
        for row, token in written:
            yield start + row, token


def parse_limits(max_new_tokens: int | Sequence[int], count: int) -> list[int]:
    """Return a limit for each of `count` answers.

    Args:
        max_new_tokens: One limit for all answers, or a list with one for each.
        count: How many answers there are.

    Raises:
        RestoreKVError: A limit is not a number of at least 1, or the list has a different length.
    """
    limits: list[Any] = [max_new_tokens] * count
    if isinstance(max_new_tokens, list | tuple):
        limits = list(max_new_tokens)
    if len(limits) != count or any(type(limit) is not int or limit < 1 for limit in limits):
        raise RestoreKVError(
            "max_new_tokens is a number of at least 1, or one such number per question."
        )
    return limits


async def run_in_thread(ask: Callable[[], T]) -> T:
    """Return what `ask` returns; other tasks of the event loop run in the meantime.

    If the task is cancelled, generation ends at the next token, and this waits until it has.

    Args:
        ask: Generates answers with `decode_batch`; runs in a thread.
    """
    cancelled = threading.Event()

    def run() -> T:
        CANCELLED.set(cancelled)  # in the thread's own copy of the task's context
        return ask()

    task = asyncio.ensure_future(asyncio.to_thread(run))
    try:
        # Cancelling the task must not orphan the thread, which holds the model.
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        cancelled.set()
        await asyncio.gather(task, return_exceptions=True)
        raise


def decode_batch(
    model: PreTrainedModel,
    cache: Cache,
    prompts: PaddedPrompts,
    limits: Sequence[int],
    stop_ids: set[int],
    first_may_stop: bool = True,
    graph: bool = False,
    samplers: Sequence[Sampler] | None = None,
) -> Iterator[tuple[int, int]]:
    """Yield (row, id) for every token of a batch of answers.

    Args:
        model: The model that made the cache.
        cache: A cache with a tail for every row, as from `fork_caches`. Each tail grows by all
            tokens of its row except the last.
        prompts: The questions, from `pad_prompts`.
        limits: How many tokens each answer may have.
        stop_ids: The EOS ids, which end an answer.
        first_may_stop: Whether an EOS id that comes first ends an answer; in kvpress it does not.
        graph: Decode in steps of a fixed shape, which a GPU replays as a CUDA graph.
        samplers: What chooses the tokens of each answer; None takes the likeliest ones.

    Raises:
        RestoreKVError: The logits are not finite, or the task was cancelled.
    """
    # The user may have set a different attention function since, to look at weights.
    install_attention(model)
    groups = make_groups(cache, prompts, limits, samplers)
    rows = [row for group in groups for row in group.rows]
    # The pass over the prompts writes the first token of every answer.
    yield from _report_tokens(write_tokens(model, groups, stop_ids, first_may_stop))
    if all(row.ended for row in rows):
        return
    # Unlike the pass over the prompts, all later ones have the same shape, so that a CUDA graph can
    # replay them.
    steps = None
    # Steps of fixed shapes go through the whole batch, whose states may be in several forks.
    has_states = any(list_state_layers(group.layers) for group in groups)
    if graph and not has_states and can_graph(model, prompts.ids.device):
        ids = torch.cat([group.ids for group in groups])
        positions = prompts.positions[:, -1:] + 1
        steps = FixedSteps(model, cache, ids, positions, prompts.visible, max(limits))
    while not all(row.ended for row in rows):
        if steps:
            written = _write_fixed_tokens(steps, rows, stop_ids, first_may_stop)
        else:
            # Rows that have ended leave the batch.
            groups = [group for group in groups if group.drop_ended()]
            written = write_tokens(model, groups, stop_ids, first_may_stop)
        yield from _report_tokens(written)


def _write_fixed_tokens(
    steps: FixedSteps, rows: Sequence[ActiveRow], stop_ids: set[int], first_may_stop: bool
) -> list[tuple[ActiveRow, int]]:
    """Make one step of fixed shape; return each row that has not ended, with its token."""
    # The step computes rows that have ended as well; their tokens are dropped.
    tokens = steps()[:, 0].tolist()
    written = [(row, tokens[row.number]) for row in rows if not row.ended]
    # -1 marks logits that are not finite (`find_likeliest`).
    if min(token for _, token in written) < 0:
        refuse_not_finite()
    for row, token in written:
        row.count_token(token, stop_ids, first_may_stop)
    return written


def _report_tokens(written: Iterable[tuple[ActiveRow, int]]) -> Iterator[tuple[int, int]]:
    """Yield (row's number, id) of a step's tokens, unless the task was cancelled meanwhile."""
    cancelled = CANCELLED.get()
    if cancelled and cancelled.is_set():
        raise RestoreKVError("The answer was cancelled; ask again.")
    for row, token in written:
        yield row.number, token


@dataclass(eq=False)
class ActiveRow:
    """An answer that is being written.

    Args:
        number: The place of its prompt in the caller's list.
        limit: How many tokens it may have.
        sampler: Picks its tokens; None takes the likeliest ones.
        count: How many tokens it has.
        ended: Whether it is complete.
    """

    number: int
    limit: int
    sampler: Sampler | None = None
    count: int = 0
    ended: bool = False

    def count_token(self, token: int, stop_ids: set[int], first_may_stop: bool = True) -> None:
        """Note that a token was written, and whether it ended the answer.

        Args:
            token: The token.
            stop_ids: The EOS ids.
            first_may_stop: Whether one of them ends the answer if it is its first token.
        """
        self.count += 1
        stopped = token in stop_ids and (first_may_stop or self.count > 1)
        self.ended = (
            stopped or self.count >= self.limit or bool(self.sampler and self.sampler.ends())
        )


Row = TypeVar("Row", bound=ActiveRow)


@dataclass(eq=False)
class Group(Generic[Row]):
    """Rows of one context with tails that end at the same column, and the ids that the model reads
    next.

    Args:
        layers: The cache layers, one for each layer of the model; each has a tail for every row.
        rows: The answers.
        ids, positions: What is read next, (B, q).
        visible: (B, columns + q) bool marks what each row sees of its tail, what is read next
            included; None for all.
        unfinished: More of the prompt follows what is read next, so no token is chosen after it.
    """

    layers: list[ContextLayer]
    rows: list[Row]
    ids: Tensor
    positions: Tensor
    visible: Tensor | None
    unfinished: bool = False

    def make_block(self) -> Block:
        """Return what the next pass reads."""
        count, queries = self.ids.shape
        if self.visible is None:
            return Block(count, queries, None)
        mask = self.visible[:, None, None]
        if queries > 1:
            # (B, 1, 1, columns) and (q, columns) make (B, 1, q, columns).
            mask = mask & make_causal_mask(queries, self.visible.shape[1], mask.device)
        return Block(count, queries, mask)

    def advance(self, ids: Tensor) -> None:
        """Continue with the chosen ids (B, 1), which the next pass reads."""
        self.ids = ids
        self.positions = self.positions[:, -1:] + 1
        if self.visible is not None:
            # Every row sees what it writes itself.
            self.visible = torch.nn.functional.pad(self.visible, (0, 1), value=True)

    def drop_ended(self) -> bool:
        """Drop the rows that have ended; return whether any is left."""
        unended = [index for index, row in enumerate(self.rows) if not row.ended]
        if unended and len(unended) < len(self.rows):
            indices = torch.tensor(unended)
            for layer in self.layers:
                layer.batch_select_indices(indices)
            indices = indices.to(self.ids.device)
            self.ids = self.ids[indices]
            self.positions = self.positions[indices]
            self.visible = None if self.visible is None else self.visible[indices]
        self.rows = [self.rows[index] for index in unended]
        return bool(unended)


def make_groups(
    cache: Cache,
    prompts: PaddedPrompts,
    limits: Sequence[int],
    samplers: Sequence[Sampler] | None,
) -> list[Group[ActiveRow]]:
    """Return the rows of a batch, a group for each context.

    Args:
        cache: A cache with a tail for every row, as from `fork_caches`.
        prompts: The questions, from `pad_prompts`.
        limits: How many tokens each answer may have.
        samplers: What chooses the tokens of each answer; None takes the likeliest ones.
    """
    has_padding = not bool(prompts.visible.all())
    prompt_width = prompts.ids.shape[1]
    contexts_by_layer: list[list[Any]] = []
    for layer in cache.layers:
        is_joined = isinstance(layer, MultiContextLayer | SeparateStates)
        contexts_by_layer.append(layer.contexts if is_joined else [layer])
    groups = []
    first = 0
    # The layers of one context, with a tail for each of its rows.
    for layers in zip(*contexts_by_layer, strict=True):
        tail = list_tails(layers)[0]
        indices = range(first, first + len(tail.keys))
        rows = []
        for index in indices:
            sampler = samplers[index] if samplers else None
            rows.append(ActiveRow(index, limits[index], sampler))
        own = slice(first, indices.stop)
        width = prompt_width
        tail_mask = None
        if list_state_layers(layers):
            # Rows of one fork read equally many tokens, without any padding (`fork_caches`).
            width = int(prompts.visible[first, -prompt_width:].sum())
        elif has_padding:
            # The mask is as wide as the longest restore cache of the batch; this group's may be
            # shorter.
            columns = tail.columns + prompt_width
            tail_mask = prompts.visible[own, prompts.visible.shape[1] - columns :]
        ids = prompts.ids[own, prompt_width - width :]
        positions = prompts.positions[own, prompt_width - width :]
        groups.append(Group(list(layers), rows, ids, positions, tail_mask))
        first = indices.stop
    return groups


@torch.no_grad()
def write_tokens(
    model: PreTrainedModel,
    groups: Sequence[Group[Row]],
    stop_ids: set[int],
    first_may_stop: bool = True,
    on_logits: Callable[[Group[Row], Tensor], None] | None = None,
) -> list[tuple[Row, int]]:
    """Run one pass of the model and return the next token of every row whose prompt is prefilled.

    Args:
        model: The model that made the caches.
        groups: What the pass reads; their tails grow by it.
        stop_ids: The EOS ids, which end an answer.
        first_may_stop: Whether an EOS id that comes first ends an answer; in kvpress it does not.
        on_logits: Called with each group that writes and its logits (B, V).

    Raises:
        RestoreKVError: The logits are not finite.
    """
    logits, commit_states = forward_groups(model, groups)
    writing = [group for group in groups if not group.unfinished]
    rows = [row for group in writing for row in group.rows]
    if not rows:
        commit_states()
        return []
    sizes = [len(group.rows) for group in writing]
    # Before anything advances, so that the pass can run again if this fails.
    if on_logits:
        for group, group_logits in zip(writing, logits.split(sizes), strict=True):
            on_logits(group, group_logits)
    samplers = [row.sampler for row in rows if row.sampler is not None]
    ids, tokens = sample_ids(logits, samplers)
    commit_states()
    for group, group_ids in zip(writing, ids.split(sizes), strict=True):
        group.advance(group_ids)
    for row, token in zip(rows, tokens, strict=True):
        row.count_token(token, stop_ids, first_may_stop)
    return list(zip(rows, tokens, strict=True))


def forward_groups(
    model: PreTrainedModel, groups: Sequence[Group]
) -> tuple[Tensor, Callable[[], None]]:
    """Run one pass over the next ids of every group.

    The tokens of all groups are laid end to end, so that a row with one token and one with many
    share the pass.

    Returns:
        The logits (rows, V) of the groups that have no more of their prompt to read, and a function
        that advances the states of layers that keep them. It is called once nothing can fail any
        more: tails can be cut, and states cannot.
    """
    # Between two pieces of a stream, the program may set another attention function or autocast.
    install_attention(model)
    refuse_autocast(model.device.type)
    if list_state_layers(groups[0].layers):
        return _forward_stacked(model, groups)
    blocks = [group.make_block() for group in groups]
    layers = []
    # At each depth, the layers of all groups become one layer of the pass.
    for at_depth in zip(*(group.layers for group in groups), strict=True):
        layers.append(FlatLayer(at_depth, blocks))
    ids = torch.cat([group.ids.flatten() for group in groups])[None]
    positions = torch.cat([group.positions.flatten() for group in groups])[None]
    # Logits are wanted at the last token of every row whose prompt is prefilled after this pass.
    # If there is no such row, those of one token are computed and dropped.
    last: list[int] = []
    first = 0
    for group, block in zip(groups, blocks, strict=True):
        if not group.unfinished:
            # The last token of each row, which has `queries` of them.
            last += range(first + block.queries - 1, first + block.tokens, block.queries)
        first += block.tokens
    wanted: int | Tensor = 0  # all tokens, to transformers
    if len(last) < first:
        wanted = torch.tensor(last or [first - 1], device=ids.device)
    output = model(
        input_ids=ids,
        attention_mask=ids.new_ones(1, 1, 1, 1, dtype=torch.bool),  # the blocks have the masks
        position_ids=positions,
        **pass_cache(model, Cache(layers=layers)),
        **leave_out_router_logits(model),
        use_cache=True,
        logits_to_keep=wanted,
    )
    logits = output.logits[0]
    # If the program replaced the model's forward method, it may ignore `logits_to_keep` and return
    # the logits of all tokens.
    if len(last) < first and len(logits) == first:
        return logits[last], _commit_nothing
    return logits[: len(last)], _commit_nothing


def _commit_nothing() -> None:
    """Do nothing, for a model without states."""


def _forward_stacked(
    model: PreTrainedModel, groups: Sequence[Group]
) -> tuple[Tensor, Callable[[], None]]:
    """Run passes over the next ids of every group, as `forward_groups` does, for models with
    states.

    The groups that read equally many tokens share a pass, in which rows are not laid end to end: a
    layer with states computes each from its first token to its last.
    """
    by_length: dict[int, list[Group]] = {}
    for group in groups:
        by_length.setdefault(group.ids.shape[1], []).append(group)
    logits: dict[int, Tensor] = {}  # (rows, V) by the group's id()
    advanced: list[tuple[StateLayer, list[StateLayer], list[int]]] = []
    for together in by_length.values():
        blocks = [group.make_block() for group in together]
        rows = [block.rows for block in blocks]
        layers: list[Any] = []
        for at_depth in zip(*(group.layers for group in together), strict=True):
            if isinstance(at_depth[0], EmptyLayer):
                layers.append(at_depth[0])
            elif isinstance(at_depth[0], StateLayer):
                joined = join_states(at_depth)
                advanced.append((joined, list(at_depth), rows))
                layers.append(joined)
            else:
                layers.append(StackedLayer(at_depth, blocks))
        ids = torch.cat([group.ids for group in together])
        output = model(
            input_ids=ids,
            attention_mask=ids.new_ones(1, 1, 1, 1, dtype=torch.bool),  # the blocks have the masks
            position_ids=torch.cat([group.positions for group in together]),
            **pass_cache(model, Cache(layers=layers)),
            **leave_out_router_logits(model),
            use_cache=True,
            logits_to_keep=fixed_steps.locate_last_logits(ids),
        )
        for group, own in zip(together, output.logits[:, -1].split(rows), strict=True):
            logits[id(group)] = own

    def commit_states() -> None:
        for joined, own_layers, rows in advanced:
            split_joined_states(joined, own_layers, rows)

    wanted = [logits[id(group)] for group in groups if not group.unfinished]
    # Without a row that writes, nobody looks at the logits.
    return torch.cat(wanted or [next(iter(logits.values()))[:1]]), commit_states


def pad_prompts(
    model: PreTrainedModel, caches: Sequence[RaggedCache], prompts: Sequence[Tensor]
) -> PaddedPrompts:
    """Return the prompts of a batch on the model's device, padded on the left.

    Args:
        model: The model that reads them.
        caches: The cache of each prompt, with its restore tokens, if any, in the tail.
        prompts: The ids (q,) of each question.
    """
    width = max(len(prompt) for prompt in prompts)
    padded = []
    for prompt in prompts:
        padded.append(torch.nn.functional.pad(prompt, (width - len(prompt), 0)))
    ids = torch.stack(padded)
    padding = torch.tensor([[width - len(prompt)] for prompt in prompts])
    first_positions = torch.tensor([[cache.get_seq_length()] for cache in caches])
    columns = torch.arange(width)
    # Padding has the position of the first token; nothing sees it.
    positions = first_positions + (columns - padding).clamp(min=0)
    # The tail holds the restore cache before the question, which every row sees.
    restore_columns = max(cache.columns for cache in caches)
    restore_mask = padding.new_ones(len(prompts), restore_columns, dtype=torch.bool)
    visible = torch.cat([restore_mask, columns >= padding], -1)
    device = model.device
    return PaddedPrompts(ids.to(device), positions.to(device), visible.to(device))


def sample_ids(logits: Tensor, samplers: Sequence[Sampler]) -> tuple[Tensor, list[int]]:
    """Return the next ids as a tensor (B, 1) and as numbers: the likeliest ones without
    samplers.

    Args:
        logits: (B, V), a row for each answer.
        samplers: One for each row, or none.
    """
    if not samplers:
        ids, checked = find_likeliest(logits)
        likeliest = checked[:, 0].tolist()
        # -1 marks logits that are not finite.
        if min(likeliest) < 0:
            refuse_not_finite()
        return ids, likeliest
    tokens = [sampler.sample(row) for sampler, row in zip(samplers, logits, strict=True)]
    return torch.tensor(tokens, device=logits.device)[:, None], tokens


def decode_answer(
    tokenizer: Tokenizer, ids: Sequence[int], stop_ids: set[int], continues: bool = False
) -> str:
    """Return the text of an answer, without the EOS that ended it and the channels that are not
    shown.

    Args:
        tokenizer: The model's tokenizer.
        ids: The ids of the answer.
        stop_ids: The EOS ids.
        continues: Whether it continues a text, so that a space at its start belongs to it.
    """
    # The tokenizer leaves out special tokens, but an EOS id need not be one.
    if ids and ids[-1] in stop_ids:
        ids = ids[:-1]
    shown = find_shown_ids(tokenizer, ids)
    if continues:
        return decode_continuation(tokenizer, shown)
    return decode_ids(tokenizer, shown, skip_special_tokens=True)


def get_stop_ids(model: PreTrainedModel, tokenizer: Tokenizer) -> set[int]:
    """Return every EOS id of the generation config, or else the tokenizer's."""
    ids: Any = model.generation_config.eos_token_id
    if ids is None:
        ids = tokenizer.eos_token_id
    return collect_ids(ids)


def collect_ids(ids: Any) -> set[int]:
    """Return the ids of an `eos_token_id`: one, several or none."""
    if ids is None:
        return set()
    return set(torch.as_tensor(ids).flatten().tolist())


# This module imports the self-test, which therefore is given what it has to test.
step_self_test.register_graph(FixedSteps, pad_prompts)
