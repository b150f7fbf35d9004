"""Against kvpress 0.5.5, run by `make conformance` in an environment of its own (kvpress needs
transformers < 5.3).

Tiny random models in float32. kvpress hides evicted pairs behind keys that it searches for, and on
random models finds none; its own choice of pairs is therefore carried out here by an attention
function with a real mask.
"""

import copy
import re
from fractions import Fraction

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from restorekv.cache.ragged import RaggedCache
from restorekv.compression.allocate import mark_highest
from restorekv.compression.budget import Budget
from restorekv.compression.eviction import Eviction
from restorekv.generation.answers import answer_greedily
from restorekv.model.load import load_model
from restorekv.model.prompt import encode_question, make_context
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.models import build_model

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress is not installed; `make conformance` installs and uses it"
)
pytestmark = pytest.mark.kvpress

TEXT = (
    "The code of the red house is seven. The blue house has a green door, and nobody lives "
    "there since May. "
    "The door of the yellow house is open; whoever comes by is given a loaf of bread and the "
    "key to the red house. "
) * 2
QUESTIONS = ["Which code?", "Who lives in the blue house, and why?"]
# S = 1, fewer than the sinks.
SHORT = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}\n"
TEMPLATES = {"chat": None, "short": SHORT}
TOKENS = 4  # restore tokens


def masked(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Hides the pairs that kvpress has evicted; SDPA before there are any."""
    evicted = getattr(module, "masked_key_indices", None)
    queries, columns = query.shape[2], key.shape[2]
    if evicted is None or queries == columns:
        module.masked_key_indices = None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    visible = torch.ones(*key.shape[:2], queries, columns, dtype=torch.bool).tril(columns - queries)
    visible[evicted[0], evicted[1], :, evicted[2]] = False
    groups = query.shape[1] // key.shape[1]
    key, value, visible = (x.repeat_interleave(groups, 1) for x in (key, value, visible))
    result = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, visible, scale=scaling
    )
    return result.transpose(1, 2).contiguous(), None


AttentionInterface.register("masked", masked)
AttentionMaskInterface.register("masked", sdpa_mask)


class Seen:
    """Remembers the scores, which kvpress forgets when it is done."""

    def compress_post(self, model):
        self.seen = self.score_val[:, 0].clone()
        super().compress_post(model)


class KVzip(Seen, kvpress.KVzipPress):
    pass


class RestoreKV(Seen, kvpress.RestoreKVPress):
    pass


def note(worst, kind, error):
    worst[kind] = max(worst.get(kind, 0.0), error)


@pytest.fixture(params=["qwen3", "llama"])
def folder(request, tiny_tokenizer, tmp_path, monkeypatch):
    """A tiny model on disk; adapters are looked for in higokri/RestoreKV-tiny beside it instead of
    on the hub.
    """
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.save_pretrained(tmp_path / "tiny")
    build_model(request.param).save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        kvpress.presses.restorekv_press, "hf_hub_download", lambda repo, file: f"{repo}/{file}"
    )
    return tmp_path


def load_both(folder, template=None):
    """kvpress's model and ours from the same files."""
    model, tokenizer = load_model(str(folder / "tiny"))
    if template:
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder / "tiny")
    theirs = AutoModelForCausalLM.from_pretrained(
        folder / "tiny", attn_implementation="masked"
    ).eval()
    return theirs, model, tokenizer


@torch.no_grad()
def press_once(press, model, context):
    """kvpress's cache after prefill, scoring and eviction of `context`."""
    cache = DynamicCache()
    with press(model):
        model.model(input_ids=context.ids, past_key_values=cache)
    return cache


def kept_by(model, shape):
    keep = torch.ones(shape, dtype=torch.bool)
    for index, layer in enumerate(model.model.layers):
        _, heads, columns = layer.self_attn.masked_key_indices
        keep[index, heads, columns] = False
    return keep


@pytest.mark.parametrize("template", sorted(TEMPLATES))
@pytest.mark.parametrize("chunk", [2048, 100, 37])
@pytest.mark.parametrize("plus", [False, True])
def test_scores_and_kept_pairs(folder, template, chunk, plus, worst):
    theirs, model, tokenizer = load_both(folder, TEMPLATES[template])
    context = make_context(tokenizer, TEXT)
    spec = f"kvzip{'+' * plus}:chunk={chunk}"
    prepared = Eviction.make(spec, prefix_policy="counted").prepare(model, tokenizer, context)
    layers, heads, _ = prepared.scores.shape
    for compression in (0.3, 0.6, 0.8, 0.95):
        press = KVzip(compression, kvzip_plus_normalization=plus, chunk_size=chunk)
        press_once(press, theirs, context)
        exact = press.seen[..., context.prefix_length :]
        error = float(((prepared.scores - exact).abs() / exact.abs()).max())
        note(worst, f"{theirs.config.model_type} kvzip{'+' * plus} scores, relative", error)
        assert error < 1e-4
        pairs = layers * heads * context.num_tokens
        count = pairs - int(pairs * compression)
        budget = Budget.of_ratio(1 - Fraction(str(compression)), context.num_tokens, layers, heads)
        assert count - budget.total in (0, 1)
        assert kept_by(theirs, (layers, heads, context.num_tokens)).equal(
            mark_highest(prepared.competing_scores(), count)
        )


