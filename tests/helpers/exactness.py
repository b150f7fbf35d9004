"""Compares answers over a compressed cache with what transformers computes for the same ids.

At ratio 1 nothing is lost, so logits and greedy tokens must be those of the plain model. Below 1
the oracle is the plain model with its class's own eager attention and a mask for every layer and
head that hides the evicted pairs.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from restorekv.cache.ragged import RaggedCache
from restorekv.compression.eviction import Eviction
from restorekv.errors import RestoreKVError
from restorekv.generation import decoding
from restorekv.model.cache_argument import pass_cache
from restorekv.model.prompt import Context
from restorekv.model.shape import (
    get_backbone,
    list_full_layers,
    list_pair_layers,
    list_windows,
)
from tests.helpers.models import build_tokenizer

PREFIX = 3  # tokens of a chat prefix
TOLERANCE = 2e-3  # relative to the largest logit, in float32; a wrong pair moves logits by tenths
TOKENIZER = build_tokenizer()


def random_ids(count: int, seed: int = 0) -> Tensor:
    """Return ids (1, count) without control tokens."""
    return torch.randint(3, 256, (1, count), generator=torch.Generator().manual_seed(seed))


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that RestoreKV never touches, with attention that computes all of it."""
    plain = copy.deepcopy(model)
    if getattr(plain.config.get_text_config(), "attn_logit_softcapping", None):
        # In transformers 5.2 the default is SDPA, which leaves the cap out.
        plain.set_attn_implementation("eager")
    return plain


@torch.no_grad()
def compare(
    model: PreTrainedModel,
    text: int,
    question: int,
    answer: int,
    ratios: tuple[float, ...] = (1,),
    seed: int = 0,
) -> list[str]:
    """Return what differs between RestoreKV and transformers, as sentences.

    Exceptions of RestoreKV are not caught.

    Args:
        model: The model with transformers' own attention.
        text: The number of tokens of the text, prefix included.
        question: The number of tokens of the question.
        answer: The number of tokens of the answer.
        ratios: The shares of the pairs to keep.
        seed: The seed of the random token ids.
    """
    plain = plain_copy(model)
    ids = random_ids(text + question, seed)
    context = Context(ids[:, :text], PREFIX, ids[:, :0])
    prepared = Eviction.make("random").prepare(model, TOKENIZER, context)
    problems = []
    for ratio in ratios:
        cache = prepared.evict(ratio)
        asked = ids[:, text:]
        own = read_question(model, cache, asked)
        keep = cache.mark_held(text)
        expected = plain(input_ids=ids).logits if ratio == 1 else oracle(plain, ids, keep)
        problems += differences(f"logits at ratio {ratio}", own, expected[:, text:])
        written = decoding.generate_ids(model, TOKENIZER, cache, [asked], answer)[0].tolist()
        wanted = greedy_ids(plain, ids, answer, None if ratio == 1 else keep)
        if written != wanted[: len(written)] or len(written) < min(answer, len(wanted)):
            problems.append(f"the answer at ratio {ratio} is {written}, not {wanted}")
    return problems


def read_question(
    model: PreTrainedModel, cache: RaggedCache, asked: Tensor, batch: int = 1
) -> Tensor:
    """Return the logits of a question (1, q) over a fork of a cache, in `batch` equal rows."""
    first = cache.get_seq_length()
    return model(
        input_ids=asked.expand(batch, -1),
        position_ids=torch.arange(first, first + asked.shape[-1])[None],
        use_cache=True,
        **pass_cache(model, cache.fork(batch)),
    ).logits


def measure_error(own: Tensor, expected: Tensor) -> float:
    """Return the largest difference from what is expected, relative to the largest logit."""
    return float((own.double() - expected.double()).abs().max() / expected.abs().max())


def differences(what: str, own: Tensor, expected: Tensor) -> list[str]:
    """Return a sentence if two tensors of logits differ, else an empty list."""
    size = expected.abs().max().clamp(min=1e-6)
    difference = ((own - expected).abs().max() / size).item()
    return [] if difference <= TOLERANCE else [f"{what} differ by {difference:.2g} of the largest"]


