"""The analyses against transformers' eager attention in float64 over dense caches with masks, and
cases by hand.
"""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from paper.analysis import attention_mass, divergence, restore_attention, survivors
from paper.analysis.case import Case, DocumentFigures, to_plain
from restorekv.compression.eviction import Eviction
from restorekv.evaluation.protocols import PROTOCOLS
from restorekv.evaluation.stats import draw_resamples
from restorekv.model import attention
from restorekv.model.prompt import make_context
from restorekv.model.shape import get_backbone
from restorekv.restore.adapter import RestoreAdapter
from restorekv.tasks import Question, Sample
from tests.helpers.hybrids import build_hybrid
from tests.helpers.models import build_model

TEXT = (
    "the code of the red house is seven; who lives in the blue house? the code of the house is "
    "who. " * 2
)
SAMPLE = Sample(
    "a",
    TEXT,
    (Question("a-0", "qa", "who?", ("red",), 4), Question("a-1", "qa", "what code?", ("is",), 3)),
)
RATIO, N = 0.2, 2


def trained(model, n=N):
    """An adapter whose LoRA does something."""
    adapter = RestoreAdapter.create(model, n, rank=2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in adapter.lora_parameters.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 4)
    return adapter


def make_case(model, tokenizer, restore_from="full", policy="free"):
    adapter = trained(model)
    eviction = Eviction.make("random", adapter, restore_from=restore_from, prefix_policy=policy)
    prepared = eviction.prepare(model, tokenizer, make_context(tokenizer, TEXT))
    return Case(prepared, tokenizer, PROTOCOLS["kvpress"], SAMPLE, RATIO, adapter)


def keeps(prepared, restored):
    """(L, H, S + T) bool by a sort of all scores; the prefix, which is free, stays."""
    layers, heads, tokens = prepared.scores.shape
    count = int(RATIO * tokens * layers * heads + 1e-9) - (N * layers * heads if restored else 0)
    keep = torch.zeros(layers * heads * tokens, dtype=torch.bool)
    keep[prepared.scores.flatten().argsort(descending=True)[:count]] = True
    return torch.nn.functional.pad(
        keep.view(layers, heads, tokens), (prepared.context.prefix_length, 0), value=True
    )


class Eager:
    """The same weights in float64 with transformers' own attention, over dense caches, dropped
    pairs masked.
    """

    def __init__(self, model):
        self.model = (
            type(model)
            ._from_config(copy.deepcopy(model.config), attn_implementation="eager")
            .eval()
        )
        self.model.load_state_dict(model.state_dict())
        self.model.double()

    @torch.no_grad()
    def __call__(self, prepared, keep, restored, ids):
        """logits (q, V) and a list over layers of attention (H * G, q, S + T + n + q)."""
        cache, before = DynamicCache(), prepared.context.num_tokens
        for index, layer in enumerate(prepared.full.layers):
            pairs = zip((layer.keys, layer.values), prepared.restore_cache[index], strict=True)
            cache.update(
                *(torch.cat([a, b] if restored else [a], 2).double() for a, b in pairs), index
            )
        past, length = cache.get_seq_length(), ids.shape[1]
        groups = self.model.config.num_attention_heads // keep.shape[1]
        handles = []
        for index, layer in enumerate(get_backbone(self.model).layers):
            seen = (
                torch.ones(length, past + length, dtype=torch.bool)
                .tril(past)
                .repeat(keep.shape[1] * groups, 1, 1)
            )
            seen[:, :, :before] &= keep[index].repeat_interleave(groups, 0)[:, None]
            mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(
                ~seen, torch.finfo(torch.float64).min
            )

            def put(module, args, kwargs, mask=mask[None]):
                return args, {**kwargs, "attention_mask": mask}

            handles.append(layer.self_attn.register_forward_pre_hook(put, with_kwargs=True))
        positions = torch.arange(past, past + length)[None]
        output = self.model(
            input_ids=ids, past_key_values=cache, position_ids=positions, output_attentions=True
        )
        for handle in handles:
            handle.remove()
        return output.logits[0], [weights[0] for weights in output.attentions]


