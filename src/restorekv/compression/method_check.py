"""Whether a method works on a model at all, found out on a short text.

Some methods refuse a whole kind of model, such as latent attention, or need a gate that a model
does not have. They say so when they compress.
"""

from collections.abc import Callable

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression.compressor import Compressor
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import Eviction
from restorekv.errors import RestoreKVError
from restorekv.model.prompt import Context, make_context

SHORT_TEXT = "The code of the red house is seven, and the code of the blue house is nine. " * 4


def check_before_reading(
    model: PreTrainedModel, tokenizer: Tokenizer, compressor: Compressor
) -> None:
    """Raise the RestoreKVError with which a method refuses a model before it reads anything: for
    lack of a gate, or because its scores have no formula for the model's attention.
    """
    compressor.identity(model)  # loads the gate, if the method needs one
    if isinstance(compressor, Eviction):
        compressor.evictor.make_observer(model, make_context(tokenizer, SHORT_TEXT))


def check_method(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    compressor: Compressor,
    make_long_context: Callable[[], Context] | None = None,
) -> None:
    """Raise the RestoreKVError with which a method refuses a model.

    Args:
        model: The model that would read.
        tokenizer: Its tokenizer.
        compressor: The method; its adapter and its config are not checked.
        make_long_context: Returns a context that decides, if the method refuses a short text: some
            presses of kvpress do so because it is short.
    """
    check_before_reading(model, tokenizer, compressor)
    # A streaming method would read nothing yet.
    method = compressor.with_config(CompressionConfig())
    try:
        method.prepare(model, tokenizer, make_context(tokenizer, SHORT_TEXT))
    except RestoreKVError:
        if make_long_context is None:
            raise
        method.prepare(model, tokenizer, make_long_context())
