"""An engine that only holds documents, for tests of what happens around answers."""

from restorekv.serve.caches import ActiveQuestion, CacheEngine
from restorekv.serve.engine import ServedQuestion

MUCH = 1 << 30  # bytes


class DocumentHolder(CacheEngine):
    """An engine that holds documents and answers no questions."""

    def __init__(self, model, tokenizer, store) -> None:
        super().__init__(model, tokenizer, store, MUCH, None)

    def prepare(self, question: ServedQuestion) -> ActiveQuestion:
        raise NotImplementedError

    async def write(self, active: ActiveQuestion) -> None:
        raise NotImplementedError