def views(case):
    """What the oracle needs for every cache: pairs kept, restored or not."""
    prepared = case.prepared
    everything = torch.ones_like(keeps(prepared, False))
    return {
        "full": (everything, False),
        "base": (keeps(prepared, False), False),
        "restored": (keeps(prepared, True), True),
    }


def test_masses_and_divergences_are_those_of_eager_attention(tiny_model, tiny_tokenizer):
    case, eager = make_case(tiny_model, tiny_tokenizer), Eager(tiny_model)
    figures, columns = attention_mass.measure(case), case.prepared.context.num_tokens
    heads, sinks = case.prepared.scores.shape[1], max(case.prepared.context.prefix_length, 4)
    expected = {name: [] for name in figures}
    kl = {name: [] for name in figures}
    for prompt in case.prompts:
        rows = {name: eager(case.prepared, *view, prompt)[1] for name, view in views(case).items()}
        for name, layers in rows.items():
            after = columns + (N if name == "restored" else 0)
            cuts = (
                slice(sinks, columns),
                slice(0, sinks),
                slice(columns, after),
                slice(after, None),
            )
            expected[name].append(
                [[layer[:, -1, cut].sum(-1).mean().item() for cut in cuts] for layer in layers]
            )
            keep = views(case)[name][0]
            kl[name].append(
                [
                    by_hand(rows["full"][i], layers[i], keep[i], heads, sinks, columns)
                    for i in range(len(layers))
                ]
            )
    for name, per_cache in figures.items():
        np.testing.assert_allclose(per_cache["masses"], np.mean(expected[name], 0), atol=2e-6)
        np.testing.assert_allclose(np.sum(per_cache["masses"], -1), 1)
        if name != "full":
            sums, counts = np.array(per_cache["kl_attention"])
            np.testing.assert_allclose(sums / counts, np.mean(kl[name], 0), rtol=1e-4, atol=1e-7)


def test_layers_with_a_window_have_no_masses(tiny_tokenizer):
    # Nothing of them is evicted and they are not observed: as zeros they would halve every mean.
    case = make_case(build_hybrid("qwen2"), tiny_tokenizer)
    layers = case.prepared.scores.shape[0]
    assert layers < len(case.prepared.full.layers)
    for figures in attention_mass.measure(case).values():
        np.testing.assert_allclose(np.sum(figures["masses"], axis=1), np.ones(layers))
    found = restore_attention.measure(case)
    np.testing.assert_allclose(np.sum(found["masses"], axis=0), np.ones((layers, N)))
    assert np.shape(found["entropy"]) == (layers, N)


