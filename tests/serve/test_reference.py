"""The page at `/docs` shows all paths and objects of the API, and loads nothing from elsewhere."""

import json
import re
import urllib.request

import pytest

pytest.importorskip("openai")

from restorekv.serve.reference import render_reference
from restorekv.serve.run import Settings, build_app
from tests.helpers.serving import KEY, VARIANT, listening


def test_the_reference_lists_everything_and_loads_nothing(model, tiny_tokenizer, tmp_path):
    app = build_app(model, tiny_tokenizer, Settings(tmp_path, "tiny", VARIANT, keys=(KEY,)))
    described = app.openapi()
    with listening(app) as url:
        answer = urllib.request.urlopen(url.removesuffix("v1") + "docs")  # without a key
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        page = answer.read().decode()
        # What it links to is as open as the page itself.
        with urllib.request.urlopen(url.removesuffix("v1") + "openapi.json") as linked:
            assert json.loads(linked.read())["paths"]
    for path in described["paths"]:
        assert f" {path}</code>" in page
    for name in described["components"]["schemas"]:
        assert f'id="{name}"' in page
    loaded = re.findall(r'(?:href|src)="([^"#][^"]*)"', page)
    assert set(loaded) == {"data:,", "page/style.css", "openapi.json"}
    links = set(re.findall(r'href="#([^"]*)"', page))
    assert links <= set(re.findall(r'id="([^"]*)"', page))


def test_text_of_a_description_is_no_markup():
    field = {"properties": {"<b>": {"enum": ["<i>"]}}, "description": "<s>"}
    page = render_reference(
        {"info": {"title": "<u>"}, "paths": {}, "components": {"schemas": {"X": field}}}
    )
    for tag in ("<b>", "<i>", "<s>", "<u>"):
        assert tag not in page
