"""A replacement of vLLM's completions server with our connector; transformers' own `generate`
writes the answers.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from restorekv.cache.ragged import RaggedCache
from restorekv.errors import RestoreKVError
from restorekv.model import support
from restorekv.model.rope import get_rope_settings
from restorekv.model.shape import CacheShape
from restorekv.storage.cache_file import open_cache_file
from restorekv.storage.portable import load_portable
from restorekv.vllm.composition import compose_files
from restorekv.vllm.document_store import EngineModel, find_limit
from restorekv.vllm.portable_store import PortableStore
from restorekv.vllm.ragged_documents import PLACEHOLDERS
from restorekv.vllm.ragged_store import RaggedStore

LONGEST = 2000


class FakeVllm:
    """A server of a model with documents of a form; the form None is a vLLM without our
    connector.
    """

    def __init__(self, model, tokenizer, folder: Path, form: str | None = "ragged") -> None:
        shape = CacheShape.from_model(model)
        facts = shape.layers, shape.heads, shape.head_dim, get_rope_settings(model.config)
        folder.mkdir(exist_ok=True)
        kinds = {"ragged": RaggedStore, "portable": PortableStore}
        described = EngineModel(
            *facts, "float32", model.config.vocab_size, find_limit(model.config)
        )
        self.store = kinds[form](folder, described) if form else None
        self.form = form
        support.prepare_model(model)
        self.model, self.tokenizer = model, tokenizer
        self.asked: list[dict] = []
        # Requests whose client has gone; answers wait while it is not open, and after their first
        # token while it does not go on.
        self.left, self.open, self.goes_on = 0, True, True
        # The status of every answer, or "cut" for streams without an end, or "abort" for answers
        # that end so.
        self.failure: int | str | None = None
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/completions")(self.complete)

    def models(self) -> dict:
        return {
            "object": "list",
            "data": [{"id": "served", "object": "model", "max_model_len": LONGEST}],
        }

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        if isinstance(self.failure, int):
            return JSONResponse({"error": {"message": "No.", "code": self.failure}}, self.failure)
        if body["max_tokens"] + len(body["prompt"]) > LONGEST:
            message = f"This model's maximum context length is {LONGEST} tokens. Shorten it."
            return JSONResponse(
                {"error": {"message": message, "type": "BadRequestError", "code": 400}}, 400
            )
        try:
            found = self.store and self.store.find_document(body["prompt"])
            error = None
        except RestoreKVError:  # vLLM's log has it, its answer has not
            error = {
                "error": {
                    "message": "Internal server error",
                    "type": "InternalServerError",
                    "code": 500,
                }
            }
        if body.get("stream"):
            return StreamingResponse(self.streamed(body, error, None if error else found))
        return JSONResponse(error, 500) if error else JSONResponse({"choices": []})

    async def streamed(self, body: dict, error: dict | None, document) -> AsyncIterator[str]:
        try:
            while not self.open:
                await asyncio.sleep(0.02)
            if error:
                yield f"data: {json.dumps(error)}\n\n"
            else:
                answers = [self.answer(body, document, number) for number in range(body["n"])]
                for choice in (
                    piece
                    for answer in zip(*map(padded, answers), strict=False)
                    for piece in answer
                    if piece
                ):
                    if choice["finish_reason"] and self.failure == "cut":
                        return
                    if choice["finish_reason"] and self.failure == "abort":
                        choice |= {"finish_reason": "abort", "token_ids": []}
                    yield f"data: {json.dumps({'choices': [choice]})}\n\n"
                    while not self.goes_on:
                        await asyncio.sleep(0.02)
                details = {"prompt_tokens_details": {"cached_tokens": 7}}
                yield f"data: {json.dumps({'choices': [], 'usage': details})}\n\n"
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left += 1
            raise

    def answer(self, body: dict, document, number: int) -> list[dict]:
        """Return the pieces of one answer, each with one token."""
        prompt, temperature = body["prompt"], body["temperature"]
        options = {}
        if document and self.form == "portable":
            options = {"past_key_values": load_portable(document.path).make_cache()}
        elif document:
            cache = self.open_cache(document)
            # `generate` leaves out as many ids as the cache has seen.
            prompt = [0] * cache.get_seq_length() + prompt[PLACEHOLDERS:]
            options = {"past_key_values": cache}
        ids = torch.tensor([prompt])
        if temperature:
            torch.manual_seed(body.get("seed", secrets.randbelow(2**31)) + number)
            options |= {
                "do_sample": True,
                "temperature": temperature,
                "top_p": body["top_p"],
                "top_k": body["top_k"],
            }
        result = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=body["max_tokens"],
            pad_token_id=0,
            eos_token_id=body["stop_token_ids"],
            output_logits=True,
            return_dict_in_generate=True,
            **{"do_sample": False, **options},
        )
        written, pieces = result.sequences[0, ids.shape[1] :].tolist(), []
        for place, token in enumerate(written):
            text = self.tokenizer.decode(written[: place + 1])
            stops = token in body["stop_token_ids"] or any(
                stop in text for stop in body.get("stop", ())
            )
            last = "stop" if stops else "length" if place + 1 == len(written) else None
            likely = (
                self.likely(result.logits[place][0], token, body["logprobs"])
                if "logprobs" in body
                else None
            )
            pieces.append(
                {
                    "index": number,
                    "text": "?",
                    "token_ids": [token],
                    "finish_reason": last,
                    "logprobs": likely,
                }
            )
            if last:
                break
        return pieces

    def open_cache(self, document) -> RaggedCache:
        """Return the cache of a document, or of several that are asked as one."""
        files = [open_cache_file(path) for _, path in document.files]
        return compose_files(files, self.model) if len(files) > 1 else files[0].make_cache()

    def likely(self, logits: torch.Tensor, token: int, count: int) -> dict:
        values = logits.log_softmax(-1)
        best = {token: float(values[token])} | {
            int(i): float(values[i]) for i in values.topk(count).indices
        }
        named = {f"token_id:{place}": value for place, value in best.items()}
        return {
            "tokens": [f"token_id:{token}"],
            "token_logprobs": [float(values[token])],
            "top_logprobs": [named],
        }


def padded(pieces: list[dict]) -> list[dict | None]:
    """Return pieces padded with None to one length, so that answers of any length can
    take turns.
    """
    return [*pieces, *[None] * (64 - len(pieces))]
