"""Moments of queries in every family that rotates otherwise, against the family's own code."""

import pytest
import torch

from restorekv.compression.eviction import make_compressor
from restorekv.errors import ModelError
from restorekv.evictors.query_moments import QueryMoments
from restorekv.model import support
from restorekv.model.observer import observe_layers
from restorekv.model.prompt import Context
from restorekv.model.rope import compute_rotation
from restorekv.model.shape import get_backbone, list_full_layers
from tests.helpers import decoders
from tests.helpers.models import build_tokenizer

# Halves, neighbors, a part of the numbers, none in some layers; norms of a head and of all heads;
# biases; scales of their own.
KINDS = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "olmo2",
    "olmo3",
    "cohere",
    "cohere2",
    "glm",
    "glm4",
    "stablelm",
    "phi",
    "granite",
    "smollm3",
    "exaone4",
    "starcoder2",
    "helium",
    "nemotron",
    "ernie4_5",
    "seed_oss",
    "mistral",
)
TOKENS = 40
FUTURE = 24


def observe_moments(model, ids, skip=4):
    moments = QueryMoments(model, skip)
    with torch.no_grad(), observe_layers(model, moments.on_layer):
        get_backbone(model)(input_ids=ids, use_cache=False)
    return moments


def rotate_by_the_model(model, ids, cos, sin):
    """Return every full layer's queries (H, G, Q, D) as its own code makes them where each position
    is rotated by the same numbers.

    Rotations are linear, so with means over positions it gives the mean of the rotated queries.
    """
    layers = get_backbone(model).layers
    inputs = {}
    handles = [
        layers[index].self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, index=index: inputs.update({index: (args, kwargs)}),
            with_kwargs=True,
        )
        for index in list_full_layers(model.config)
    ]
    found = []
    with torch.no_grad():
        get_backbone(model)(input_ids=ids, use_cache=False)
        for handle in handles:
            handle.remove()
        for index, (args, kwargs) in inputs.items():
            if kwargs.get("position_embeddings") is not None:
                kwargs["position_embeddings"] = (
                    cos.expand(1, ids.shape[1], -1),
                    sin.expand(1, ids.shape[1], -1),
                )
            with observe_layers(model, lambda view: found.append(view.query.double())):
                layers[index].self_attn(*args, **kwargs)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_moments_are_those_of_the_familys_own_queries(kind):
    if kind not in decoders.causal_types():
        pytest.skip("this transformers does not have it")
    model = decoders.build(kind)
    if decoders.IS_OLD and kind == "nemotron":
        with pytest.raises(ModelError, match="does not compute attention through"):
            support.prepare_model(model)
        return
    support.prepare_model(model)
    ids = torch.randint(3, 60, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    moments = observe_moments(model, ids)
    positions = torch.arange(TOKENS, TOKENS + FUTURE)[None]
    like = next(model.parameters())
    cos, sin = (each.mean(1, keepdim=True) for each in compute_rotation(model, like, positions))
    for layer, query in enumerate(rotate_by_the_model(model, ids, cos, sin)):
        query = query[:, :, 4:]
        mean = query.mean(-2)
        away = query - mean.unsqueeze(-2)
        covariance = away.mT @ away / query.shape[-2]
        found = moments.predict_moments(model, layer, TOKENS, FUTURE)
        scale = float(query.norm(dim=-1).mean())
        torch.testing.assert_close(found[0].double(), mean, rtol=1e-4, atol=1e-4 * scale)
        torch.testing.assert_close(found[1].double(), covariance, rtol=1e-4, atol=1e-4 * scale**2)


def test_a_family_whose_queries_cannot_be_made_is_refused():
    model = decoders.build("llama")
    support.prepare_model(model)
    attention = get_backbone(model).layers[1].self_attn
    attention.q_proj.register_forward_hook(lambda module, args, output: output.clamp(-0.05, 0.05))
    ids = torch.arange(3, 3 + TOKENS)[None]
    observe_moments(model, ids)  # projected again with the same clamp
    attention.q_norm = torch.nn.Identity()
    attention.q_norm.forward = lambda query: query * 2
    with pytest.raises(ModelError, match="expected-attention"):
        observe_moments(model, ids)


def test_a_family_that_rotates_complex_numbers_is_refused():
    model = decoders.build("llama4_text")
    support.prepare_model(model)
    with pytest.raises(ModelError, match="expected-attention"):
        observe_moments(model, torch.arange(3, 3 + TOKENS)[None])


# Older versions compute the frequencies from the longest text that the model has read so far.
needs_steady_frequencies = pytest.mark.skipif(decoders.IS_OLD, reason="such models are refused")


@pytest.mark.skipif(not decoders.IS_OLD, reason="newer versions compute the same at every call")
def test_frequencies_that_depend_on_what_was_read_before_are_refused():
    with pytest.raises(ModelError, match="depends on what follows them"):
        support.prepare_model(build_dynamic(128))


def build_dynamic(limit):
    """The same weights at every call; beyond `limit` positions the frequencies change."""
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    return decoders.build("llama", rope_parameters=rope, max_position_embeddings=limit)


@needs_steady_frequencies
def test_only_positions_that_a_model_rotates_alike_are_expected():
    """Questions stand before the limit, beyond which queries would have other frequencies."""
    ids = torch.randint(3, 60, (1, 103), generator=torch.Generator().manual_seed(1))
    context = Context(ids, 3, ids[:, :0])

    def score(limit, spec):
        model = build_dynamic(limit)
        scores = make_compressor(spec).prepare(model, None, context).scores
        frequencies = get_backbone(model).rotary_emb.inv_freq
        assert frequencies.equal(get_backbone(build_dynamic(limit)).rotary_emb.inv_freq)
        return scores

    assert score(128, "expected-attention").equal(score(2048, "expected-attention:future=24"))
    with pytest.raises(ModelError, match="reads it again up to position 104"):
        score(104, "expected-attention")


@needs_steady_frequencies
def test_attention_matching_does_not_read_beyond_the_limit():
    ids = torch.randint(3, 60, (1, 83), generator=torch.Generator().manual_seed(1))
    context = Context(ids, 3, ids[:, :0])
    tokenizer = build_tokenizer()
    make_compressor("am-fast").prepare(build_dynamic(2048), tokenizer, context).evict(0.5)
    with pytest.raises(ModelError, match="which reads the text a second time, needs"):
        make_compressor("am-fast").prepare(build_dynamic(128), tokenizer, context).evict(0.5)
