"""Compressed documents inside an unpatched vLLM: `RestoreKVConnector`, and prompts for it.

Start vLLM with the dictionary that `transfer_config` returns; a document is a file of `restorekv
export` in the store's folder, and a request names it by beginning with its placeholders.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.storage.portable import Portable, load_portable


def __getattr__(name: str) -> Any:
    if name != "RestoreKVConnector":
        raise AttributeError(f"module 'restorekv.vllm' has no attribute {name!r}")
    # Imported here because it needs vLLM, which nothing else in this module does.
    from restorekv.vllm.connector import RestoreKVConnector

    return RestoreKVConnector


def transfer_config(store: str | Path, **more: Any) -> dict[str, Any]:
    """Return vLLM's kv_transfer_config for documents in the folder `store`."""
    return {
        "kv_connector": "RestoreKVConnector",
        "kv_connector_module_path": "restorekv.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"store": str(store), **more},
    }


def prompt(
    document: str | Path | Portable,
    question: str,
    tokenizer: Tokenizer,
    answer_prefix: str = "",
    turns: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """Return the token ids that ask a document, its placeholders first.

    vLLM takes them as {"prompt_token_ids": ids}, its completions API as `prompt`.

    Args:
        document: a portable document or its file.
        question: what is asked.
        tokenizer: the model's.
        answer_prefix: how the answer begins.
        turns: earlier questions with their answers.
    """
    portable = document if isinstance(document, Portable) else load_portable(document)
    return portable.inputs(tokenizer, question, answer_prefix, turns)["input_ids"][0].tolist()


def chat(
    document: str | Path | Portable,
    question: str,
    tokenizer: Tokenizer,
    answer_prefix: str = "",
    turns: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """Return `messages` and `kv_transfer_params` of a request to /v1/chat/completions.

    vLLM 0.31 and later take the prompt's ids from `kv_transfer_params` and leave the messages
    unread. A version that does not know these ids ends the request with an error, because it names
    a document that its prompt lacks.

    Args:
        document: a portable document or its file.
        question: what is asked.
        tokenizer: the model's.
        answer_prefix: how the answer begins.
        turns: earlier questions with their answers.
    """
    portable = document if isinstance(document, Portable) else load_portable(document)
    ids = prompt(portable, question, tokenizer, answer_prefix, turns)
    messages = []
    for earlier_question, answer in turns:
        messages.append({"role": "user", "content": earlier_question})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": question})
    return {
        "messages": messages,
        "kv_transfer_params": {"prompt_token_ids": ids, "document": portable.name},
    }
