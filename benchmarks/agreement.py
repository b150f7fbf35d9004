"""Agreement of one model on two devices: how many kept pairs and answers are the same."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from restorekv.context import CompressedContext
from restorekv.tiny.world import WorldDocument

# So many that an answer is longer than the windows of the families.
ANSWER_TOKENS = 128


def count_agreement(
    on_cpu: PreTrainedModel,
    on_device: PreTrainedModel,
    documents: Sequence[WorldDocument],
    make_small: Callable[[PreTrainedModel, WorldDocument], CompressedContext],
) -> dict[str, int]:
    """Count the pairs that both devices keep or both evict, and the answers that are equal.

    Returns:
        Sums over the documents: "pairs equal" of "pairs", and "answers equal" of "answers".
    """
    counts = {"pairs equal": 0, "pairs": 0, "answers equal": 0, "answers": 0}
    for document in documents:
        expected = make_small(on_cpu, document)
        found = make_small(on_device, document)
        kept = expected.kept.cpu()
        counts["pairs"] += kept.numel()
        if found.kept.shape == kept.shape:
            counts["pairs equal"] += int((found.kept.cpu() == kept).sum())
        questions = [question.text for question in document.questions]
        answers = zip(
            expected.ask(questions, ANSWER_TOKENS),
            found.ask(questions, ANSWER_TOKENS),
            strict=True,
        )
        counts["answers"] += len(questions)
        counts["answers equal"] += sum(one == other for one, other in answers)
    return counts
