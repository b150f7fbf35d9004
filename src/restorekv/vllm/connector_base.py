"""What both KV connectors leave undone: hooks of vLLM in which documents have no part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from restorekv.errors import RestoreKVError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# With prompt_logprobs vLLM takes nothing from caches and computes the whole prompt, placeholders
# included, as if they were a text.
NO_PROMPT_LOGPROBS = (
    "prompt_logprobs is not possible for a request about a document, because its prompt begins "
    "with placeholders; leave it out."
)


class DocumentConnector(KVConnectorBase_V1):
    """A KV connector that brings documents to vLLM and takes nothing from it."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: what a step reads is there before its first layer."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: documents are made by restorekv, never by vLLM."""

    def wait_for_save(self) -> None:
        """Do nothing, as `save_kv_layer`."""


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
        RestoreKVError: They name none.
    """
    if "store" not in options:
        raise RestoreKVError(f"kv_connector_extra_config lacks `store`, the folder of {contents}.")
    return options["store"]
