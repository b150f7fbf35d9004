"""The half of an engine that holds documents."""

from restorekv.serve.caches import ActiveQuestion, CacheEngine
from restorekv.serve.engine import ServedQuestion

MUCH = 1 << 30  # bytes


class DocumentHolder(CacheEngine):
    """Holds documents and answers no question."""

    def __init__(self, model, tokenizer, store) -> None:
        super().__init__(model, tokenizer, store, MUCH, None)

    def prepare(self, question: ServedQuestion) -> ActiveQuestion:
        raise NotImplementedError

    async def write(self, active: ActiveQuestion) -> None:
        raise NotImplementedError
