"""What the oracles of importance scores share."""

import torch

from restorekv.model.prompt import encode_text

TEXT = (
    "the code of the red house is seven; who lives in the blue house? "
    "the blue house is not the red house; "
)


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def projected(model, ids):
    """Return for each layer the attention's input (N, d), the rotated queries (Hq, N, D), the
    rotated keys (H, N, D) and the values (H, N, D).
    """
    seen = []

    def hook(module, args, kwargs):
        x, (cos, sin) = (
            kwargs["hidden_states"][0],
            (part[0] for part in kwargs["position_embeddings"]),
        )
        query, key, value = (
            layer(x).unflatten(-1, (-1, module.head_dim)).transpose(0, 1)
            for layer in (module.q_proj, module.k_proj, module.v_proj)
        )
        if hasattr(module, "q_norm"):
            query, key = module.q_norm(query), module.k_norm(key)
        seen.append((x, rotate(query, cos, sin), rotate(key, cos, sin), value))

    handles = [
        layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)
        for layer in model.model.layers
    ]
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def repeat_ids(tokenizer, context, start, end, first):
    if first:
        asked = [encode_text(tokenizer, "\n\nRepeat the previous context exactly.")]
    else:
        asked = [
            encode_text(
                tokenizer, "\n\nRepeat the part of the previous context exactly, starting with"
            )
        ]
        asked.append(context.ids[:, start - 8 : start])
    return torch.cat([*asked, context.suffix_ids, context.ids[:, start:end]], 1)


def assert_relative(ours, exact, tolerance):
    error = ((ours.double() - exact).abs() / exact.abs().clamp_min(1e-12)).max()
    assert error < tolerance, f"relative error {error:.1e}"
