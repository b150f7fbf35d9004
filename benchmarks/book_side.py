"""One way to ask questions about a book, measured in its own process for `benchmarks.book`."""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path

import torch
from transformers import DynamicCache

from benchmarks.book import ANSWER_PREFIX, AT_ONCE, IN_PARTS, TRANSFORMERS, Book
from benchmarks.measure import Peak, serve_job
from restorekv.cache.dense import list_dense_layers
from restorekv.compression.config import CompressionConfig
from restorekv.model.load import load_model
from restorekv.pipeline import compress


def measure(job: dict) -> dict:
    """Return seconds to read and to ask, bytes at the peak and held, and the answers."""
    book = Book(**json.loads(Path(job["book"]).read_text("utf-8")))
    model, tokenizer = load_model(job["model"])
    with Peak() as peak:
        if job["way"] == TRANSFORMERS:
            figures = ask_transformers(model, tokenizer, book, job)
        else:
            figures = ask_small_cache(model, tokenizer, book, job)
    return {"ratio": job["ratio"], "peak": peak.bytes, **figures}


def ask_transformers(model, tokenizer, book: Book, job: dict) -> dict:
    """Prefill the whole book once, and continue a copy of its cache for every question."""
    ids = tokenizer(book.text, return_tensors="pt").input_ids
    cache = DynamicCache(config=model.config)
    start = time.perf_counter()
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    read = time.perf_counter() - start
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in list_dense_layers(cache))
    texts = []
    start = time.perf_counter()
    for question in book.questions:
        prompt = f"\n\n{question}\n{ANSWER_PREFIX}"
        asked = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        whole = torch.cat([ids, asked.input_ids], -1)
        written = model.generate(
            whole,
            attention_mask=torch.ones_like(whole),
            past_key_values=copy.deepcopy(cache),
            max_new_tokens=job["answer"],
            do_sample=False,
        )
        text = tokenizer.decode(written[0, whole.shape[1] :], skip_special_tokens=True)
        texts.append(text.lstrip())
    return {"read": read, "ask": time.perf_counter() - start, "held": held, "texts": texts}


def ask_small_cache(model, tokenizer, book: Book, job: dict) -> dict:
    """Compress the book, at once or in parts, and ask all questions in one batch."""
    assert job["way"] in (AT_ONCE, IN_PARTS)
    chunk = job["part"] if job["way"] == IN_PARTS else None
    start = time.perf_counter()
    small = compress(
        model,
        tokenizer,
        book.text,
        ratio=job["ratio"],
        evictor=job["evictor"],
        config=CompressionConfig(streaming_chunk=chunk),
    )
    read = time.perf_counter() - start
    start = time.perf_counter()
    texts = small.ask(list(book.questions), job["answer"], answer_prefix=ANSWER_PREFIX)
    seconds = time.perf_counter() - start
    return {"read": read, "ask": seconds, "held": small.manifest.bytes_held, "texts": texts}


if __name__ == "__main__":
    serve_job(sys.argv[1], measure)
