"""Which questions share a pass: they join at the next token, and leave with their last one.

A step is one pass of the model. It has a token for every answer that is being written, and a piece
of the questions that are still read, PIECE tokens in all; so a question with a thousand messages
costs the others one piece a step.

Fairness: questions begin in the order in which they came, and at most as many as a pass may have
rows. Each then has a row as soon as it is read, whatever else runs: further samples of a question
take only the rows that no question needs, and a sample gives its row back (it is paused, nothing is
lost) when a question comes that has none. Half of the PIECE tokens go to the oldest question and
the rest to the shortest others, so that neither a long nor a short question waits for all others.

Rows of one context share a block of tails as long as padding costs at most as much as they hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from restorekv.cache.flat import gather_rows, share_tail
from restorekv.cache.ragged import RaggedCache
from restorekv.generation.decoding import BATCH, ActiveRow, Group, write_tokens
from restorekv.generation.sampling import TokenSampler

PIECE = 256  # tokens of questions that are read in one step
SMALLEST = 32  # tokens: a smaller share is given only if it finishes the prompt, or to the oldest
SLACK = 64  # columns of padding that are always allowed in a row
ROOM = 32  # columns for answers that a block of tails is made with


def _never_cancelled() -> bool:
    """Return False: somebody always waits for a task without a `cancelled` of its own."""
    return False


class IsolatedSampler:
    """A row's sampler whose errors end its own question and nobody else's.

    Args:
        sampler: The sampler whose errors are caught.
        task: The task that an error is noted in.
        stand_in: The id that is returned after an error.
    """

    def __init__(self, sampler: TokenSampler, task: AnswerTask, stand_in: int) -> None:
        self.sampler = sampler
        self.task = task
        self.stand_in = stand_in

    def sample(self, logits: Tensor) -> int:
        """Choose the next token, or note the error and return `stand_in`."""
        try:
            # The pass goes on for the other rows, so this one needs an id: an EOS, if there is one.
            return self.sampler.sample(logits)
        except Exception as error:
            self.task.error = error
            return self.stand_in

    def ends(self) -> bool:
        """Return whether the answer ends here: by its sampler, or by an error."""
        try:
            return self.task.error is not None or self.sampler.ends()
        except Exception as error:
            self.task.error = error
            return True


@dataclass(eq=False)
class AnswerTask:
    """A question with a row for each of its answers.

    Args:
        cache: The context, of which the task takes forks.
        prompt: The ids (q,) that the model reads after it.
        limit: How many tokens an answer may have.
        samplers: One for each answer.
        cancelled: Whether nobody waits for the answers any more; asked before every step.
        label: Whatever the caller needs to recognize the task.
    """

    cache: RaggedCache
    prompt: Tensor
    limit: int
    samplers: Sequence[TokenSampler]
    cancelled: Callable[[], bool] = _never_cancelled
    label: object = None
    error: Exception | None = None  # of one of its rows
    arrived: int = 0  # how many steps had been taken when the task came
    passes: int = 0  # how many passes have read a piece of its prompt
    tokens_prefilled: int = 0  # tokens of the prompt
    # Holds the prompt while it is prefilled, and then for the samples that have not begun.
    group: Group[SampleRow] | None = None
    logits: Tensor | None = None  # (V,) after the prompt; samples that have not begun need them
    samples_begun: int = 0
    samples_ended: int = 0
    active_rows: int = 0  # rows of this task in the next pass
    paused: deque[Selection] = field(default_factory=deque)

    def get_group(self) -> Group[SampleRow]:
        """Return the group of a task that is read, or that has samples left to begin."""
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
    def waiting(self) -> bool:
        """Whether a sample could take a row now."""
        may_begin = self.group and self.samples_begun < len(self.samplers)
        return self.is_prefilled and bool(self.paused or may_begin)


@dataclass(eq=False)
class SampleRow(ActiveRow):
    """A row of a task; `columns` are those of its own tail, without what pads it."""

    task: AnswerTask = field(kw_only=True)
    columns: int = 0
    paused: bool = False


@dataclass(frozen=True)
class Event:
    """What a step did for a task.

    A task that nobody waits for any more ends with neither a token nor an error.

    Args:
        task: The task.
        sample: The number of the answer that got the token.
        token: The token, or None.
        likely: The likeliest tokens in its place, as the row's sampler records them.
        done: Whether this is the task's last event.
        error: What ended the task, if it was an error.
    """

    task: AnswerTask
    sample: int = 0
    token: int | None = None
    likely: tuple = ()
    done: bool = False
    error: Exception | None = None


@dataclass(eq=False)
class Selection:
    """Rows out of a group: the group, and the places of the rows in it."""

    group: Group[SampleRow]
    places: list[int]

    @property
    def rows(self) -> list[SampleRow]:
        return [self.group.rows[place] for place in self.places]


class Scheduler:
    """Writes answers to questions that come at any time; `step` runs one pass. Not for several
    threads.
    """

    def __init__(
        self, model: PreTrainedModel, stops: set[int], most: int = BATCH, piece: int = PIECE
    ) -> None:
        self.model = model
        self.stops = stops
        self.most = most
        self.piece = piece
        self.pending: deque[AnswerTask] = deque()  # tasks that have not begun
        self.tasks: list[AnswerTask] = []  # those that have, in the order in which they came
        self.running: list[Group[SampleRow]] = []  # of the last pass
        self.joining: list[Selection] = []  # rows that join them in the next
        self.steps = 0
        # The most steps in which a question was neither read nor written before its first token.
        self.longest_wait = 0

    def admit(self, task: AnswerTask) -> None:
        """Add a task. If a pass has no row left for it, it waits until another one has ended."""
        task.arrived = self.steps
        task.prompt = task.prompt.flatten().cpu()
        self.pending.append(task)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.pending or self.tasks)

    @property
    def active_rows(self) -> list[SampleRow]:
        """The rows of the next pass."""
        selections = [
            Selection(group, list(range(len(group.rows)))) for group in self.running
        ] + self.joining
        rows = [row for selection in selections for row in selection.rows]
        return [row for row in rows if not (row.ended or row.paused)]

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Run one pass and return what it wrote, in the order of the rows."""
        events: list[Event] = []
        # Who leaves, who comes, who gets a row, what is read: the order of a step.
        self.drop_cancelled(events)
        while self.pending and len(self.tasks) < self.most:
            self.begin(self.pending.popleft())
        self.give_rows(events)
        self.regroup()
        self.run(self.take_pieces(), events)
        # A group that nobody needs frees its memory now, and not when the next question comes.
        self.running = [group for group in self.running if any(not row.ended for row in group.rows)]
        self.joining = [each for each in self.joining if any(not row.ended for row in each.rows)]
        self.steps += 1
        return events

    def begin(self, task: AnswerTask) -> None:
        """Give a task a tail of its own."""
        fork = task.cache.fork()
        # No ids yet: `take_pieces` decides in each pass how much of the prompt is read.
        nothing = torch.empty(1, 0, dtype=torch.long, device=self.model.device)
        row = self.make_row(task, 0)
        task.group = Group(list(fork.layers), [row], nothing, nothing, None)
        self.tasks.append(task)

    def make_row(self, task: AnswerTask, sample: int) -> SampleRow:
        """Return a new row for one of a task's answers."""
        stand_in = next(iter(self.stops), 0)
        return SampleRow(
            sample, task.limit, IsolatedSampler(task.samplers[sample], task, stand_in), task=task
        )

    def drop_cancelled(self, events: list[Event]) -> None:
        """End the tasks that nobody waits for."""
        for task in [each for each in (*self.pending, *self.tasks) if each.cancelled()]:
            self.end(task)
            events.append(Event(task, done=True))

    def end(self, task: AnswerTask) -> None:
        """Take a task out, and its rows out of the next pass."""
        if task in self.pending:
            self.pending.remove(task)
        if task in self.tasks:
            self.tasks.remove(task)
        # `regroup` takes rows that have ended out of their groups.
        for row in self.active_rows:
            if row.task is task:
                row.ended = True
        task.paused.clear()
        task.group = task.logits = None

    def give_rows(self, events: list[Event]) -> None:
        """Give every task that has been read a row, then the free rows to those with fewest."""
        # A copy, since resuming may end a task and so take it out of the list.
        for task in list(self.tasks):
            while task.waiting and not task.active_rows:
                self.resume(task, events)
        # Tasks that just got their first row may have made more rows than a pass may have.
        while len(self.active_rows) > self.most:
            self.pause_one()
        while len(self.active_rows) < self.most:
            waiting = [task for task in self.tasks if task.waiting]
            if not waiting:
                return
            # Ties go to the task that came first: `min` returns the first of equals.
            self.resume(min(waiting, key=lambda task: task.active_rows), events)

    def resume(self, task: AnswerTask, events: list[Event]) -> None:
        """Go on with a paused sample of a task, or begin one."""
        if task.paused:
            selection = task.paused.popleft()
            for row in selection.rows:
                row.paused = False
            self.joining.append(selection)
            task.active_rows += 1
            return
        assert task.logits is not None, "kept when the last token of the prompt was read"
        row = self.make_row(task, task.samples_begun)
        task.samples_begun += 1
        assert row.sampler is not None
        # All samples of a question begin after the same logits, with random numbers of their own.
        token = row.sampler.sample(task.logits)
        row.count_token(token, self.stops)
        if not row.ended:
            source = task.get_group()
            ids = torch.tensor([[token]], device=self.model.device)
            group = Group(
                # The samples of a question share the pairs of its prompt, until each writes its
                # own.
                [share_tail(part) for part in source.parts],
                [row],
                ids,
                source.positions,
                None,
            )
            row.columns = group.parts[0].columns
            self.joining.append(Selection(group, [0]))
        task.active_rows += 1
        # The last sample has begun; the prompt's logits and tail are not needed again.
        if task.samples_begun == len(task.samplers):
            task.group = task.logits = None
        self.record_token(row, token, events)

    def pause_one(self) -> None:
        """Take the latest sample of the task with most rows out of the next pass."""
        rows = self.active_rows
        task = max(self.tasks, key=lambda each: each.active_rows)
        # The one that began last has usually written least, so pausing it delays least.
        chosen = max((row for row in rows if row.task is task), key=lambda row: row.number)
        joining = next((selection for selection in self.joining if chosen in selection.rows), None)
        # A row that has not run yet is paused as it is; one out of a group gets a group of its own.
        if joining:
            self.joining.remove(joining)
            task.paused.append(joining)
        else:
            group = next(group for group in self.running if chosen in group.rows)
            task.paused.append(
                Selection(_join_rows([Selection(group, [group.rows.index(chosen)])]), [0])
            )
        chosen.paused = True
        task.active_rows -= 1

    def regroup(self) -> None:
        """Make the groups of the next pass: rows that have ended or pause leave, others join those
        of their context.

        A group whose rows are all the same stays as it is; any other is copied once.
        """
        buckets: list[list[Selection]] = []
        for group in self.running:
            places = []
            for place, row in enumerate(group.rows):
                if not (row.ended or row.paused):
                    places.append(place)
            if places:
                buckets.append([Selection(group, places)])
        for selection in self.joining:
            # A task may have been cancelled since its row was added.
            if all(row.ended for row in selection.rows):
                continue
            fitting = next((bucket for bucket in buckets if _can_join(bucket, selection)), None)
            if fitting is None:
                buckets.append([selection])
            else:
                fitting.append(selection)
        self.joining = []
        self.running = [_join_rows(bucket) for bucket in buckets]

    def take_pieces(self) -> list[AnswerTask]:
        """Choose what is read in the next pass; return the tasks whose groups it belongs to."""
        readers = [task for task in self.tasks if not task.is_prefilled]
        if not readers:
            return []
        # Half for the oldest question, half for the others: neither waits until all of the other is
        # read.
        first, *others = readers
        share_of_first = self.piece
        if others:
            share_of_first = self.piece // 2
        sizes = {first: min(first.tokens_left, share_of_first)}
        free = self.piece - sizes[first]
        # Short rests first: they are finished in this pass and begin to write in the next.
        for task in sorted(others, key=lambda each: each.tokens_left):
            size = min(task.tokens_left, free)
            # So small a piece is not worth its share of the pass; it waits for the next one.
            if size < task.tokens_left and size < SMALLEST:
                break
            sizes[task] = size
            free -= size
        # What the others left goes to the oldest.
        sizes[first] = min(first.tokens_left, sizes[first] + free)
        for task, size in sizes.items():
            start = task.cache.get_seq_length() + task.tokens_prefilled
            group = task.get_group()
            piece = task.prompt[task.tokens_prefilled : task.tokens_prefilled + size]
            group.ids = piece[None].to(self.model.device)
            group.positions = torch.arange(start, start + size, device=self.model.device)[None]
            # No token is chosen after a piece that is not the prompt's last.
            group.unfinished = size < task.tokens_left
        return list(sizes)

    def run(self, reading: Sequence[AnswerTask], events: list[Event]) -> None:
        """Run a pass over the answers that are written and the questions that are read.

        If it fails, for example when memory runs out, the questions that are read end with the
        error, and the pass runs again without them. If it fails again, the answers end too.
        """
        groups = [*self.running, *(task.get_group() for task in reading)]
        if not groups:
            return
        # Layers that ran before a failure have grown, others have not: all are cut to this.
        columns = [group.parts[0].columns for group in groups]
        read = {id(task.group): task for task in reading}

        def keep_logits(group: Group[SampleRow], logits: Tensor) -> None:
            # Several samples begin after the same prompt, some of them in later steps.
            task = read.get(id(group))
            if task and len(task.samplers) > 1:
                task.logits = logits[0].clone()

        try:
            written = write_tokens(self.model, groups, self.stops, keep_logits=keep_logits)
        except Exception as error:
            # A question that is read is what was new in this pass, so it is to blame first.
            failed = list(reading)
            if not failed:
                rows = [row for group in self.running for row in group.rows]
                failed = list(dict.fromkeys(row.task for row in rows))
            for task in failed:
                self.end(task)
                events.append(Event(task, done=True, error=error))
            if reading:
                for group, before in zip(groups, columns, strict=True):
                    for part in group.parts:
                        part.crop(part.seen + before)
                self.run([], events)
            else:
                self.running = []
            return
        # Every row of a running group has written one token, which took a column of its tail.
        for group in self.running:
            for row in group.rows:
                row.columns += 1
        for task in reading:
            self.record_read(task)
        for row, token in written:
            self.record_token(row, token, events)

    def record_read(self, task: AnswerTask) -> None:
        """Record that a piece of a question was read; after the last one its first sample goes on
        as a row.
        """
        task.passes += 1
        group = task.get_group()
        if group.unfinished:
            task.tokens_prefilled += group.ids.shape[1]
            return
        task.tokens_prefilled = len(task.prompt)
        row = group.rows[0]
        task.samples_begun = 1
        task.active_rows = 1
        row.columns = group.parts[0].columns
        if len(task.samplers) == 1:
            task.group = None
        else:  # further samples begin from here
            parts = [share_tail(part) for part in group.parts]
            task.group = Group(parts, [], group.ids, group.positions, None)
        if not row.ended:
            self.joining.append(Selection(group, [0]))

    def record_token(self, row: SampleRow, token: int, events: list[Event]) -> None:
        """Record a token, and the end of its sample or task."""
        task = row.task
        # An error of one row ends all samples of its question.
        if task.error:
            if task in self.tasks:
                self.end(task)
                events.append(Event(task, done=True, error=task.error))
            return
        # The first token of the first sample: the question has waited until here.
        if row.count == 1 and row.number == 0:
            self.longest_wait = max(self.longest_wait, self.steps - task.arrived - task.passes + 1)
        if row.ended:
            task.active_rows -= 1
            task.samples_ended += 1
        done = task.samples_ended == len(task.samplers)
        events.append(Event(task, row.number, token, task.samplers[row.number].likely, done))
        if done:
            self.end(task)


