"""The page about the main road names functions and lines that are there."""

import pytest

from tests.helpers.road import PAGE, REFERENCE, find_line

REFERENCES = REFERENCE.findall(PAGE.read_text())


@pytest.mark.parametrize(("name", "path", "line"), REFERENCES)
def test_the_page_names_the_line(name, path, line):
    assert line and int(line) == find_line(name, path), "run: python -m tests.helpers.road"


def test_the_page_goes_the_whole_road():
    names = [name for name, _, _ in REFERENCES]
    assert names[0] == "compress" and names.index("ask") < names.index("write_tokens")
    assert len(names) >= 20
