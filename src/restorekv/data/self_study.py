"""Self-study (the paper's appendix on training data): the teacher asks five questions about a context and answers them.

The teacher is the model itself with the full cache. It decodes greedily, all questions of a context in one batch over
one prefill. A question follows the context as "\\n\\n" and its words, without "Q:".
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.compression.generate import answer_ids, answer_text, stop_ids
from restorekv.data.config import BuildConfig
from restorekv.data.documents import Document
from restorekv.model.prefill import prefill
from restorekv.model.prompt import BETWEEN, Context, question_ids
from restorekv.model.shape import CacheShape

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


def full_cache(model: PreTrainedModel, context: Context) -> RaggedCache:
    """Returns a cache with every pair of the context, which a batch of questions shares."""
    shape = CacheShape.of(model)
    everything = torch.ones(shape.layers, shape.heads, context.positions, dtype=torch.bool)
    return RaggedCache.from_dense(prefill(model, context.ids), everything)


def study(
    model: PreTrainedModel, tokenizer: Tokenizer, context: Context, config: BuildConfig, document: Document
) -> list[dict]:
    """Returns attempts {kind, question, answer, answer_ids}, or {kind, fault} for those that a filter drops.

    The teacher asks one question of each kind if `document.studied`, then answers these and the document's own.
    """
    cache = full_cache(model, context)
    questions, faults = own_questions(model, tokenizer, context, cache, config) if document.studied else ({}, {})
    asked = [*questions.items(), *((kind, BETWEEN + question) for kind, question in document.asked)]
    answered = answer(model, tokenizer, context, cache, asked, config.answer_tokens, config)
    return [*({"kind": kind, "fault": fault} for kind, fault in faults.items()), *answered]


def reply(
    model: PreTrainedModel, tokenizer: Tokenizer, context: Context, config: BuildConfig, document: Document
) -> list[dict]:
    """Returns the one attempt at a context that asks itself."""
    cache = full_cache(model, context)
    return answer(model, tokenizer, context, cache, [(PROMPT, "")], config.flan_answer_tokens, config)


def own_questions(
    model: PreTrainedModel, tokenizer: Tokenizer, context: Context, cache: RaggedCache, config: BuildConfig
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the teacher's questions by kind, and for the kinds that are dropped why."""
    prompts = [question_ids(tokenizer, context, BETWEEN + words)[0] for words in KINDS.values()]
    stops = stop_ids(model, tokenizer)
    drafts = answer_ids(model, tokenizer, cache, prompts, config.question_tokens)
    questions = [tidy(answer_text(tokenizer, draft.tolist(), stops)) for draft in drafts]
    faults = [question_fault(question, config) for question in questions]
    kinds = list(zip(KINDS, questions, faults, strict=True))
    return (
        {kind: BETWEEN + question for kind, question, fault in kinds if not fault},
        {kind: fault for kind, _, fault in kinds if fault},
    )


def answer(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    context: Context,
    cache: RaggedCache,
    questions: list[tuple[str, str]],
    limit: int,
    config: BuildConfig,
) -> list[dict]:
    """Answers (kind, question) pairs greedily; `answer_ids` ends with the EOS unless the limit came first."""
    stops = stop_ids(model, tokenizer)
    prompts = [question_ids(tokenizer, context, question, empty=True)[0] for _, question in questions]
    attempts = []
    for (kind, question), ids in zip(questions, answer_ids(model, tokenizer, cache, prompts, limit), strict=True):
        ids = ids.tolist()
        text = answer_text(tokenizer, ids, stops)
        fault = answer_fault(text, len(ids) - (ids[-1] in stops), config)
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
