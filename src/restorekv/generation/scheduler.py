"""Continuous batching with chunked prefill and preemption: a request joins the batch at the next
token, and each of its rows leaves with its last one.

A step is one pass of the model. It decodes a token of every running answer, and prefills a chunk of
the prompts that are not prefilled yet, PREFILL_CHUNK tokens in all; so a question with a thousand
messages costs the others one chunk a step.

Fairness: requests begin in the order in which they came, and at most as many as a pass may have
rows. Each then has a row as soon as its prompt is prefilled, whatever else runs: further samples of
a request take only the rows that no request needs, and a sample is preempted (it loses its row, but
keeps its cache and tokens) when a request comes that has none. Half of the PREFILL_CHUNK tokens go
to the oldest prompt and the rest to the shortest others, so that neither a long nor a short
question waits for all others.

Rows of one context are decoded as one group: a tensor of tails, padded to the longest. A row joins
as long as the padding is not much larger than what the rows hold (`_can_join`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from restorekv.cache.flat import gather_rows, share_tail
from restorekv.cache.ragged import RaggedCache, list_tails
from restorekv.generation.decoding import BATCH, ActiveRow, Group, write_tokens
from restorekv.generation.sampling import TokenSampler

PREFILL_CHUNK = 256  # tokens of prompts that are prefilled in one step
# Tokens; a smaller share is given only if it finishes the prompt, or to the oldest.
MIN_PREFILL_CHUNK = 32
FREE_PADDING = 64  # columns of padding that are always allowed in a row
TAIL_CAPACITY = 32  # columns for new tokens that the tails of a new group have


class IsolatedSampler:
    """A wrapper of a row's sampler: an error of the sampler ends its own request and no other.

    Args:
        sampler: The sampler, which may raise anything.
        request: The request in which an error is noted.
        stand_in: The id that is returned after an error.
    """

    def __init__(self, sampler: TokenSampler, request: Request, stand_in: int) -> None:
        self.sampler = sampler
        self.request = request
        self.stand_in = stand_in

    def sample(self, logits: Tensor) -> int:
        """Return the next token of logits (V,); after an error, note it and return `stand_in`."""
        try:
            return self.sampler.sample(logits)
        except Exception as error:
            self.request.error = error
            # The pass continues for the other rows, so this one needs an id: an EOS, if there is
            # one.
            return self.stand_in

    def ends(self) -> bool:
        """Return whether the answer ends here: by its sampler, or by an error."""
        try:
            return self.request.error is not None or self.sampler.ends()
        except Exception as error:
            self.request.error = error
            return True


@dataclass(eq=False)
class Request:
    """A question with a row for each of its answers.

    Args:
        cache: The context's cache; each answer is written on a fork of it.
        prompt: The ids (q,) that the model reads after it.
        limit: How many tokens an answer may have.
        samplers: One for each answer.
        cancelled: Returns whether the client no longer waits for the answers; called before every
            step.
        label: Whatever the caller needs to recognize the request.
    """

    cache: RaggedCache
    prompt: Tensor
    limit: int
    samplers: Sequence[TokenSampler]
    cancelled: Callable[[], bool] = lambda: False
    label: object = None
    # The scheduler sets all fields below.
    error: Exception | None = None  # of one of its rows
    arrival_step: int = 0  # how many steps had been taken when the request came
    prefill_steps: int = 0  # how many steps have prefilled a chunk of its prompt
    tokens_prefilled: int = 0  # tokens of the prompt
    # Holds the prompt while it is prefilled, and then for the samples that have not begun.
    group: Group[SampleRow] | None = None
    logits: Tensor | None = None  # (V,) after the prompt; samples that have not begun need them
    samples_begun: int = 0
    samples_ended: int = 0
    active_rows: int = 0  # rows of this request in the next pass
    preempted: deque[Selection] = field(default_factory=deque)

    def get_group(self) -> Group[SampleRow]:
        """Return the group of a request that is being prefilled, or has samples left to begin."""
        assert self.group is not None
        return self.group

    @property
    def tokens_left(self) -> int:
        """Tokens of the prompt that are not prefilled yet."""
        return len(self.prompt) - self.tokens_prefilled

    @property
    def is_prefilled(self) -> bool:
        return not self.tokens_left

    @property
    def can_use_row(self) -> bool:
        """Whether a preempted sample or a new one could take a row now."""
        may_begin = self.group and self.samples_begun < len(self.samplers)
        return self.is_prefilled and bool(self.preempted or may_begin)


@dataclass(eq=False)
class SampleRow(ActiveRow):
    """A row of a request; `columns` is the width of its tail without padding."""

    request: Request = field(kw_only=True)
    columns: int = 0
    preempted: bool = False


@dataclass(frozen=True)
class StepOutput:
    """What a step did for a request.

    A request whose client no longer waits ends with neither a token nor an error.

    Args:
        request: The request.
        sample: The number of the answer that got the token.
        token: The token, or None.
        likely: The likeliest tokens in its place, as the row's sampler records them.
        done: Whether this is the request's last output.
        error: What ended the request, if it was an error.
    """

    request: Request
    sample: int = 0
    token: int | None = None
    likely: tuple = ()
    done: bool = False
    error: Exception | None = None


@dataclass(eq=False)
class Selection:
    """Some rows of a group: the group, and the indices of the rows in it."""

    group: Group[SampleRow]
    row_indices: list[int]

    @property
    def rows(self) -> list[SampleRow]:
        return [self.group.rows[index] for index in self.row_indices]


class Scheduler:
    """Writes answers to questions that come at any time; `step` runs one pass. Not thread-safe.

    Args:
        model: The model that made the requests' caches.
        stop_ids: The EOS ids, which end an answer.
        max_rows: How many answers a pass writes at most, and how many requests have begun at once.
        prefill_chunk: How many tokens of prompts a pass prefills at most.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop_ids: set[int],
        max_rows: int = BATCH,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> None:
        self.model = model
        self.stop_ids = stop_ids
        self.max_rows = max_rows
        self.prefill_chunk = prefill_chunk
        self.pending: deque[Request] = deque()  # requests that have not begun
        # Those that have, in the order in which they came.
        self.active_requests: list[Request] = []
        self.running: list[Group[SampleRow]] = []  # of the last pass
        self.joining: list[Selection] = []  # rows that join them in the next
        self.steps = 0
        # The most steps that a request waited before its first token, not counting those that
        # prefilled a chunk of its prompt.
        self.longest_wait = 0

    def admit(self, request: Request) -> None:
        """Add a request. If a pass has no row left for it, it waits until another one has ended."""
        request.arrival_step = self.steps
        request.prompt = request.prompt.flatten().cpu()
        self.pending.append(request)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.pending or self.active_requests)

    @property
    def active_rows(self) -> list[SampleRow]:
        """The rows of the next pass."""
        rows = []
        for group in self.running:
            rows.extend(group.rows)
        for selection in self.joining:
            rows.extend(selection.rows)
        return [row for row in rows if not (row.ended or row.preempted)]

    @torch.no_grad()
    def step(self) -> list[StepOutput]:
        """Run one pass and return what it wrote, in the order of the rows."""
        outputs: list[StepOutput] = []
        # Who leaves, who begins, who gets a row, what is prefilled: the order of a step.
        self.drop_cancelled(outputs)
        while self.pending and len(self.active_requests) < self.max_rows:
            self.begin_request(self.pending.popleft())
        self.assign_rows(outputs)
        self.rebuild_groups()
        self.run_pass(self.schedule_prefill(), outputs)
        # A group that is no longer needed frees its memory now, not when the next question comes.
        self.running = [group for group in self.running if any(not row.ended for row in group.rows)]
        self.joining = [each for each in self.joining if any(not row.ended for row in each.rows)]
        self.steps += 1
        return outputs

    def begin_request(self, request: Request) -> None:
        """Give a request its own tail, into which its prompt is prefilled."""
        fork = request.cache.fork()
        # No ids yet: `schedule_prefill` decides in each step how much of the prompt is next.
        no_ids = torch.empty(1, 0, dtype=torch.long, device=self.model.device)
        row = self.make_row(request, 0)
        request.group = Group(
            layers=list(fork.layers), rows=[row], ids=no_ids, positions=no_ids, visible=None
        )
        self.active_requests.append(request)

    def make_row(self, request: Request, sample: int) -> SampleRow:
        """Return a new row.

        Args:
            request: The request.
            sample: The number of the answer that the row writes.
        """
        stand_in = next(iter(self.stop_ids), 0)
        sampler = IsolatedSampler(request.samplers[sample], request, stand_in)
        return SampleRow(sample, request.limit, sampler, request=request)

    def drop_cancelled(self, outputs: list[StepOutput]) -> None:
        """End the requests whose clients no longer wait, with an output for each."""
        cancelled = [each for each in (*self.pending, *self.active_requests) if each.cancelled()]
        for request in cancelled:
            self.end_request(request)
            outputs.append(StepOutput(request, done=True))

    def end_request(self, request: Request) -> None:
        """Take a request out, and its rows out of the next pass."""
        if request in self.pending:
            self.pending.remove(request)
        if request in self.active_requests:
            self.active_requests.remove(request)
        # `rebuild_groups` takes rows that have ended out of their groups.
        for row in self.active_rows:
            if row.request is request:
                row.ended = True
        request.preempted.clear()
        request.group = None
        request.logits = None

    def assign_rows(self, outputs: list[StepOutput]) -> None:
        """Give every request that is prefilled a row, then the free rows to those with fewest.

        Args:
            outputs: Gets the first tokens of the samples that begin.
        """
        # A copy, since a first token may end a request and so take it out of the list.
        for request in list(self.active_requests):
            while request.can_use_row and not request.active_rows:
                self.add_row(request, outputs)
        # Requests that just got their first row may have made more rows than a pass may have.
        while len(self.active_rows) > self.max_rows:
            self.preempt_one()
        while len(self.active_rows) < self.max_rows:
            waiting = [request for request in self.active_requests if request.can_use_row]
            if not waiting:
                return
            # Ties go to the request that came first: `min` returns the first of equals.
            self.add_row(min(waiting, key=lambda request: request.active_rows), outputs)

    def add_row(self, request: Request, outputs: list[StepOutput]) -> None:
        """Resume a preempted sample of a request, or begin a new one if there is none.

        Args:
            request: A request with `can_use_row`.
            outputs: Gets the first token of a sample that begins.
        """
        if not request.preempted:
            self.begin_sample(request, outputs)
            return
        # The sample that was preempted first gets its row back.
        selection = request.preempted.popleft()
        for row in selection.rows:
            row.preempted = False
        self.joining.append(selection)
        request.active_rows += 1

    def begin_sample(self, request: Request, outputs: list[StepOutput]) -> None:
        """Begin a further sample of a request whose prompt is prefilled.

        Args:
            request: The request.
            outputs: Gets the sample's first token.
        """
        assert request.logits is not None, "kept when the last token of the prompt was prefilled"
        row = self.make_row(request, request.samples_begun)
        request.samples_begun += 1
        assert row.sampler is not None
        # All samples of a question begin after the same logits, each with its own random numbers.
        token = row.sampler.sample(request.logits)
        row.count_token(token, self.stop_ids)
        if not row.ended:
            source = request.get_group()
            # Samples share the pairs of their prompt, until each writes its own.
            layers = [share_tail(layer) for layer in source.layers]
            ids = torch.tensor([[token]], device=self.model.device)
            row.columns = list_tails(layers)[0].columns
            group = Group(
                layers=layers, rows=[row], ids=ids, positions=source.positions, visible=None
            )
            self.joining.append(Selection(group, [0]))
        request.active_rows += 1
        # The last sample has begun; the prompt's logits and tail are not needed again.
        if request.samples_begun == len(request.samplers):
            request.group = None
            request.logits = None
        self.record_token(row, token, outputs)

    def preempt_one(self) -> None:
        """Take the latest sample of the request with most rows out of the next pass."""
        rows = self.active_rows
        request = max(self.active_requests, key=lambda each: each.active_rows)
        # The one that began last has usually written least, so preempting it delays least.
        chosen = max((row for row in rows if row.request is request), key=lambda row: row.number)
        # One row for each request would not be too many, so this request has more than one. At
        # this point only a request's sole row can be in `joining`, so the chosen one is in a
        # running group. It gets its own.
        group = next(group for group in self.running if chosen in group.rows)
        own_group = _join_rows([Selection(group, [group.rows.index(chosen)])])
        request.preempted.append(Selection(own_group, [0]))
        chosen.preempted = True
        request.active_rows -= 1

    def rebuild_groups(self) -> None:
        """Make the groups of the next pass: rows that have ended or are preempted leave, others
        join those of their context.

        A group that keeps all its rows and gets no others is reused; any other is copied once.
        """
        buckets: list[list[Selection]] = []
        for group in self.running:
            row_indices = []
            for index, row in enumerate(group.rows):
                if not (row.ended or row.preempted):
                    row_indices.append(index)
            if row_indices:
                buckets.append([Selection(group, row_indices)])
        for selection in self.joining:
            # A request may have been cancelled since its row was added.
            if all(row.ended for row in selection.rows):
                continue
            fitting = next((bucket for bucket in buckets if _can_join(bucket, selection)), None)
            if fitting is None:
                buckets.append([selection])
            else:
                fitting.append(selection)
        self.joining = []
        self.running = [_join_rows(bucket) for bucket in buckets]

    def schedule_prefill(self) -> list[Request]:
        """Choose the chunks that the next pass prefills; return their requests."""
        prefilling = [request for request in self.active_requests if not request.is_prefilled]
        if not prefilling:
            return []
        # Half for the oldest prompt, half for the others: neither waits until all of the other is
        # prefilled.
        oldest, *others = prefilling
        oldest_share = self.prefill_chunk
        if others:
            oldest_share = self.prefill_chunk // 2
        sizes = {oldest: min(oldest.tokens_left, oldest_share)}
        free = self.prefill_chunk - sizes[oldest]
        # Those with the fewest tokens left first: they begin to decode in the next pass.
        for request in sorted(others, key=lambda each: each.tokens_left):
            size = min(request.tokens_left, free)
            # A small chunk that does not finish the prompt is not worth its cost; it waits.
            if size < request.tokens_left and size < MIN_PREFILL_CHUNK:
                break
            sizes[request] = size
            free -= size
        # What the others left goes to the oldest.
        sizes[oldest] = min(oldest.tokens_left, sizes[oldest] + free)
        for request, size in sizes.items():
            # A last token is not left alone: some layers with states compute it differently then.
            if size > 1 and request.tokens_left == size + 1:
                sizes[request] = size - 1
        for request, size in sizes.items():
            start = request.cache.get_seq_length() + request.tokens_prefilled
            group = request.get_group()
            chunk = request.prompt[request.tokens_prefilled : request.tokens_prefilled + size]
            group.ids = chunk[None].to(self.model.device)
            group.positions = torch.arange(start, start + size, device=self.model.device)[None]
            # No token is chosen after a chunk that is not the prompt's last.
            group.unfinished = size < request.tokens_left
        return list(sizes)

    def run_pass(self, prefilling: Sequence[Request], outputs: list[StepOutput]) -> None:
        """Run a pass that decodes a token of every running row and prefills chunks of prompts.

        Args:
            prefilling: The requests with a chunk in this pass.
            outputs: Gets the tokens, and the ends of samples and requests.
        """
        groups = [*self.running, *(request.get_group() for request in prefilling)]
        if not groups:
            return
        columns = [list_tails(group.layers)[0].columns for group in groups]
        request_of_group = {id(request.group): request for request in prefilling}

        def on_logits(group: Group[SampleRow], logits: Tensor) -> None:
            # Several samples begin after the same prompt, some of them in later steps.
            request = request_of_group.get(id(group))
            if request and len(request.samplers) > 1:
                request.logits = logits[0].clone()

        try:
            written = write_tokens(self.model, groups, self.stop_ids, on_logits=on_logits)
        except Exception as error:
            self.end_failed(error, prefilling, outputs)
            # Prompts were new in this pass. Without them, the answers may still be written.
            if prefilling:
                _crop_tails(groups, columns)
                self.run_pass([], outputs)
            return
        # Every row of a running group has written one token, which took a column of its tail.
        for group in self.running:
            for row in group.rows:
                row.columns += 1
        for request in prefilling:
            self.record_prefill(request)
        for row, token in written:
            self.record_token(row, token, outputs)

    def end_failed(
        self, error: Exception, prefilling: Sequence[Request], outputs: list[StepOutput]
    ) -> None:
        """End the requests that a failed pass is blamed on: those that it prefilled, as they were
        new in it; if there are none, all that it decoded.

        Args:
            error: What the pass raised, for example because memory ran out.
            prefilling: The requests with a chunk in the pass.
            outputs: Gets the end of each request, with the error.
        """
        failed = list(prefilling)
        if not failed:
            rows = [row for group in self.running for row in group.rows]
            # Each request once, in the order of its rows.
            failed = list(dict.fromkeys(row.request for row in rows))
        for request in failed:
            self.end_request(request)
            outputs.append(StepOutput(request, done=True, error=error))

    def record_prefill(self, request: Request) -> None:
        """Record that a chunk of a prompt was prefilled; after the last one, its first sample
        becomes a row of the next pass.
        """
        request.prefill_steps += 1
        group = request.get_group()
        if group.unfinished:
            request.tokens_prefilled += group.ids.shape[1]
            return
        request.tokens_prefilled = len(request.prompt)
        row = group.rows[0]
        request.samples_begun = 1
        request.active_rows = 1
        row.columns = list_tails(group.layers)[0].columns
        if len(request.samplers) == 1:
            request.group = None
        else:  # further samples begin from here
            layers = [share_tail(layer) for layer in group.layers]
            request.group = Group(
                layers=layers, rows=[], ids=group.ids, positions=group.positions, visible=None
            )
        if not row.ended:
            self.joining.append(Selection(group, [0]))

    def record_token(self, row: SampleRow, token: int, outputs: list[StepOutput]) -> None:
        """Record a token, and the end of its sample or request.

        Args:
            row: The row that wrote the token.
            token: The token.
            outputs: Gets the token, or the error that ends the request.
        """
        request = row.request
        # An error of one row ends all samples of its request.
        if request.error:
            if request in self.active_requests:
                self.end_request(request)
                outputs.append(StepOutput(request, done=True, error=request.error))
            return
        # The first token of the first sample: the question has waited until here.
        if row.count == 1 and row.number == 0:
            steps = self.steps - request.arrival_step + 1
            self.longest_wait = max(self.longest_wait, steps - request.prefill_steps)
        if row.ended:
            request.active_rows -= 1
            request.samples_ended += 1
        done = request.samples_ended == len(request.samplers)
        likely = request.samplers[row.number].latest_logprobs
        outputs.append(StepOutput(request, row.number, token, likely, done))
        if done:
            self.end_request(request)


