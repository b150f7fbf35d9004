"""Appending and composing: if everything is kept, equal to compressing the whole text at once; if
not, exact budgets and positions.
"""

from fractions import Fraction

import pytest
import torch
from transformers import AttentionInterface

from restorekv import CompressedContext, CompressionConfig, compose, compress
from restorekv.cache.sliding import SlidingLayer
from restorekv.compression.growing import Growth
from restorekv.errors import BudgetError, RestoreKVError, RestoreKVWarning
from restorekv.evictors import EVICTORS
from restorekv.model.prefill import prefill
from restorekv.model.prompt import make_context
from restorekv.model.rope import shift_keys
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.compressing import QUESTIONS, TEXT, compress_with, make_adapter
from tests.helpers.models import build_model, build_tokenizer

LONG = TEXT * 2
# Those that score a part by itself, and need no trained gate.
STREAMING_EVICTORS = [
    name for name, kind in EVICTORS.items() if kind.streams and name not in ("fastkvzip", "kvzap")
]
N = 4


@pytest.fixture(scope="module")
def model():
    return build_model("qwen3")


def halves(tokenizer):
    """Return the token ids of a text in two parts."""
    context = make_context(tokenizer, LONG)
    ids = context.ids[0, context.prefix_length :].tolist()
    return ids[:90], ids[90:]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_with_all_kept_an_append_is_the_whole(family, tiny_tokenizer):
    model, (first, second) = build_model(family).double(), halves(tiny_tokenizer)
    options = {"ratio": 1, "adapter": None}
    whole = compress_with(model, tiny_tokenizer, first + second, **options)
    grown = (
        compress_with(model, tiny_tokenizer, first, **options)
        .append(second[:50])
        .append(second[50:])
    )
    assert grown.context.ids.equal(whole.context.ids) and grown.kept.all()
    for ours, theirs in zip(grown.cache.layers, whole.cache.layers, strict=True):
        torch.testing.assert_close(ours.context_keys, theirs.context_keys, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(ours.context_values, theirs.context_values, atol=1e-6, rtol=1e-6)
        if isinstance(ours, SlidingLayer):
            assert (ours.first, ours.seen) == (theirs.first, theirs.seen)
        else:
            assert ours.positions.equal(theirs.positions) and ours.offsets.equal(theirs.offsets)
    assert grown.ask(QUESTIONS, 8) == whole.ask(QUESTIONS, 8)
    assert grown.manifest.parts == [90, 50, len(second) - 50]


@pytest.mark.parametrize("spec", [*STREAMING_EVICTORS, "kvzip per-head", "kvzip counted"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_what_is_kept_whole_is_not_scored(family, spec, tiny_tokenizer, monkeypatch):
    """KVzip's scores take as long as reading the text twice, and do not change what is kept."""
    model, (first, second) = build_model(family), halves(tiny_tokenizer)
    evictor, _, variant = spec.partition(" ")
    options = {
        "per-head": {"allocation": "per-head"},
        "counted": {"prefix_policy": "counted"},
    }.get(variant, {})
    small = compress_with(
        model, tiny_tokenizer, first, ratio=1, adapter=None, evictor=evictor, **options
    )
    scored = []
    kind = type(small.compressor.evictor)
    score = kind.score

    def count_scores(self, *given, **named):
        scored.append(self)
        return score(self, *given, **named)

    monkeypatch.setattr(kind, "score", count_scores)
    grown = small.append(second)
    assert not scored and grown.kept.all() and "score" not in grown.manifest.seconds
    # With scores, the same pairs stay, and each has the same bits.
    monkeypatch.setattr(Growth, "_keeps_all", lambda self, part, room: False)
    again = small.append(second)
    assert scored
    for ours, theirs in zip(grown.cache.layers, again.cache.layers, strict=True):
        assert ours.context_keys.equal(theirs.context_keys)
        assert ours.context_values.equal(theirs.context_values)
        if not isinstance(ours, SlidingLayer):
            assert ours.positions.equal(theirs.positions) and ours.offsets.equal(theirs.offsets)
    # Where some of a part has to go, it is scored.
    scored.clear()
    compress_with(
        model, tiny_tokenizer, first, ratio=0.5, adapter=None, evictor=evictor, **options
    ).append(second)
    assert scored


def test_a_text_shorter_than_a_window_can_be_kept_whole(model, tiny_tokenizer):
    """SnapKV needs its window only to rank pairs, and nothing is ranked here."""
    options = {"adapter": None, "evictor": "snapkv:window=64"}
    first, second = halves(tiny_tokenizer)
    grown = compress_with(model, tiny_tokenizer, first, ratio=1, **options).append(second[:9])
    assert grown.kept.all() and grown.manifest.parts == [90, 9]
    small = compress_with(model, tiny_tokenizer, first, ratio=0.8, **options)
    with pytest.raises(RestoreKVError, match="always keeps the latest 9 tokens"):
        small.append(second[:9])


def test_new_pairs_come_from_a_model_that_reads_what_was_kept(model, tiny_tokenizer):
    """They are those of a dense forward pass with a mask for every layer and head, which hides what
    the first part did not keep.
    """
    model, (first, second) = build_model("qwen3").double(), halves(tiny_tokenizer)
    small = compress(
        model, tiny_tokenizer, first, ratio=0.3, adapter=None, evictor="snapkv:window=8"
    )
    grown, old = small.append(second), small.context.num_tokens
    total, kept = grown.context.num_tokens, small.kept
    order = torch.arange(total)
    new = order >= old

    def masked(module, query, key, value, attention_mask, scaling=None, **_):
        groups, seen = (
            query.shape[1] // key.shape[1],
            torch.nn.functional.pad(kept[module.layer_idx], (0, total - old)),
        )
        allowed = (order[:, None] >= order) & (~new[:, None] | new | seen[:, None, :])
        scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
        scores = scores.masked_fill(~allowed.repeat_interleave(groups, 0), -torch.inf)
        return (scores.softmax(-1) @ value.repeat_interleave(groups, 1)).transpose(
            1, 2
        ).contiguous(), None

    AttentionInterface.register("masked-oracle", masked)
    oracle = build_model("qwen3").double()
    oracle.set_attn_implementation("masked-oracle")
    full = prefill(oracle, grown.context.ids)
    for layer, dense in zip(grown.cache.layers, full.layers, strict=True):
        heads = torch.arange(layer.heads).repeat_interleave(layer.offsets.diff().long())
        late = layer.positions >= old
        expected = dense.keys[0, heads[late], layer.positions[late].long()]
        torch.testing.assert_close(layer.context_keys[late], expected, atol=1e-6, rtol=1e-6)
    assert grown.kept[..., :old].equal(kept)  # nothing of before was dropped, and nothing came back


@pytest.mark.parametrize("restore", ["last", "every", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_policy": "counted"},
        {"allocation": "per-head"},
        {"kv_dtype": "int8"},
        {"restore_from": "evicted"},
    ],
)
def test_the_budget_of_the_whole_is_exact(model, tiny_tokenizer, tmp_path, restore, options):
    first, second = halves(tiny_tokenizer)
    adapter = None if restore == "none" and "restore_from" not in options else make_adapter(model)
    small = compress_with(
        model,
        tiny_tokenizer,
        first,
        ratio=0.3,
        adapter=adapter,
        evictor="snapkv:window=8",
        **options,
    )
    grown = small.append(second[:60], restore=restore).append(second[60:], restore=restore)
    m, heads = grown.manifest, small.cache.lengths.numel()
    columns = m.tokens + (m.prefix if options.get("prefix_policy") == "counted" else 0)
    budget = (
        int(0.3 * columns) * heads if "allocation" in options else int(0.3 * columns * heads + 1e-9)
    )
    assert m.tokens == len(first + second) and m.pairs == budget
    assert (m.restore_tokens, m.earlier) == {"last": (N, 0), "every": (N, 2 * N), "none": (0, 0)}[
        restore
    ]
    assert grown.cache.get_seq_length() == grown.context.num_tokens + m.restore_tokens
    assert int(grown.kept.sum()) == grown.cache.pairs_held - (m.earlier + m.restore_tokens) * heads
    grown.save(tmp_path / "grown.rkv")
    again = CompressedContext.load(tmp_path / "grown.rkv", model, tiny_tokenizer)
    assert again.manifest == m and again.ask(QUESTIONS, 6) == grown.ask(QUESTIONS, 6)
    if "allocation" in options and "kv_dtype" not in options:
        assert grown.portable().tokens * heads == m.pairs_held


def test_a_loaded_cache_grows_as_the_one_that_was_saved(model, tiny_tokenizer, tmp_path):
    first, second = halves(tiny_tokenizer)
    adapter = make_adapter(model)
    small = compress(model, tiny_tokenizer, first, ratio=0.4, adapter=adapter)
    small.save(tmp_path / "doc.rkv")
    again = CompressedContext.load(tmp_path / "doc.rkv", model, tiny_tokenizer)
    assert again.append(second, adapter=adapter).ask(QUESTIONS, 6) == small.append(second).ask(
        QUESTIONS, 6
    )
    with pytest.warns(RestoreKVWarning, match="is extended with"):
        again.append(second, adapter=adapter, evictor="knorm")


def test_what_cannot_grow_says_so(model, tiny_tokenizer):
    first, second = halves(tiny_tokenizer)
    small = compress(model, tiny_tokenizer, first, ratio=0.4, adapter=make_adapter(model))
    cases = [
        (lambda: small.append(""), "nothing to append"),
        (lambda: small.append(second, restore="some"), "restore must be one of last, every, none"),
        (lambda: small.append([10**6]), "Token ids run from 0"),
        (lambda: small.append(second[:2], restore="every"), "no room for the new text"),
        (
            lambda: compress(model, tiny_tokenizer, first, evictor="am-fast").append(second),
            "cannot grow",
        ),
        (
            lambda: compress(model, tiny_tokenizer, first, evictor="am-fast").append(
                second, evictor="kvzip"
            ),
            "am-fast makes a cache that cannot grow",
        ),
        (
            lambda: compress(
                model, tiny_tokenizer, first, evictor="streaming", adapter=None
            ).append(second),
            "streaming scores a context as a whole",
        ),
        (
            lambda: compress(
                model, tiny_tokenizer, first, config=CompressionConfig(offset=3), adapter=None
            ).append(second),
            "with an offset cannot grow",
        ),
        (
            lambda: compress(
                model, tiny_tokenizer, first, evictor="snapkv:window=8", adapter=None
            ).append(second[:5]),
            "append more at once",
        ),
    ]
    for act, match in cases:
        with pytest.raises((RestoreKVError, BudgetError), match=match):
            act()


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda model: model.bfloat16(), r"The cache holds float32; load the model with dtype"),
        (
            lambda model: model.lm_head.weight.mul_(1.1),
            r"The cache was made with a different model.*",
        ),
    ],
)
def test_a_model_that_was_changed_since_reads_nothing_more(tiny_tokenizer, change, refusal):
    """Half of the cache would come from other weights, and its file would be refused."""
    model = build_model("llama")
    small = compress(model, tiny_tokenizer, TEXT, ratio=0.5, evictor="knorm", adapter=None)
    change(model)
    with pytest.raises(RestoreKVError, match=refusal):
        small.append(TEXT)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_composed_keys_are_those_of_texts_read_where_they_stand(family, tiny_tokenizer):
    model, (first, second) = build_model(family).double(), halves(tiny_tokenizer)
    parts = [
        compress(model, tiny_tokenizer, ids, ratio=1, adapter=None)
        for ids in (first, second, first)
    ]
    whole, prefix = compose(parts), parts[0].context.prefix_length
    assert whole.kept.all() and whole.manifest.parts == [len(first), len(second), len(first)]
    start = 0
    for part in parts:
        ids = part.context.ids
        with torch.no_grad():
            # the model's own angles are in float32
            positions = torch.arange(start, start + ids.shape[1])[None]
            full = model(ids, position_ids=positions, use_cache=True).past_key_values
        for layer, dense in zip(whole.cache.layers, full.layers, strict=True):
            keys, values = (
                x.unflatten(0, (layer.heads, -1))
                for x in (layer.context_keys, layer.context_values)
            )
            place = slice(prefix + start, start + ids.shape[1])
            torch.testing.assert_close(
                keys[:, place], dense.keys[0, :, prefix:], atol=1e-4, rtol=1e-4
            )
            torch.testing.assert_close(
                values[:, place], dense.values[0, :, prefix:], atol=1e-4, rtol=1e-4
            )
        start += part.manifest.tokens
    assert whole.cache.get_seq_length() == whole.context.num_tokens == prefix + start