def save_ours(model, folder):
    adapter = RestoreAdapter.create(model, TOKENS, rank=3, alpha=6)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapter.lora:
            parameter.normal_(std=0.2, generator=generator)
    adapter.save_pretrained(folder)


def save_published(model, folder):
    """As the adapters on the hub: what PEFT writes, and the embeddings."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    wrapped = get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.2, generator=generator)
    wrapped.save_pretrained(folder)
    embeddings = torch.randn(TOKENS, model.config.hidden_size, generator=generator)
    save_file({"restore_embeddings": embeddings}, folder / "restore_embeddings.safetensors")


@pytest.mark.parametrize("template", sorted(TEMPLATES))
@pytest.mark.parametrize("save", [save_ours, save_published])
@pytest.mark.parametrize("plus", [False, True])
def test_one_adapter_in_both(folder, template, save, plus, worst):
    theirs, model, tokenizer = load_both(folder, TEMPLATES[template])
    place = folder / "higokri" / f"RestoreKV-tiny{'_plus' * plus}"
    place.mkdir(parents=True)
    save(model, place)
    adapter = RestoreAdapter.from_pretrained(model, place)
    context = make_context(tokenizer, TEXT)
    eviction = Eviction.make(f"kvzip{'+' * plus}", adapter, prefix_policy="counted")
    prepared = eviction.prepare(model, tokenizer, context)
    layers, heads, _ = prepared.scores.shape
    for compression in (0.5, 0.8, 0.9):
        press = RestoreKV(compression, kvzip_plus_normalization=plus)
        theirs_cache = press_once(press, theirs, context)
        pairs = layers * heads * context.num_tokens
        count = pairs - int(pairs * min(1.0, compression + TOKENS / context.num_tokens))
        keep = mark_highest(prepared.competing_scores(), count)
        assert kept_by(theirs, keep.shape).equal(keep)
        ours_cache = RaggedCache.from_kept_pairs(prepared.full, keep, prepared.restore_cache)
        assert (
            theirs_cache.get_seq_length()
            == ours_cache.get_seq_length()
            == context.num_tokens + TOKENS
        )
        budget = Budget.of_ratio(
            1 - Fraction(str(compression)), context.num_tokens, layers, heads, TOKENS
        )
        assert ours_cache.pairs_held - budget.total in (0, 1)
        asked = encode_question(tokenizer, context, QUESTIONS[0])
        with torch.no_grad():
            ours = model(asked, past_key_values=ours_cache.fork()).logits
            exact = theirs(asked, past_key_values=theirs_cache).logits
        error = float((ours - exact).abs().max())
        note(worst, f"{theirs.config.model_type} {save.__name__} logits, absolute", error)
        assert error < 1e-3
        pipeline = kvpress.KVPressTextGenerationPipeline(model=theirs, tokenizer=tokenizer)
        press = RestoreKV(compression, kvzip_plus_normalization=plus)
        answers = pipeline(TEXT, questions=QUESTIONS, press=press, max_new_tokens=16)["answers"]
        assert answer_greedily(model, tokenizer, context, ours_cache, QUESTIONS, 16) == [
            answer.lstrip() for answer in answers
        ]
        assert all(answers)


@pytest.mark.parametrize("plus", [False, True])
def test_the_kvpress_lines_of_a_model_card(folder, plus, monkeypatch):
    """They give a press, from a folder of any name, that keeps our pairs and appends our restore
    states.
    """
    theirs, model, tokenizer = load_both(folder)
    place = folder / "some" / "name"
    save_ours(model, place)
    adapter = RestoreAdapter.from_pretrained(model, place)
    adapter.record_training(evictor=f"kvzip{'+' * plus}", prefix_policy="counted")
    adapter.save_pretrained(place)
    section = (place / "README.md").read_text().split("## In kvpress 0.5.5")[1]
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name: str(place))
    made = {"model": theirs}
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], made)
    context = make_context(tokenizer, TEXT)
    cache = press_once(made["press"], theirs, context)
    prepared = Eviction.make(f"kvzip{'+' * plus}", adapter, prefix_policy="counted").prepare(
        model, tokenizer, context
    )
    layers, heads, _ = prepared.scores.shape
    pairs = layers * heads * context.num_tokens
    keep = mark_highest(
        prepared.competing_scores(), pairs - int(pairs * (0.9 + TOKENS / context.num_tokens))
    )
    assert kept_by(theirs, keep.shape).equal(keep)
    for (keys, values), exact in zip(prepared.restore_cache, cache.layers, strict=True):
        assert exact.keys.shape[-2] == context.num_tokens + TOKENS
        torch.testing.assert_close(keys, exact.keys[:, :, -TOKENS:], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(values, exact.values[:, :, -TOKENS:], atol=1e-4, rtol=1e-4)
