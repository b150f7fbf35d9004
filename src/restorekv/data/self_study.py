"""Self-study (the paper's appendix on training data): the teacher asks five questions about a
context and answers them.

The teacher is the model itself with the full cache. It decodes greedily, all questions of a context
in one batch over one prefill. A question follows the context as "\\n\\n" and its words, without
"Q:".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.data.config import BuildConfig
from restorekv.data.documents import SourceDocument
from restorekv.data.exercises import LOCAL
from restorekv.data.made import LOOKUP, ROW
from restorekv.data.passages import FACT, HUMAN
from restorekv.generation.decoding import decode_answer, generate_ids, get_stop_ids
from restorekv.generation.padded import generate_padded
from restorekv.generation.sampling import refuse_not_finite
from restorekv.model.position_limits import count_usable_positions
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context, encode_question, get_default_separator
from restorekv.model.shape import is_hybrid

ALONE = "Reply with the question alone, in one sentence."
QUESTION_PROMPTS = {
    "factual": f"Ask about one specific fact that the text above states. {ALONE}",
    "summary": f"Ask for a summary of the text above or of one of its parts. {ALONE}",
    "multihop": "Ask something that can only be answered by joining two or more places of the text "
    f"above. {ALONE}",
    "method": f"Ask how something in the text above is done or why it works. {ALONE}",
    "compare": f"Ask for a comparison of two things that the text above tells about. {ALONE}",
}
LARGE_BATCH = 48  # answers that are written at a time, to any number of contexts
SHORT_ANSWERS = {FACT, HUMAN, LOOKUP, ROW, *LOCAL}  # kinds of questions about one place of the text
RESTORE_ROOM = 32  # positions that are left for restore tokens
PROMPT = "prompt"  # the kind of a context that is itself the prompt
QUESTION_LABELS = ("question:", "q:")


@dataclass(frozen=True)
class StudyQuestion:
    """A question of some kind about a context, with the context's full cache unless the batch is
    padded.
    """

    context: Context
    cache: RaggedCache | None
    kind: str
    question: str


@dataclass(frozen=True)
class SelfStudy:
    """The teacher with the limits and filters of `config`.

    An attempt is {kind, question, answer, answer_ids}, or {kind, fault} if a filter drops it.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    config: BuildConfig

    def study_contexts(self, studied: Sequence[tuple[Context, SourceDocument]]) -> list[list[dict]]:
        """Let the teacher ask one question of each kind about every document that is `studied`,
        answer these and the documents' own questions, and return the attempts at each context.

        The answers about all contexts are written together.
        """
        attempts: list[list[dict]] = []
        asked: list[StudyQuestion] = []
        owners: list[int] = []
        separator = get_default_separator(self.tokenizer)
        for number, (context, document) in enumerate(studied):
            # One cache per context, which the questions of a batch share.
            cache = self._make_full_cache(context)
            faults: dict[str, str] = {}
            questions: list[tuple[str, str]] = []
            if document.studied:
                drafted, faults = self._ask_questions(context, cache)
                questions += drafted.items()
            questions += document.asked
            attempts.append([{"kind": kind, "fault": fault} for kind, fault in faults.items()])
            for kind, words in questions:
                question = separator + words
                if not self._has_positions(context, kind, question):
                    attempts[-1].append({"kind": kind, "fault": "long question"})
                    continue
                asked.append(StudyQuestion(context, cache, kind, question))
                owners.append(number)
        # Questions of different kinds may end at different limits.
        limits = [self._limit_answer(each.kind) for each in asked]
        for owner, attempt in zip(owners, self._answer_questions(asked, limits), strict=True):
            attempts[owner].append(attempt)
        return attempts

    def answer_prompt(self, context: Context) -> list[dict]:
        """Return the one attempt at a context that is itself the prompt, in a list."""
        asked = StudyQuestion(context, self._make_full_cache(context), PROMPT, "")
        return self._answer_questions([asked], [self.config.flan_answer_tokens])

    @property
    def pads(self) -> bool:
        """Whether answers about many contexts are written in one padded batch, which is faster on a
        GPU; a model with sliding windows or with states cannot do so.
        """
        return self.model.device.type != "cpu" and not is_hybrid(self.model)

    def _make_full_cache(self, context: Context) -> RaggedCache | None:
        """Return a cache with every pair of the context, which a batch of questions shares."""
        if self.pads:
            return None
        return RaggedCache.from_full_cache(prefill(self.model, context.ids))

    def _write_answers(
        self,
        asked: Sequence[StudyQuestion],
        prompts: Sequence[Tensor],
        limits: Sequence[int],
        watches: Sequence[GreedyUntilLoop] | None = None,
    ) -> list[Tensor]:
        """Return the ids of the greedy answer to each prompt."""
        if self.pads:
            contexts = [each.context for each in asked]
            return generate_padded(self.model, self.tokenizer, contexts, prompts, limits, watches)
        caches = []
        for each in asked:
            assert each.cache is not None, "only a padded batch has no caches"
            caches.append(each.cache)
        return generate_ids(
            self.model,
            self.tokenizer,
            caches,
            prompts,
            list(limits),
            samplers=watches,
            batch=LARGE_BATCH,
        )

    def _ask_questions(
        self, context: Context, cache: RaggedCache | None
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return the teacher's questions by kind, and the faults of the kinds that were dropped."""
        separator = get_default_separator(self.tokenizer)
        prompts = [
            encode_question(self.tokenizer, context, separator + words)[0]
            for words in QUESTION_PROMPTS.values()
        ]
        stops = get_stop_ids(self.model, self.tokenizer)
        asked = [StudyQuestion(context, cache, kind, "") for kind in QUESTION_PROMPTS]
        limits = [self.config.question_tokens] * len(prompts)
        drafts = self._write_answers(asked, prompts, limits)
        questions: dict[str, str] = {}
        faults: dict[str, str] = {}
        for kind, draft in zip(QUESTION_PROMPTS, drafts, strict=True):
            question = clean_question(decode_answer(self.tokenizer, draft.tolist(), stops))
            fault = find_question_fault(question, self.config)
            if fault is None:
                questions[kind] = question
            else:
                faults[kind] = fault
        return questions, faults

    def _has_positions(self, context: Context, kind: str, question: str) -> bool:
        """Return whether the model has positions for the context, a question and its answer, and
        for the restore tokens that training puts between them.

        The teacher's own questions are short, but a person's may have any length.
        """
        prompt = encode_question(self.tokenizer, context, question, empty=True)
        needed = context.num_tokens + prompt.shape[-1] + self._limit_answer(kind)
        return needed + RESTORE_ROOM <= count_usable_positions(self.model)

    def _limit_answer(self, kind: str) -> int:
        """Return the most tokens of an answer to a question of that kind."""
        short = self.config.short_answer_tokens
        if short and kind in SHORT_ANSWERS:
            return short
        return self.config.answer_tokens

    def _answer_questions(
        self, asked: Sequence[StudyQuestion], limits: Sequence[int]
    ) -> list[dict]:
        """Answer questions greedily; `answer_ids` ends with the EOS unless the limit or a loop
        came first.
        """
        stops = get_stop_ids(self.model, self.tokenizer)
        prompts = [
            encode_question(self.tokenizer, each.context, each.question, empty=True)[0]
            for each in asked
        ]
        watches = None
        # If the settings say so, an answer ends as soon as it repeats itself.
        if self.config.loop:
            watches = [GreedyUntilLoop(self.config.loop) for _ in asked]
        answers = self._write_answers(asked, prompts, limits, watches)
        attempts = []
        for each, answer in zip(asked, answers, strict=True):
            ids = answer.tolist()
            text = decode_answer(self.tokenizer, ids, stops)
            tokens = len(ids)
            if ids[-1] in stops:
                # The EOS is not part of the answer's text.
                tokens -= 1
            fault = find_answer_fault(text, tokens, self.config)
            if fault is not None:
                attempts.append({"kind": each.kind, "fault": fault})
                continue
            attempts.append(
                {
                    "kind": each.kind,
                    "question": each.question,
                    "answer": text,
                    "answer_ids": ids,
                }
            )
        return attempts


@dataclass
class GreedyUntilLoop:
    """A sampler that takes the likeliest token, and ends an answer once its last `size` tokens have
    already appeared in it.

    Small models repeat themselves until the limit. The rest of such an answer teaches nothing and
    costs as much.
    """

    size: int
    ids: list[int] = field(default_factory=list)

    def sample(self, logits: Tensor) -> int:
        """Return the likeliest id of logits (V,)."""
        best = logits.max(-1)
        if not best.values.isfinite():
            refuse_not_finite()
        self.add(int(best.indices))
        return self.ids[-1]

    def add(self, token: int) -> None:
        """Record the next token."""
        self.ids.append(token)

    def ends(self) -> bool:
        """Return whether the answer has entered a loop."""
        last = self.ids[-self.size :]
        if len(last) < self.size:
            return False
        earlier_starts = range(len(self.ids) - self.size)
        # An earlier stretch of the answer, which may overlap its end, is the same as its end.
        return any(self.ids[start : start + self.size] == last for start in earlier_starts)


def find_question_fault(question: str, config: BuildConfig) -> str | None:
    """Return why a question is dropped, or None."""
    if len(question) < config.question_characters:
        return "short question"
    return None


def find_answer_fault(text: str, tokens: int, config: BuildConfig) -> str | None:
    """Return why an answer of `tokens` tokens, not counting the EOS, is dropped, or None."""
    if tokens < config.least_answer or not text.strip():
        return "short answer"
    return None


def clean_question(text: str) -> str:
    """Return the first line that is not blank, without a label or quotes around it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[0] if lines else ""
    for label in QUESTION_LABELS:
        if line.lower().startswith(label):
            line = line[len(label) :].strip()
    if len(line) > 1 and line[0] == line[-1] == '"':
        line = line[1:-1].strip()
    return line