def test_composed_caches_keep_every_restore_cache(model, tiny_tokenizer, tmp_path):
    first, second = halves(tiny_tokenizer)
    parts = [
        compress(model, tiny_tokenizer, ids, ratio=0.3, adapter=make_adapter(model))
        for ids in (first, second)
    ]
    whole, heads = compose(parts), parts[0].cache.lengths.numel()
    m = whole.manifest
    assert (m.restore_tokens, m.earlier) == (N, N)
    assert m.pairs == sum(each.manifest.pairs for each in parts)
    whole.save(tmp_path / "whole.rkv")
    again = CompressedContext.load(tmp_path / "whole.rkv", model, tiny_tokenizer)
    assert again.ask(QUESTIONS, 6) == whole.ask(QUESTIONS, 6)
    assert int(whole.kept.sum()) == whole.cache.pairs_held - 2 * N * heads
    alone = compose(parts[:1])
    assert alone.ask(QUESTIONS, 6) == parts[0].ask(QUESTIONS, 6)
    assert whole.append(first[:40], restore="every").manifest.earlier == 2 * N


def test_many_texts_of_any_ratio_are_composed_into_a_file_that_loads(tiny_tokenizer, tmp_path):
    """The denominators of their ratios have no common factors: an exact sum multiplies them."""
    model = build_model("llama", max_position_embeddings=8192)
    first, _ = halves(tiny_tokenizer)
    options = {"evictor": "knorm", "adapter": None, "tokens_per_head": 20}
    options["prefix_policy"] = "counted"
    parts = [
        compress_with(model, tiny_tokenizer, first * 2 + first[:more], **options)
        for more in range(30)
    ]
    whole = compose(parts)
    held = sum(Fraction(each.manifest.ratio) * each.manifest.tokens for each in parts)
    assert float(Fraction(whole.manifest.ratio)) == float(held / whole.manifest.tokens)
    whole.save(tmp_path / "whole.rkv")
    again = CompressedContext.load(tmp_path / "whole.rkv", model, tiny_tokenizer)
    assert again.append(first).manifest.parts == [*whole.manifest.parts, len(first)]


