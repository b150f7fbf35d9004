"""What both KV connectors share: hooks of vLLM that documents do not use, how long an answer may
be, and how a request ends with an error.

A connector cannot refuse a request. So a request that must end is promised all its tokens, as if
they were being loaded. The workers then report that the load is over and that the block of the last
token was not loaded, and vLLM (kv_load_failure_policy "fail") ends the request. vLLM puts no block
of a request that waits for a load into its prefix cache, so nothing unwritten can be read later,
even if the client leaves meanwhile; and no other request shares the block of the last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from restorekv.errors import RestoreKVError
from restorekv.vllm.document_store import DocumentStore, StoredDocument

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


class DocumentConnector(KVConnectorBase_V1):
    """A KV connector that brings documents to vLLM and takes nothing from it."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: what a step reads is there before its first layer."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: documents are made by restorekv, never by vLLM."""

    def wait_for_save(self) -> None:
        """Do nothing, as `save_kv_layer`."""


def find_request_problem(request: Request) -> str:
    """Return why a request about a document cannot be answered, "" if it can.

    The prompt begins with placeholders, so options that treat all of it as text cannot work.
    """
    sampling = request.sampling_params
    if sampling is not None:
        # vLLM 0.31 has no prompt_logprob_token_ids.
        token_ids = getattr(sampling, "prompt_logprob_token_ids", None)
        if sampling.prompt_logprobs is not None or token_ids is not None:
            return (
                "prompt_logprobs is not possible for a request about a document, because its "
                "prompt begins with placeholders; leave it out."
            )
        if sampling.repetition_penalty != 1:
            return (
                "repetition_penalty is not possible for a request about a document, because vLLM "
                "would count its placeholders instead of its text; leave it out, or use "
                "frequency_penalty, which counts the answer. If the model's generation_config.json "
                "sets it, start vLLM with --generation-config vllm."
            )
    if getattr(request, "resumable", False):
        return (
            "A request about a document cannot be given more input later, which would be longer "
            "than what was checked; ask in a separate request."
        )
    if request.skip_reading_prefix_cache:
        # vLLM would compute the whole prompt itself, placeholders included.
        return (
            "A request about a document cannot skip the prefix cache, from which vLLM takes the "
            "document; leave skip_reading_prefix_cache out."
        )
    return ""


def limit_answer_length(request: Request, store: DocumentStore, document: StoredDocument) -> None:
    """Limit a request's answer so that it ends within the model's positions.

    vLLM's own limit, max_model_len, is not enough: it counts placeholders instead of the text.
    """
    room = store.count_answer_room(document, request.prompt_token_ids or ())
    request.max_tokens = min(request.max_tokens, room)


def refuse_engine(config: VllmConfig, obstacles: Sequence[tuple[bool, str]]) -> None:
    """Raise RestoreKVError for an engine whose answers about documents are not known to be right.

    Args:
        config: vLLM's configuration.
        obstacles: What only one of the connectors refuses: whether the engine has the obstacle, and
            the end of the error's sentence, which names it and says what to do.
    """
    parallel = config.parallel_config
    assert config.kv_transfer_config is not None
    failure_policy = config.kv_transfer_config.kv_load_failure_policy
    context_ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    common = [
        # vLLM would recompute the placeholders of a document that cannot be loaded.
        (
            failure_policy != "fail",
            f"with the kv_load_failure_policy {failure_policy!r}; set it to 'fail'",
        ),
        (context_ranks > 1, "over context parallel ranks; use one, or tensor parallel ranks"),
        # A document belongs to the base weights.
        (config.lora_config is not None, "with LoRA adapters; leave out enable_lora"),
        # An embedding is made of all tokens of a prompt, and placeholders are not the document's.
        (
            config.model_config.runner_type != "generate",
            "for embeddings and scores; leave out runner and convert",
        ),
    ]
    for is_present, obstacle in [*common, *obstacles]:
        if is_present:
            raise RestoreKVError(f"vLLM does not serve compressed documents {obstacle}.")


def get_options(config: VllmConfig) -> dict[str, Any]:
    """Return the kv_connector_extra_config of a vLLM that has a connector."""
    assert config.kv_transfer_config is not None
    return config.kv_transfer_config.kv_connector_extra_config


def require_store(options: dict[str, Any], contents: str) -> str:
    """Return the folder of documents that a connector's options name.

    Args:
        options: The options of the connector.
        contents: What is in the folder, for the error.

    Raises:
        RestoreKVError: The options name no folder.
    """
    if "store" not in options:
        raise RestoreKVError(f"kv_connector_extra_config lacks `store`, the folder of {contents}.")
    return options["store"]