def _crop_tails(groups: Sequence[Group], columns: Sequence[int]) -> None:
    """Cut the tails of groups to the columns that they had before a pass failed.

    Layers that ran before the failure have grown, others have not. States have not advanced.
    """
    for group, before in zip(groups, columns, strict=True):
        for layer in list_tails(group.layers):
            layer.crop(layer.seen + before)


def _can_join(bucket: Sequence[Selection], selection: Selection) -> bool:
    """Return whether rows may join a bucket: they have the same context, and the padding is no more
    than what all rows hold, plus FREE_PADDING columns a row.
    """
    # The same tensor, not equal ones: rows of a group share one context in memory.
    own = list_tails(selection.group.layers)[0].context_keys
    if list_tails(bucket[0].group.layers)[0].context_keys is not own:
        return False
    columns = [row.columns for each in (*bucket, selection) for row in each.rows]
    # Every row is padded to the widest, (rows x widest) columns in all.
    return len(columns) * max(columns) <= 2 * sum(columns) + FREE_PADDING * len(columns)


def _join_rows(selections: Sequence[Selection]) -> Group[SampleRow]:
    """Return a group of the chosen rows of groups over one context."""
    first = selections[0].group
    # The very same rows: nothing is copied.
    if len(selections) == 1 and len(selections[0].row_indices) == len(first.rows):
        return first
    rows = [row for selection in selections for row in selection.rows]
    widths = [max(row.columns for row in selection.rows) for selection in selections]
    width = max(widths)
    row_indices = [selection.row_indices for selection in selections]
    layers = []
    for at_depth in zip(*(selection.group.layers for selection in selections), strict=True):
        sources = list(zip(at_depth, row_indices, strict=True))
        layers.append(gather_rows(sources, widths, TAIL_CAPACITY))
    ids = torch.cat([each.group.ids[each.row_indices] for each in selections])
    positions = torch.cat([each.group.positions[each.row_indices] for each in selections])
    # Rows are padded on the left, so that all end at the same column; padding is not seen.
    visible = None
    if any(row.columns < width for row in rows):
        padding = torch.tensor([[width - row.columns] for row in rows], device=ids.device)
        visible = torch.arange(width + 1, device=ids.device) >= padding
    return Group(layers=layers, rows=rows, ids=ids, positions=positions, visible=visible)
