"""Self-study (the paper's appendix on training data): the teacher asks five questions about a context and answers them.

The teacher is the model itself with the full cache: no evictor, no scores. It decodes greedily, the questions of a
context in one batch over one prefill. A question follows the context as "\\n\\n" and its words, without "Q:".
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.compression.generate import answer_ids, answer_text, stop_ids
from restorekv.data.config import BuildConfig
from restorekv.data.document import Document
from restorekv.data.filters import fault_of_answer, fault_of_question
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
    """Every pair of the context, as a cache that a batch of questions shares."""
    shape = CacheShape.of(model)
    everything = torch.ones(shape.layers, shape.heads, context.positions, dtype=torch.bool)
    return RaggedCache.from_dense(prefill(model, context.ids), everything)


def study(
    model: PreTrainedModel, tokenizer: Tokenizer, context: Context, config: BuildConfig, document: Document
) -> list[dict]:
    """Attempts {kind, question, answer, answer_ids}, or {kind, fault} for one that a filter drops.

    The teacher asks one question of each kind, unless the document's own are to do.
    """
    cache = full_cache(model, context)
    good, faults = self_made(model, tokenizer, context, cache, config) if document.studied else ({}, {})
    asked = [*good.items(), *((kind, BETWEEN + question) for kind, question in document.asked)]
    told = answered(model, tokenizer, context, cache, asked, config.answer_tokens, config)
    return [*({"kind": kind, "fault": fault} for kind, fault in faults.items()), *told]


def self_made(
    model: PreTrainedModel, tokenizer: Tokenizer, context: Context, cache: RaggedCache, config: BuildConfig
) -> tuple[dict[str, str], dict[str, str]]:
    """The teacher's question of every kind, and why those of other kinds are dropped."""
    prompts = [question_ids(tokenizer, context, BETWEEN + words)[0] for words in KINDS.values()]
    stops = stop_ids(model, tokenizer)
    drafts = answer_ids(model, tokenizer, cache, prompts, config.question_tokens)
    questions = [tidy(answer_text(tokenizer, draft.tolist(), stops)) for draft in drafts]
    asked = dict(zip(KINDS, questions, strict=True))
    faults = {kind: fault_of_question(question, config) for kind, question in asked.items()}
    good = {kind: BETWEEN + question for kind, question in asked.items() if not faults[kind]}
    return good, {kind: fault for kind, fault in faults.items() if fault}


def reply(
    model: PreTrainedModel, tokenizer: Tokenizer, context: Context, config: BuildConfig, document: Document
) -> list[dict]:
    """The one attempt at a context that asks itself."""
    cache = full_cache(model, context)
    return answered(model, tokenizer, context, cache, [(PROMPT, "")], config.flan_answer_tokens, config)


def answered(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    context: Context,
    cache: RaggedCache,
    questions: list[tuple[str, str]],
    limit: int,
    config: BuildConfig,
) -> list[dict]:
    """Attempts at (kind, question), answered greedily; `answer_ids` ends with the EOS unless the limit came first."""
    stops = stop_ids(model, tokenizer)
    asked = [question_ids(tokenizer, context, question, empty=True)[0] for _, question in questions]
    told = []
    for (kind, question), ids in zip(questions, answer_ids(model, tokenizer, cache, asked, limit), strict=True):
        ids = ids.tolist()
        text = answer_text(tokenizer, ids, stops)
        fault = fault_of_answer(text, len(ids) - (ids[-1] in stops), config)
        attempt = {"kind": kind, "question": question, "answer": text, "answer_ids": ids}
        told.append({"kind": kind, "fault": fault} if fault else attempt)
    return told


def tidy(text: str) -> str:
    """The first line that says something, without a label or quotes around it."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    for label in LABELS:
        if line.lower().startswith(label):
            line = line[len(label) :].strip()
    return line[1:-1].strip() if len(line) > 1 and line[0] == line[-1] == '"' else line