def greedy_ids(plain: PreTrainedModel, ids: Tensor, count: int, keep: Tensor | None) -> list[int]:
    """Return the likeliest `count` ids after `ids`, each from a pass over everything before it."""
    if keep is None:
        stop = TOKENIZER.eos_token_id
        result = plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=stop,
            pad_token_id=0,
        )
        return result[0, ids.shape[1] :].tolist()
    written = []
    for _ in range(count):
        written.append(int(oracle(plain, ids, keep)[0, -1].argmax()))
        ids = torch.cat([ids, torch.tensor([written[-1:]])], -1)
        if written[-1] == TOKENIZER.eos_token_id:
            break
    return written


def oracle(plain: PreTrainedModel, ids: Tensor, keep: Tensor) -> Tensor:
    """Return the logits of a dense pass in which tokens after the text attend only to those of its
    pairs that are in `keep` (L, H, T).
    """
    text = keep.shape[-1]
    total = ids.shape[-1]
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    windows = list_windows(plain.config)
    rows = {index: row for row, index in enumerate(list_full_layers(plain.config))}

    sources = list_pair_layers(plain.config)

    def mask_of(layer: int, heads: int) -> Tensor:
        # The last layers of some models attend to the pairs of an earlier one.
        source = sources[layer]
        window = windows[source]
        if window is None:
            return hidden(causal, keep[rows[source]], text, heads)
        recent = causal & ~causal.tril(-window)
        return hidden(recent, torch.ones(1, text, dtype=torch.bool), text, heads)

    plain.set_attn_implementation("eager")
    with masked(plain, mask_of):
        return plain(input_ids=ids).logits


def hidden(causal: Tensor, keep: Tensor, text: int, heads: int) -> Tensor:
    """Return the mask that eager attention adds to the logits of one layer: (1, H * G, Q, K)."""
    visible = causal.expand(heads, -1, -1).clone()
    visible[:, text:, :text] &= keep.repeat_interleave(heads // len(keep), 0)[:, None]
    dtype = torch.get_default_dtype()
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(dtype).min)[None]


def find_attention(layer: Any) -> Any:
    """Return the attention of a layer, or None if it has none."""
    own = getattr(layer, "self_attn", None) or getattr(layer, "attention", None)
    # A block of Nemotron-H has one module of any kind.
    mixer = getattr(layer, "mixer", None)
    return mixer if own is None and hasattr(mixer, "k_proj") else own


@contextmanager
def masked(plain: PreTrainedModel, mask_of: Callable[[int, int], Tensor]) -> Iterator[None]:
    """Give every attention layer the mask `mask_of(layer, query heads)` in the block."""
    heads = plain.config.get_text_config().num_attention_heads

    def replace_mask(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        assert "attention_mask" in kwargs
        return args, kwargs | {"attention_mask": mask_of(module.layer_idx, heads)}

    handles = []
    kinds = getattr(plain.config.get_text_config(), "layer_types", None) or ()
    for index, layer in enumerate(get_backbone(plain).layers):
        attention = find_attention(layer)
        # Kimi's linear attention has the same name.
        has_state = index < len(kinds) and kinds[index] == "linear_attention"
        if attention is not None and not has_state:
            handles.append(attention.register_forward_pre_hook(replace_mask, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def answered_beyond(model: PreTrainedModel, limit: int, question: int, answer: int) -> list[str]:
    """Return the texts, questions and answers that are accepted although they need one position
    more than `limit`.
    """
    ids = random_ids(limit + 1)
    text = limit - question - answer
    empty = ids[:, :0]
    calls: dict[str, Callable[[], object]] = {}
    eviction = Eviction.make("random")
    calls["a longer text"] = lambda: eviction.prepare(model, TOKENIZER, Context(ids, PREFIX, empty))
    if text > PREFIX:
        prepared = eviction.prepare(model, TOKENIZER, Context(ids[:, :text], PREFIX, empty))
        cache = prepared.evict(1)
        asked = ids[:, text : text + question]
        longer = ids[:, text : text + question + 1]
        calls["a longer question"] = lambda: decoding.generate_ids(
            model, TOKENIZER, cache, [longer], answer
        )
        calls["a longer answer"] = lambda: decoding.generate_ids(
            model, TOKENIZER, cache, [asked], answer + 1
        )
    return [what for what, call in calls.items() if not refuses(call)]


def refuses(call: Callable[[], object]) -> bool:
    """Return whether a call raises a RestoreKVError."""
    try:
        call()
    except RestoreKVError:
        return True
    return False