def by_hand(full, cache, keep, heads, sinks, columns):
    """Mean over query heads of KL(full || cache) over what each holds beyond the sinks."""
    divergences = []
    for head in range(len(full)):
        kept = [i for i in range(sinks, columns) if keep[head * heads // len(full), i]]
        p, q = (
            weights[head, -1, kept] / weights[head, -1, kept].sum() for weights in (full, cache)
        )
        divergences.append(sum(float(a * (a.log() - b.log())) for a, b in zip(p, q, strict=True)))
    return np.mean(divergences)


def test_next_token_divergences_are_those_of_eager_logits(tiny_model, tiny_tokenizer):
    case, eager = make_case(tiny_model, tiny_tokenizer), Eager(tiny_model)
    figures = divergence.measure(case)
    expected = {name: [] for name in figures}
    for prompt, asked in zip(case.prompts, SAMPLE.questions, strict=True):
        ids, answer = prompt, []
        while len(answer) < asked.max_new_tokens and answer[-1:] != [2]:  # EOS
            answer.append(int(eager(case.prepared, *views(case)["full"], ids)[0][-1].argmax()))
            ids = torch.cat([ids, torch.tensor([answer[-1:]])], -1)
        logits = {
            name: eager(case.prepared, *view, ids)[0][-len(answer) - 1 : -1]
            for name, view in views(case).items()
        }
        p = logits["full"].softmax(-1)
        for name in figures:
            q = logits[name].softmax(-1)
            forward, backward = (p * (p / q).log()).sum(-1), (q * (q / p).log()).sum(-1)
            same = (p.argmax(-1) == q.argmax(-1)).double()
            rows = torch.stack([forward, backward, (forward + backward) / 2, same], -1)
            expected[name].append([rows[0].tolist(), rows.mean(0).tolist()])
    for name, per_cache in figures.items():
        places = [per_cache["first"], per_cache["answer"]]
        np.testing.assert_allclose(places, np.mean(expected[name], 0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("restore_from", ["full", "evicted"])
def test_restore_attention_is_eager_attention_of_the_restore_pass(
    tiny_model, tiny_tokenizer, restore_from
):
    case = make_case(tiny_model, tiny_tokenizer, restore_from)
    prepared, figures = case.prepared, restore_attention.measure(case)
    later, (layers, heads, tokens) = keeps(prepared, True), prepared.scores.shape
    seen = later if restore_from == "evicted" else torch.ones_like(later)
    rows = eager_restore(case, seen)
    prefix, columns, sinks = (
        prepared.context.prefix_length,
        prepared.context.num_tokens,
        max(prepared.context.prefix_length, 4),
    )
    masses, entropy, total = np.zeros((5, layers, N)), np.zeros((layers, N)), np.zeros((N, columns))
    for layer, head, token in np.ndindex(layers, rows[0].shape[0], N):
        weights, kept = (
            rows[layer][head, token].numpy(),
            later[layer, head * heads // rows[0].shape[0]].numpy(),
        )
        context = weights[:columns] * (np.arange(columns) >= sinks)
        before = weights[columns : columns + token].sum()
        parts = (
            context[kept].sum(),
            context[~kept].sum(),
            weights[:sinks].sum(),
            before,
            weights[columns + token],
        )
        masses[:, layer, token] += np.array(parts) / rows[0].shape[0]
        shares = context[context > 0] / context.sum()
        entropy[layer, token] -= (shares * np.log(shares)).sum() / rows[0].shape[0]
        total[token] += context
    total = total[:, prefix:] / total.sum(-1, keepdims=True)
    np.testing.assert_allclose(figures["masses"], masses, atol=5e-6)
    np.testing.assert_allclose(figures["entropy"], entropy, rtol=1e-4)
    bins = np.floor(np.arange(tokens) * 20 / tokens).astype(int)
    expected = [[total[token, bins == place].sum() for place in range(20)] for token in range(N)]
    np.testing.assert_allclose(figures["histogram"], expected, atol=5e-6)
    assert figures["pairs"] == [int(later[..., sinks:].sum()), layers * heads * (columns - sinks)]
    assert (
        figures["masses"][1] == [[0] * N] * layers
        if restore_from == "evicted"
        else np.min(figures["masses"][1]) > 0
    )
    for token, top in enumerate(figures["tokens"]):
        assert [each["position"] for each in top] == np.argsort(-total[token])[:8].tolist()
        assert top[0]["text"] == tiny_tokenizer.decode(
            [prepared.context.ids[0, prefix + top[0]["position"]]]
        )
    assert "tokens" not in restore_attention.measure(replace(case, index=3))


def eager_restore(case, seen):
    """Attention (H * G, n, S + T + n) of every layer in the restore pass, the adapter's own layers
    in the model.
    """
    model, prepared = case.prepared.model, case.prepared
    cache, past = DynamicCache(), prepared.context.num_tokens
    for index, layer in enumerate(prepared.full.layers):
        cache.update(layer.keys, layer.values, index)
    model.set_attn_implementation("eager")
    groups, handles = model.config.num_attention_heads // seen.shape[1], []
    for index, layer in enumerate(get_backbone(model).layers):
        open_ = (
            torch.ones(N, past + N, dtype=torch.bool)
            .tril(past)
            .repeat(seen.shape[1] * groups, 1, 1)
        )
        open_[:, :, :past] &= seen[index].repeat_interleave(groups, 0)[:, None]
        mask = torch.zeros(open_.shape).masked_fill(~open_, torch.finfo(torch.float32).min)[None]

        def put(module, args, kwargs, mask=mask):
            return args, {**kwargs, "attention_mask": mask}

        handles.append(layer.self_attn.register_forward_pre_hook(put, with_kwargs=True))
    with torch.no_grad():
        output = get_backbone(case.adapter.adapted_model)(
            inputs_embeds=case.adapter.embeddings[None],
            past_key_values=cache,
            output_attentions=True,
            position_ids=torch.arange(past, past + N)[None],
        )
    for handle in handles:
        handle.remove()
    model.set_attn_implementation(attention.NAME)
    return [weights[0].double() for weights in output.attentions]


@pytest.mark.parametrize("policy", ["free", "counted"])
def test_survivors_are_the_pairs_that_the_caches_hold(tiny_tokenizer, policy):
    case = make_case(build_model("qwen3"), tiny_tokenizer, policy=policy)
    figures, prefix = survivors.measure(case), case.prepared.context.prefix_length
    layers, heads, tokens = case.prepared.scores.shape
    for name, cache in (("base", case.caches["base"]), ("restored", case.caches["restored"])):
        columns = [
            [
                [
                    int(p) - prefix
                    for p in layer.positions[layer.bounds[h] : layer.bounds[h + 1]]
                    if p >= prefix
                ]
                for h in range(heads)
            ]
            for layer in cache.layers
        ]
        total = sum(len(head) for layer in columns for head in layer)
        assert figures[name]["share_per_layer"] == pytest.approx(
            [sum(map(len, layer)) / total for layer in columns]
        )
        assert figures[name]["kept_per_head"] == [
            pytest.approx([len(head) / tokens for head in layer]) for layer in columns
        ]
        anywhere = {column for layer in columns for head in layer for column in head}
        assert figures[name]["forgotten"] == pytest.approx(1 - len(anywhere) / tokens)
        assert (
            sum(figures[name]["classes"][0]) == tokens and sum(figures[name]["classes"][1]) == total
        )
        twentieth = [
            column * 20 // tokens for layer in columns for head in layer for column in head
        ]
        sizes = np.bincount(np.arange(tokens) * 20 // tokens)
        expected = np.bincount(twentieth, minlength=20) / sizes / (layers * heads)
        np.testing.assert_allclose(figures[name]["kept_per_position"], expected)
    both, either = figures["overlap"]
    assert sum(both) < sum(either) and len(both) == layers


def test_classes_of_tokens():
    texts = [
        "The",
        " code",
        " of",
        " Mar",
        "ta",
        " is",
        " 4",
        "7b",
        ".",
        "\n",
        " the",
        " Red",
        " red",
        " ?!",
        " é",
    ]
    kinds = [
        "other",
        "other",
        "other",
        "name",
        "name",
        "other",
        "number",
        "number",
        "punctuation",
        "other",
        "other",
        "other",
        "other",
        "punctuation",
        "other",
    ]
    assert survivors.classify_tokens(texts) == kinds


def test_pieces_join_to_the_text(tiny_model, tiny_tokenizer):
    case = make_case(tiny_model, tiny_tokenizer)
    assert "".join(case.pieces) == TEXT


def test_pooled_attention_by_hand():
    """One layer pair: profiles (1/2, 1/2) and (3/4, 1/4); three documents of 1 question, and
    three of 3.
    """
    full = {"masses": [[0.4, 0.2, 0.0, 0.4], [0.4, 0.2, 0.0, 0.4]]}
    base = [
        {
            "masses": [[0.6, 0.1, 0.0, 0.3], [0.2, 0.1, 0.0, 0.7]],
            "kl_attention": [[1.0, 0.0], [2.0, 0.0]],
        },
        {
            "masses": [[0.0006, 0.5, 0.0, 0.4994], [0.0002, 0.5, 0.0, 0.4998]],
            "kl_attention": [[0.0, 0.0], [2.0, 0.0]],
        },
    ]
    caches = attention_mass.pool_figures(
        DocumentFigures([{"full": full, "base": each} for each in base] * 3, [1, 3] * 3)
    )["caches"]
    assert caches["full"]["context"] == [0.4, 0.4] and caches["full"]["layers_below"] == 0
    assert caches["base"]["context"] == pytest.approx(
        [(0.6 + 3 * 0.0006) / 4, (0.2 + 3 * 0.0002) / 4]
    )
    assert caches["base"]["average"]["sinks"] == pytest.approx(0.4)
    assert caches["base"]["kl_profile"] == pytest.approx(
        0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25), rel=1e-4
    )
    assert caches["base"]["kl_profile_backward"] == pytest.approx(
        0.75 * np.log(1.5) + 0.25 * np.log(0.5), rel=1e-4
    )
    # 1 / 4 of a sum of 1, over 2 heads.
    assert caches["base"]["kl_attention"] == pytest.approx(1 / 8)
    assert caches["base"]["kl_attention_per_layer"] == [pytest.approx(1 / 8), None]
    drawn = draw_resamples(6, 0) * ([1, 3] * 3)
    means = drawn @ ([0.4, 0.0004] * 3) / drawn.sum(1)
    expected = np.percentile(means, (2.5, 97.5))
    assert caches["base"]["context_interval"] == pytest.approx(expected, rel=1e-4)
    # Both documents have one profile.
    assert caches["base"]["kl_profile_interval"] == pytest.approx([0.143841] * 2)


def test_a_layer_without_context_leaves_the_forward_divergence_undefined():
    documents = [
        {
            "full": {"masses": [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0]]},
            "base": {
                "masses": [[0.5, 0.5, 0, 0], [0.0, 1.0, 0, 0]],
                "kl_attention": [[0.0, 0.0], [2.0, 0.0]],
            },
        }
    ]
    base = attention_mass.pool_figures(DocumentFigures(documents, [1]))["caches"]["base"]
    assert base["kl_profile"] is None and base["kl_profile_interval"] == [None, None]
    assert (
        base["kl_profile_backward"] == pytest.approx(np.log(2), rel=1e-5)
        and base["layers_below"] == 1
    )


def test_the_pools_interval_is_that_of_a_bootstrap_over_documents():
    values = np.random.default_rng(0).random(300)
    pool = DocumentFigures([{"a": {"b": value}} for value in values], [1] * 300)
    low, high = pool.interval(lambda x: x, "a", "b")
    half = 1.96 * values.std(ddof=1) / 300**0.5
    assert (low, high) == (
        pytest.approx(values.mean() - half, abs=0.005),
        pytest.approx(values.mean() + half, abs=0.005),
    )
    assert to_plain(np.array([1 / 3, np.inf])) == [0.333333, None]


def test_the_interval_weighs_as_the_mean_does():
    values = np.arange(400) / 400
    pool = DocumentFigures(
        [{"a": value} for value in values], [1 + 9 * (value > 0.5) for value in values]
    )
    for by_question in (False, True):
        low, high = pool.interval(lambda x: x, "a", by_question=by_question)
        mean = pool.mean("a", by_question=by_question)
        assert low < mean < high and (low + high) / 2 == pytest.approx(mean, abs=0.01)
    assert (
        pool.mean("a") == pytest.approx(0.5, abs=0.01) and pool.mean("a", by_question=True) > 0.68
    )
