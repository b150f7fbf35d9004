"""The entry point that vLLM calls, without vLLM."""

import pytest

from restorekv.vllm import plugin


def test_it_does_nothing_unless_it_is_asked_for(monkeypatch):
    monkeypatch.delenv(plugin.OPTION, raising=False)
    monkeypatch.setattr(plugin, "installed_version", lambda: "99.0.0")
    plugin.register()


@pytest.mark.parametrize("found", ["0.31.0", "99.0.0", "none"])
def test_versions_that_were_not_tested_are_refused(monkeypatch, found):
    monkeypatch.setenv(plugin.OPTION, "1")
    monkeypatch.setattr(plugin, "installed_version", lambda: found)
    with pytest.raises(RuntimeError, match=f"vLLM 0[.]32[.]0, and this is {found}; install"):
        plugin.register()


def test_builds_of_a_tested_version_are_accepted(monkeypatch):
    monkeypatch.setattr(plugin, "version", lambda name: "0.32.0+cpu")
    plugin.check_version()
