"""The entry point that vLLM calls, without vLLM."""

import os
import signal
import subprocess
import sys
import time

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


def test_a_process_of_the_server_ends_with_it():
    """A parent that is killed cannot signal its child, which notices that its parent changed."""
    child = (
        "import time; from restorekv.vllm import plugin; plugin.INTERVAL = 0.05; "
        "plugin.register(); print('ready', flush=True); time.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys; os.environ['RESTOREKV_SERVER'] = str(os.getpid()); "
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); "
        "print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent, child], stdout=subprocess.PIPE, text=True
    ) as process:
        number = int(process.stdout.readline())
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.kill(number, signal.SIGKILL)
    pytest.fail("the child lives on")
