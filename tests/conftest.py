"""Tiny random models of both families and a tokenizer made in memory: nothing is downloaded."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Read when Triton is imported, which torch may do: kernels run on the CPU, in its interpreter. With
# 0, on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.helpers.models import FAMILIES, build_model, build_tokenizer


def pytest_collection_finish() -> None:
    """Take the tests themselves and all modules out of later garbage collections, which took longer
    than many a test.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter free everything when it ends; Triton's bindings complain otherwise."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """A shell that starts the tests in its background has told them to ignore it, and their
    children too.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=sorted(FAMILIES))
def tiny_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build_model(request.param)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="module")
def saved_model(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a small random model with its tokenizer, for commands that open a model by its
    name.
    """
    folder = tmp_path_factory.mktemp("model")
    build_model("qwen3").save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def worst(request: pytest.FixtureRequest) -> Iterator[dict[str, float]]:
    """For conformance tests: the largest error of every kind, printed when all is done."""
    found = {}
    yield found
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n" + "\n".join(f"{kind}: {error:.1e}" for kind, error in sorted(found.items())))
