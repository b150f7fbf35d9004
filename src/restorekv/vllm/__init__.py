"""Compressed documents inside an unpatched vLLM: its configuration, and prompts about documents.

Cache files (.rkv) are served unchanged, with heads of different lengths. They need `ragged_config`,
and the environment variable RESTOREKV_VLLM=1 when vLLM starts. Portable files (`restorekv export`)
have one length in all heads and need only `transfer_config`. A prompt names its document by
beginning with the document's placeholders; `prompt` and `chat` write them.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError
from restorekv.generation.chat import encode_conversation
from restorekv.storage import cache_file
from restorekv.storage.cache_checks import check_tokenizer
from restorekv.storage.cache_file import CacheFile
from restorekv.storage.portable import Portable, load_portable
from restorekv.vllm import composition, ragged_documents

# A document in a request: the path of its file, or the file as it was opened.
Document = str | Path | Portable | CacheFile

CONNECTORS = {
    "RestoreKVConnector": "restorekv.vllm.connector",
    "RaggedConnector": "restorekv.vllm.ragged_connector",
}


def __getattr__(name: str) -> Any:
    if name not in CONNECTORS:
        raise AttributeError(f"module 'restorekv.vllm' has no attribute {name!r}")
    # Imported on first use, because only the connectors need vLLM.
    return getattr(import_module(CONNECTORS[name]), name)


def ragged_config(
    store: str | Path, *, documents_memory: int | None = None, fingerprint: str | None = None
) -> dict[str, Any]:
    """Return vLLM's kv_transfer_config for the cache files in the folder `store`.

    vLLM must be started with the environment variable RESTOREKV_VLLM=1.

    Args:
        store: Folder of .rkv files.
        documents_memory: Bytes of documents that each worker holds at a time; 1 GiB by default.
        fingerprint: The fingerprint of the model's weights; documents made with others are refused.
    """
    options: dict[str, Any] = {"store": str(store)}
    if documents_memory is not None:
        options["documents_memory"] = documents_memory
    if fingerprint is not None:
        options["fingerprint"] = fingerprint
    return _transfer_config("RaggedConnector", options)


def transfer_config(store: str | Path, **more: Any) -> dict[str, Any]:
    """Return vLLM's kv_transfer_config for the portable files in the folder `store`."""
    return _transfer_config("RestoreKVConnector", {"store": str(store), **more})


def _transfer_config(connector: str, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": connector,
        "kv_connector_module_path": "restorekv.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": options,
    }


def _open(document: Document) -> Portable | CacheFile:
    """Open a document's file, unless it was opened already."""
    if isinstance(document, Portable | CacheFile):
        return document
    return (
        cache_file.open_cache_file(document)
        if Path(document).suffix == ".rkv"
        else load_portable(document)
    )


def _open_composition(documents: Sequence[Document]) -> tuple[list[CacheFile], list[str]]:
    """Open the documents of a request about several; refuse documents that cannot be composed.

    Returns:
        The files and their names.
    """
    files = []
    for document in documents:
        file = _open(document)
        if not isinstance(file, CacheFile):
            raise RestoreKVError(
                "Several portable files cannot be queried together; pass cache files (.rkv), or "
                "export a composed one."
            )
        files.append(file)
    names = [ragged_documents.identify(file).name for file in files]
    composition.refuse_wrong_number(names)
    composition.refuse_unlike_parts([composition.describe_part(file) for file in files])
    return files, names


def prompt(
    document: Document | Sequence[Document],
    question: str,
    tokenizer: Tokenizer,
    answer_prefix: str = "",
    turns: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """Return the token ids that query a document: its placeholders, earlier turns, the question.

    vLLM takes them as {"prompt_token_ids": ids}, its completions API as `prompt`.

    Args:
        document: The path of a file, or an opened file; or a list of cache files, which are queried
            as one text, joined as `restorekv.compose` does.
        question: What is asked.
        tokenizer: The tokenizer of the document's model.
        answer_prefix: How the answer begins.
        turns: Earlier questions with their answers.

    Raises:
        CacheFileError: A file is damaged, or was made with a different tokenizer or chat template.
        RestoreKVError: The question is empty, or the documents cannot be queried together.
    """
    return _make_named_prompt(document, question, tokenizer, answer_prefix, turns)[1]


def _make_named_prompt(
    document: Document | Sequence[Document],
    question: str,
    tokenizer: Tokenizer,
    answer_prefix: str,
    turns: Sequence[tuple[str, str]],
) -> tuple[str, list[int]]:
    """Return the name of the document or composition that is asked, and the ids of the prompt."""
    if isinstance(document, str | Path | Portable | CacheFile):
        opened = _open(document)
        if isinstance(opened, Portable):
            inputs = opened.inputs(tokenizer, question, answer_prefix, turns)
            return opened.name, inputs["input_ids"][0].tolist()
        files = [opened]
        identity = ragged_documents.identify(opened)
        name = identity.name
        ids = identity.ids
    else:
        files, names = _open_composition(document)
        name = composition.name_composition(names)
        ids = composition.make_ids(names)
    for file in files:
        check_tokenizer(file.path, file.manifest, file.context, tokenizer)
    # A composition writes questions as its first document does.
    context = files[0].context
    asked = encode_conversation(tokenizer, context, turns, question, answer_prefix=answer_prefix)
    return name, [*ids, *asked.tolist()]


def chat(
    document: Document | Sequence[Document],
    question: str,
    tokenizer: Tokenizer,
    answer_prefix: str = "",
    turns: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """Return `messages` and `kv_transfer_params` of a request to /v1/chat/completions.

    vLLM 0.31 and later take the prompt's ids from `kv_transfer_params` and ignore the messages. A
    version that ignores the ids instead ends the request with an error: the request names a
    document, and the prompt made of its messages has no placeholders.

    Args:
        document: As `prompt` takes it.
        question: What is asked.
        tokenizer: The tokenizer of the document's model.
        answer_prefix: How the answer begins.
        turns: Earlier questions with their answers.
    """
    name, ids = _make_named_prompt(document, question, tokenizer, answer_prefix, turns)
    messages = []
    for earlier_question, answer in turns:
        messages.append({"role": "user", "content": earlier_question})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": question})
    return {
        "messages": messages,
        "kv_transfer_params": {"prompt_token_ids": ids, "document": name},
    }
