"""The model that servers answer with, and a file that a module's `client` uploaded."""

import pytest

from tests.helpers.models import build_model


@pytest.fixture(scope="module")
def model():
    return build_model("qwen3")


@pytest.fixture(scope="module")
def file(client):
    # Here, since modules of tests skip where the server's libraries lack.
    from tests.helpers.serving import upload

    return upload(client)
