"""Self-study (the paper's appendix on training data): the teacher asks five questions about a context and answers them.

The teacher is the model itself with the full cache. It decodes greedily, all questions of a context in one batch over
one prefill. A question follows the context as "\\n\\n" and its words, without "Q:".
"""

from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.compression.generate import answer_ids, answer_text, stop_ids
from restorekv.data.config import BuildConfig
from restorekv.data.documents import Document
from restorekv.model.prefill import prefill
from restorekv.model.prompt import BETWEEN, Context, question_ids

ALONE = "Reply with the question alone, in one sentence."
KINDS = {
    "factual": f"Ask about one specific fact that the text above states. {ALONE}",
    "summary": f"Ask for a summary of the text above or of one of its parts. {ALONE}",
    "multihop": f"Ask something that can only be answered by joining two or more places of the text above. {ALONE}",
    "method": f"Ask how something in the text above is done or why it works. {ALONE}",
    "compare": f"Ask for a comparison of two things that the text above tells about. {ALONE}",
}
PROMPT = "prompt"  # the kind of a context that asks itself
LABELS = ("question:", "q:")


@dataclass(frozen=True)
class SelfStudy:
    """The teacher with the limits and filters of `config`.

    An attempt is {kind, question, answer, answer_ids}, or {kind, fault} if a filter drops it.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    config: BuildConfig

    def study(self, context: Context, document: Document) -> list[dict]:
        """Asks one question of each kind if `document.studied`, and answers these and the document's own."""
        cache = self.full_cache(context)
        questions, faults = self.ask(context, cache) if document.studied else ({}, {})
        asked = [*questions.items(), *((kind, BETWEEN + question) for kind, question in document.asked)]
        dropped = [{"kind": kind, "fault": fault} for kind, fault in faults.items()]
        return [*dropped, *self.answer(context, cache, asked, self.config.answer_tokens)]

    def reply(self, context: Context, document: Document) -> list[dict]:
        """Makes the one attempt at a context that asks itself."""
        return self.answer(context, self.full_cache(context), [(PROMPT, "")], self.config.flan_answer_tokens)

    def full_cache(self, context: Context) -> RaggedCache:
        """Returns a cache with every pair of the context, which a batch of questions shares."""
        return RaggedCache.whole(prefill(self.model, context.ids))

    def ask(self, context: Context, cache: RaggedCache) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the teacher's questions by kind, and for the kinds that are dropped why."""
        prompts = [question_ids(self.tokenizer, context, BETWEEN + words)[0] for words in KINDS.values()]
        stops = stop_ids(self.model, self.tokenizer)
        drafts = answer_ids(self.model, self.tokenizer, cache, prompts, self.config.question_tokens)
        texts = [tidy(answer_text(self.tokenizer, draft.tolist(), stops)) for draft in drafts]
        questions = dict(zip(KINDS, texts, strict=True))
        faults = {kind: question_fault(question, self.config) for kind, question in questions.items()}
        good = {kind: BETWEEN + question for kind, question in questions.items() if not faults[kind]}
        return good, {kind: fault for kind, fault in faults.items() if fault}

    def answer(self, context: Context, cache: RaggedCache, questions: list[tuple[str, str]], limit: int) -> list[dict]:
        """Answers (kind, question) pairs greedily; `answer_ids` ends with the EOS unless the limit came first."""
        stops = stop_ids(self.model, self.tokenizer)
        prompts = [question_ids(self.tokenizer, context, question, empty=True)[0] for _, question in questions]
        answers = answer_ids(self.model, self.tokenizer, cache, prompts, limit)
        attempts = []
        for (kind, question), ids in zip(questions, (ids.tolist() for ids in answers), strict=True):
            text = answer_text(self.tokenizer, ids, stops)
            fault = answer_fault(text, len(ids) - (ids[-1] in stops), self.config)
            attempt = {"kind": kind, "question": question, "answer": text, "answer_ids": ids}
            attempts.append({"kind": kind, "fault": fault} if fault else attempt)
        return attempts


def question_fault(question: str, config: BuildConfig) -> str | None:
    """Returns why a question is dropped, or None."""
    return "short question" if len(question) < config.question_characters else None


def answer_fault(text: str, tokens: int, config: BuildConfig) -> str | None:
    """Returns why an answer of `tokens` tokens, not counting the EOS, is dropped, or None."""
    return "short answer" if tokens < config.least_answer or not text.strip() else None


def tidy(text: str) -> str:
    """Returns the first line that is not blank, without a label or quotes around it."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    for label in LABELS:
        if line.lower().startswith(label):
            line = line[len(label) :].strip()
    return line[1:-1].strip() if len(line) > 1 and line[0] == line[-1] == '"' else line
