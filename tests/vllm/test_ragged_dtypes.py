"""Cache files in an engine in bfloat16, compared with `ask` in bfloat16."""

from statistics import fmean

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.vllm_kl import ask_vllm, compute_kl
from restorekv import CompressionConfig, compress
from restorekv.model.load import load_model
from restorekv.restore.adapter import RestoreAdapter
from restorekv.vllm import prompt
from restorekv.vllm.ragged_documents import PLACEHOLDERS
from tests.helpers.models import build_model, build_tokenizer

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
QUESTIONS = ["Which code?", "Who lives there?", "Tell me more about the color of the house."]
# Repetitions of a sentence, ratio, conventions.
DOCUMENTS = {
    "red": (10, 0.2, CompressionConfig()),
    "blue": (60, 0.05, CompressionConfig()),
    "white": (20, 0.1, CompressionConfig(kv_dtype="int8")),
}
TOKENS = 12


def build_calm_model() -> PreTrainedModel:
    """Return a model with layers that do not amplify the rounding of bfloat16.

    With the weights of other tests, vLLM and transformers differ by 0.1 even without a document.
    """
    model = build_model("llama", hidden_size=128, head_dim=32)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "layers" in name and weights.dim() > 1:
                weights.mul_(0.3)
    return model


@pytest.mark.parametrize("by_head", [False, True], ids=["pages", "head by head"])
def test_distributions_are_those_of_ask(tmp_path, monkeypatch, by_head):
    """KL per token is below a thousandth, and much higher over a different document's cache."""
    from restorekv.vllm import head_loop

    if by_head:
        monkeypatch.setattr(head_loop, "MIN_TOKENS", 1)
        monkeypatch.setattr(head_loop, "MIN_WORK", 1)
    monkeypatch.setenv("RESTOREKV_VLLM", "1")
    tokenizer = build_tokenizer()
    build_calm_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    # Loaded, because `.to` would round the frequencies of RoPE, too.
    model, _ = load_model(str(tmp_path / "model"), dtype="bfloat16")
    (tmp_path / "store").mkdir()
    adapter = RestoreAdapter.create(model, 4, rank=2)
    contexts, prompts = [], []
    for name, (repetitions, ratio, config) in DOCUMENTS.items():
        text = f"The code of the {name} house is seven; nobody lives there. " * repetitions
        context = compress(model, tokenizer, text, ratio=ratio, adapter=adapter, config=config)
        path = tmp_path / "store" / f"{name}.rkv"
        context.save(path)
        for question in QUESTIONS:
            contexts.append(context)
            prompts.append(prompt(path, question, tokenizer))
    vocabulary = model.config.vocab_size
    found = ask_vllm(tmp_path, "bfloat16", prompts, TOKENS, vocabulary)
    own, others = [], []
    for number, (ids, (written, logprobs)) in enumerate(zip(prompts, found, strict=True)):
        asked = ids[PLACEHOLDERS:]
        own += compute_kl(model, contexts[number].cache.fork(), asked, written, logprobs)
        other = contexts[(number + len(QUESTIONS)) % len(contexts)]
        others += compute_kl(model, other.cache.fork(), asked, written, logprobs)
    print(f"KL per token {fmean(own):.7f}, of another document {fmean(others):.7f}")
    assert fmean(own) < 0.001
    assert fmean(others) > 0.05, "the test would not see a wrong cache"
