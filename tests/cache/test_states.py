"""Layers that keep states, as caches hold them."""

import weakref

import pytest
import torch

from restorekv.cache.states import HAS_STATES, StateLayer, clone_saved_states

pytestmark = pytest.mark.skipif(not HAS_STATES, reason="these transformers have no such layers")


def make_layer() -> StateLayer:
    return StateLayer.from_tensors({"recurrent.0": torch.ones(2, 48)})


def test_autograd_keeps_what_a_state_was_when_it_was_read():
    layer = make_layer()
    factor = torch.ones(2, 48, requires_grad=True)
    with clone_saved_states([layer]):
        state = layer.named_tensors["recurrent.0"]
        product = (factor * state).sum()
        state.zero_()  # as a step of one token does
    product.backward()
    assert torch.equal(factor.grad, torch.ones(2, 48))


def test_no_other_tensor_gets_the_address_of_a_state_that_was_replaced():
    """It would be taken for the state and copied: a slice is then laid out differently, and the
    gradients of SiLU differed in their last bits once in ten thousand times.
    """
    layer = make_layer()
    state = weakref.ref(layer.recurrent_states[0])
    with clone_saved_states([layer]):
        layer.recurrent_states[0] = torch.zeros(1)
        assert state() is not None
    assert state() is None
