"""One model, many threads: a pass sees its own state only, and no thread changes what another
computes.
"""

import threading

import torch

from restorekv import compress
from restorekv.files import replace_file
from restorekv.model.observer import observe_layers
from restorekv.model.shape import get_backbone
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.models import build_model

TEXT = "the code of the red house is seven; who lives in the blue house? " * 4


def restored(model, seed):
    """An adapter whose LoRA changes the model."""
    adapter = RestoreAdapter.create(model, 4, rank=2, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in adapter.lora_parameters.items():
        if "lora_B" in name:
            tensor.data = torch.randn(tensor.shape, generator=generator)
    return adapter


def tensors_of(compressed):
    return [x for layer in compressed.cache.layers for x in layer.list_tensors()]


def once(layer, action):
    """Runs `action` in the middle of the layer's attention, in the first pass that gets there."""
    pending = [action]

    def hook(*_):
        if pending:
            pending.pop()()

    return layer.self_attn.q_proj.register_forward_hook(hook)


def in_a_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


def test_a_restore_pass_does_not_touch_the_model(tiny_model):
    """In the middle of a restore pass another thread still gets the frozen model's logits."""
    adapter, ids, seen = restored(tiny_model, 1), torch.arange(20)[None] + 5, []
    before = tiny_model(ids).logits
    base_layer = tiny_model.get_decoder().layers[1]
    handle = once(base_layer, lambda: in_a_thread(lambda: seen.append(tiny_model(ids).logits)))
    assert not torch.allclose(adapter.adapted_model(ids).logits, before)
    handle.remove()
    assert len(seen) == 1 and seen[0].equal(before)
    assert {id(x) for x in adapter.adapted_model.parameters()} >= {
        id(x) for x in tiny_model.parameters()
    }


def test_an_observer_does_not_see_the_passes_of_other_threads(tiny_model):
    mine, other = (torch.arange(count)[None] + 5 for count in (6, 9))
    lengths = []
    handle = once(tiny_model.get_decoder().layers[1], lambda: in_a_thread(tiny_model, other))
    with observe_layers(tiny_model, lambda view: lengths.append(view.hidden.shape[0])):
        tiny_model(mine)
    handle.remove()
    assert lengths == [6] * tiny_model.config.num_hidden_layers


def test_threads_compress_as_one_would_alone(tiny_tokenizer):
    """With the former swap of modules most of these caches were wrong."""
    model = build_model("qwen3")
    adapters = [restored(model, seed) for seed in range(2)]
    work = [
        (evictor, adapter)
        for evictor in ("kvzip", "snapkv", "expected-attention", "kvzip+")
        for adapter in adapters
    ]

    def run(evictor, adapter):
        return compress(model, tiny_tokenizer, TEXT, evictor=evictor, ratio=0.4, adapter=adapter)

    alone = [tensors_of(run(*each)) for each in work]
    wrong = []

    def body(start):
        for number in range(len(work) * 2):
            place = (start + number) % len(work)
            found = tensors_of(run(*work[place]))
            if not all(a.equal(b) for a, b in zip(found, alone[place], strict=True)):
                wrong.append(work[place][0])

    threads = [threading.Thread(target=body, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_hook_that_is_only_half_registered_does_nothing(tiny_model):
    """PyTorch first stores a hook and then that it wants keywords; a pass of another thread may
    come in between.
    """
    with observe_layers(tiny_model, lambda view: None):
        for layer in get_backbone(tiny_model).layers:
            for hook in layer.self_attn._forward_pre_hooks.values():
                assert hook(layer.self_attn, ()) is None


def test_two_writers_of_one_path_use_different_temporary_files(tmp_path):
    target = tmp_path / "file"
    with replace_file(target) as one, replace_file(target) as other:
        assert one != other
        one.write_text("one")
        other.write_text("other")
    assert target.read_text() == "one" and [path.name for path in tmp_path.iterdir()] == ["file"]