def _can_join(bucket: Sequence[Selection], selection: Selection) -> bool:
    """Return whether a row may join a bucket: it has the same context, and padding is no more than
    what is held.
    """
    # The same tensor, not equal ones: rows of a group share one context in memory.
    if bucket[0].group.parts[0].context_keys is not selection.group.parts[0].context_keys:
        return False
    columns = [row.columns for each in (*bucket, selection) for row in each.rows]
    # Every row is padded to the widest, (rows x widest) columns in all.
    return len(columns) * max(columns) <= 2 * sum(columns) + SLACK * len(columns)


def _join_rows(selections: Sequence[Selection]) -> Group[SampleRow]:
    """Return a group of the chosen rows of groups over one context."""
    first = selections[0].group
    # The very same rows: nothing is copied.
    if len(selections) == 1 and len(selections[0].places) == len(first.rows):
        return first
    rows = [row for selection in selections for row in selection.rows]
    widths = [max(row.columns for row in selection.rows) for selection in selections]
    width = max(widths)
    layers = zip(*(selection.group.parts for selection in selections), strict=True)
    places = [selection.places for selection in selections]
    parts = [gather_rows(list(zip(own, places, strict=True)), widths, ROOM) for own in layers]
    ids = torch.cat([selection.group.ids[selection.places] for selection in selections])
    positions = torch.cat([selection.group.positions[selection.places] for selection in selections])
    # Rows are padded on the left, so that all end at the same column; padding is not seen.
    visible = None
    if any(row.columns < width for row in rows):
        lead = torch.tensor([[width - row.columns] for row in rows], device=ids.device)
        visible = torch.arange(width + 1, device=ids.device) >= lead
    return Group(parts, rows, ids, positions, visible)