@pytest.mark.parametrize("order", [1, -1])
def test_a_composed_cache_records_that_one_of_its_texts_was_streamed(model, tiny_tokenizer, order):
    """A text of a single part is read whole, whatever the config says."""
    first, _ = halves(tiny_tokenizer)
    options = {"evictor": "knorm", "adapter": None, "streaming_chunk": len(first) // 2}
    parts = [
        compress_with(model, tiny_tokenizer, ids, ratio=0.5, **options)
        for ids in (first, first[: len(first) // 4])
    ]
    assert [each.manifest.streaming_chunk for each in parts] == [len(first) // 2, None]
    assert compose(parts[::order]).manifest.streaming_chunk == len(first) // 2


def read_dense(model, context, start):
    """Return the full cache of a context, read from position `start` on."""
    positions = torch.arange(start, start + context.num_tokens)[None]
    with torch.no_grad():
        return model(context.ids, position_ids=positions, use_cache=True).past_key_values


@pytest.mark.parametrize("order", ["short first", "short last"])
def test_a_text_that_was_kept_whole_is_composed_with_restored_ones(tiny_tokenizer, tmp_path, order):
    """All pairs of the whole text are kept. The other text's pairs and restore pairs are rotated to
    their new positions.
    """
    model = build_model("qwen3").double()
    first, second = halves(tiny_tokenizer)
    adapter = make_adapter(model)
    restored = compress(model, tiny_tokenizer, first, ratio=0.3, adapter=adapter)
    with pytest.warns(RestoreKVWarning, match="too short for ratio 0.3"):
        short = compress(model, tiny_tokenizer, second[:8], ratio=0.3, adapter=adapter)
    parts = [short, restored] if order == "short first" else [restored, short]
    both = compose(parts)

    prefix = short.context.prefix_length
    starts = [0, parts[0].context.text_tokens]
    moved_by = starts[parts.index(restored)]
    for index, layer in enumerate(both.cache.layers):
        own = restored.cache.layers[index]
        restore_keys = shift_keys(model, own.restore_keys, moved_by)[0]
        for head in range(layer.heads):
            keys = []
            values = []
            for part, start in zip(parts, starts, strict=True):
                dense = read_dense(model, part.context, start).layers[index]
                kept = part.kept[index, head].clone()
                kept[:prefix] &= start == 0  # only the first keeps the chat prefix
                keys.append(dense.keys[0, head, kept])
                values.append(dense.values[0, head, kept])
            if order == "short first":
                torch.testing.assert_close(layer.restore_keys[0, head], restore_keys[head])
                assert layer.restore_values[0, head].equal(own.restore_values[0, head])
            else:
                keys.append(restore_keys[head])
                values.append(own.restore_values[0, head])
            rows = layer.row_heads == head
            for found, wanted in ((layer.context_keys, keys), (layer.context_values, values)):
                wanted = torch.cat(wanted)
                torch.testing.assert_close(found[rows], wanted, atol=1e-4, rtol=1e-4)

    manifest = both.manifest
    assert manifest.adapter == restored.manifest.adapter
    assert manifest.restore_tokens + manifest.earlier == N
    both.save(tmp_path / "both.rkv")
    again = CompressedContext.load(tmp_path / "both.rkv", model, tiny_tokenizer)
    assert again.ask(QUESTIONS, 6) == both.ask(QUESTIONS, 6)
    # What is appended is restored, too.
    assert both.append(second).manifest.restore_tokens == N
    assert compose([both, restored]).manifest.adapter == restored.manifest.adapter
    assert compose([short, short]).manifest.adapter is None


@pytest.mark.parametrize("order", [1, -1])
def test_a_text_that_was_kept_whole_may_have_another_evictor(
    model, tiny_tokenizer, tmp_path, order
):
    """Nothing was evicted from it, so its cache is the same with every evictor."""
    first, second = halves(tiny_tokenizer)
    lossy, alike, other = (
        compress(model, tiny_tokenizer, ids, ratio=ratio, adapter=None, evictor=evictor)
        for ids, ratio, evictor in (
            (first, 0.4, "knorm"),
            (second, 1, "knorm"),
            (second, 1, "kvzip"),
        )
    )
    both = compose([lossy, other][::order])
    assert both.ask(QUESTIONS, 6) == compose([lossy, alike][::order]).ask(QUESTIONS, 6)
    assert both.manifest.evictor == lossy.manifest.evictor
    # What is appended is evicted as the lossy text was, from memory and from a file.
    both.save(tmp_path / "both.rkv")
    again = CompressedContext.load(tmp_path / "both.rkv", model, tiny_tokenizer)
    for grown in (both.append(first), again.append(first)):
        assert grown.manifest.evictor == lossy.manifest.evictor


@pytest.mark.parametrize("order", ["grown first", "grown last"])
def test_a_grown_text_is_composed_with_the_restore_pairs_of_all_its_parts(tiny_tokenizer, order):
    model = build_model("qwen3").double()
    first, second = halves(tiny_tokenizer)
    adapter = make_adapter(model)
    grown = compress(model, tiny_tokenizer, first[:45], ratio=0.4, adapter=adapter)
    grown = grown.append(first[45:], restore="every", adapter=adapter)
    other = compress(model, tiny_tokenizer, second, ratio=0.3, adapter=adapter)
    parts = [grown, other] if order == "grown first" else [other, grown]
    whole = compose(parts)
    moved_by = 0 if order == "grown first" else other.context.text_tokens
    assert (whole.manifest.earlier, whole.manifest.restore_tokens) == (2 * N, N)

    def gather(layer, head, rows):
        rows = rows & (layer.row_heads == head)
        return layer.context_keys[rows], layer.context_values[rows]

    for layer, own, others in zip(
        whole.cache.layers, grown.cache.layers, other.cache.layers, strict=True
    ):
        for head in range(layer.heads):
            found = gather(layer, head, layer.positions >= whole.context.num_tokens)
            earlier = gather(own, head, own.positions >= grown.context.num_tokens)
            assert len(earlier[0]) == N
            keys = [shift_keys(model, earlier[0], moved_by)]
            values = [earlier[1]]
            # Of the last part, the restore cache stays at the end.
            if order == "grown first":
                keys.append(own.restore_keys[0, head])
                values.append(own.restore_values[0, head])
            else:
                keys.insert(0, others.restore_keys[0, head])
                values.insert(0, others.restore_values[0, head])
            torch.testing.assert_close(found[0], torch.cat(keys), atol=1e-9, rtol=0)
            assert found[1].equal(torch.cat(values))
    # Of the text nothing is lost, and nothing is there twice.
    kept = int(grown.kept.sum() + other.kept.sum())
    kept -= int(parts[1].kept[..., : parts[1].context.prefix_length].sum())
    assert int(whole.kept.sum()) == kept
    assert whole.cache.pairs_held == kept + 3 * N * whole.cache.lengths.numel()


def test_a_file_whose_heads_hold_other_restore_pairs_is_refused(model, tiny_tokenizer, tmp_path):
    """Every single head must hold the manifest's number of restore pairs, not only all together."""
    parts = [
        compress(model, tiny_tokenizer, ids, ratio=0.3, adapter=make_adapter(model))
        for ids in halves(tiny_tokenizer)
    ]
    whole = compose(parts)
    layer = whole.cache.layers[0]
    end = layer.bounds[1]
    head = layer.positions[:end]
    # A restore pair of the first head becomes one of the text, at a column that was dropped.
    first = int((head >= whole.context.num_tokens).nonzero()[0])
    dropped = next(x for x in range(whole.context.num_tokens) if x not in head.tolist())
    head[first] = dropped
    layer.positions[:end] = head.sort().values
    whole.save(tmp_path / "whole.rkv")
    with pytest.raises(RestoreKVError, match="does not have the restore pairs of earlier texts"):
        CompressedContext.load(tmp_path / "whole.rkv", model, tiny_tokenizer)


def test_texts_before_and_after_a_change_of_the_template_are_not_composed(model):
    """Questions would have the words of one template around them, and those of the other inside."""
    tokenizer = build_tokenizer()
    first, second = halves(tokenizer)
    small = compress(model, tokenizer, first, ratio=0.5, adapter=None)
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "bot")
    other = compress(model, tokenizer, second, ratio=0.5, adapter=None)
    for contexts in ([small, other], [other, small]):
        with pytest.raises(RestoreKVError, match="with the same chat template"):
            compose(contexts)


def test_what_cannot_be_composed_says_so(model, tiny_tokenizer):
    first, _ = halves(tiny_tokenizer)
    small = compress(model, tiny_tokenizer, first, ratio=0.5, adapter=None)
    others = {
        "chat prefix": compress(
            model,
            tiny_tokenizer,
            first,
            ratio=0.5,
            adapter=None,
            config=CompressionConfig(system="Be brief."),
        ),
        "differ in kv_dtype": compress(
            model,
            tiny_tokenizer,
            first,
            ratio=0.5,
            adapter=None,
            config=CompressionConfig(kv_dtype="int8"),
        ),
        "differ in evictor": compress(
            model, tiny_tokenizer, first, ratio=0.5, adapter=None, evictor="knorm"
        ),
        "differ in adapter": compress(
            model, tiny_tokenizer, first, ratio=0.5, adapter=make_adapter(model)
        ),
        "one model": compress(
            build_model("qwen3", 1), tiny_tokenizer, first, ratio=0.5, adapter=None
        ),
    }
    for match, other in others.items():
        with pytest.raises(RestoreKVError, match=match):
            compose([small, other])
    with pytest.raises(RestoreKVError, match="nothing to compose"):
        compose([])
    causes = [
        ({"evictor": "am-fast"}, "made by am-fast have weights", "offset"),
        ({"config": CompressionConfig(offset=3)}, "with an offset cannot be composed", "am-fast"),
    ]
    for options, match, other_cause in causes:
        alike = compress(model, tiny_tokenizer, first, ratio=0.5, adapter=None, **options)
        with pytest.raises(RestoreKVError, match=match) as error:
            compose([alike, alike])
        assert other_cause not in str(error.value)


def test_caches_of_several_ratios_are_composed_or_the_ratios_are_named(model, tiny_tokenizer):
    """The "auto" adapter makes such caches: restored at a low ratio, and not at a high one."""
    first, second = halves(tiny_tokenizer)
    adapter = make_adapter(model)
    low = compress(model, tiny_tokenizer, first, ratio=0.25, adapter=adapter)
    high = compress(model, tiny_tokenizer, second, ratio=0.75, adapter=None)
    code = adapter.identity()["hash"]
    sentence = (
        f"differ in adapter, {code} at ratio 0.25 and none at ratio 0.75; compress them at one "
        r"ratio, or with adapter=None \(in the shell --adapter none\), to compose them"
    )
    with pytest.raises(RestoreKVError, match=sentence):
        compose([low, high])
    stranger = RestoreAdapter.create(model, 3, rank=2, seed=9)
    foreign = compress(model, tiny_tokenizer, second, ratio=0.5, adapter=stranger)
    with pytest.raises(RestoreKVError, match="compress them with the same adapter"):
        compose([low, foreign])
    with pytest.raises(RestoreKVError, match=r"one list: compose\(\[first, second\]\)"):
        compose(low, high)
    other = compress(model, tiny_tokenizer, second, ratio=0.75, adapter=None, evictor="knorm")
    with pytest.raises(RestoreKVError, match=r"evictor, kvzip at ratio 0.25 and knorm at ratio 0"):
        compose([low, other])

    alone = compress(model, tiny_tokenizer, first, ratio=0.25, adapter=None)
    both = compose([alone, high])
    tokens = [each.manifest.tokens for each in (alone, high)]
    mean = (Fraction(1, 4) * tokens[0] + Fraction(3, 4) * tokens[1]) / sum(tokens)
    assert Fraction(both.manifest.ratio) == mean


def test_restore_pairs_stay_where_the_new_part_has_none(model, tiny_tokenizer):
    first, second = halves(tiny_tokenizer)
    small = compress(model, tiny_tokenizer, first, ratio=0.4, adapter=make_adapter(model))
    assert small.append(second, adapter=None).manifest.earlier == N
    assert (
        small.append(second).manifest.earlier
        == small.append(second, restore="none").manifest.earlier
        == 0
    )
