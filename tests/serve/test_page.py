"""The page: its files and headers, what survives, how far a compression is, and the evictor alone."""

import re

import httpx
import pytest

openai = pytest.importorskip("openai")

from restorekv import compress  # noqa: E402
from restorekv.compression.budget import exact_ratio  # noqa: E402
from restorekv.errors import RestoreKVError  # noqa: E402
from restorekv.model.prompt import make_context  # noqa: E402
from restorekv.restore.adapter import RestoreAdapter  # noqa: E402
from restorekv.serve import page  # noqa: E402
from restorekv.serve.variants import Variant  # noqa: E402
from tests.serve.test_server import KEY, TEXT, VARIANT, expected, serving  # noqa: E402

