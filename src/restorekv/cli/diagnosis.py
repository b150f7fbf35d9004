"""What `restorekv doctor` finds out about a machine."""

import getpass
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

import torch
from huggingface_hub import constants
from packaging.requirements import Requirement

from restorekv.context import format_bytes
from restorekv.files import find_cache_folder
from restorekv.model.attention import self_tests
from restorekv.model.names import NAMES, to_canonical_name
from restorekv.spec import list_versions

PACKAGES = (
    "restorekv",
    "torch",
    "transformers",
    "triton",
    "peft",
    "safetensors",
    "tokenizers",
    "huggingface-hub",
    "vllm",
)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
# Shorter values are too common in other words to be taken out of a report.
SHORTEST_SECRET = 6
# Names that identify nobody.
COMMON = {"root", "user", "admin", "ubuntu", "runner", "localhost"}


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide results."""
    found = dict.fromkeys(PACKAGES, "not installed") | list_versions(PACKAGES)
    return {"python": platform.python_version(), **found}


def describe_machine() -> dict[str, str]:
    """Return the system, the processor, its threads and the memory."""
    return {
        "system": platform.platform(),
        "processor": find_processor(),
        "cores": str(os.cpu_count()),
        "PyTorch threads": str(torch.get_num_threads()),
        "memory": describe_memory(),
    }


def find_processor() -> str:
    """Return the processor's name, as Linux knows it."""
    # Other systems have no such file.
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name = line.partition(":")[2].strip()
        if line.startswith("model name") and name:
            return name
    return platform.processor() or platform.machine()


def describe_memory() -> str:
    """Return the machine's total and free memory, or "unknown" if the system does not report it."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        free = page * os.sysconf("SC_AVPHYS_PAGES")
        return f"{format_bytes(total)}, {format_bytes(free)} free"
    except (AttributeError, ValueError, OSError):
        return "unknown"


def _list_all_devices() -> list[torch.device]:
    """Return the CPU and every accelerator that PyTorch can use."""
    found = [torch.device("cpu")]
    for kind in ("cuda", "xpu"):
        library = getattr(torch, kind, None)
        count = library.device_count() if library is not None and library.is_available() else 0
        found += [torch.device(kind, index) for index in range(count)]
    if torch.backends.mps.is_available():
        found.append(torch.device("mps", 0))
    return found


def list_distinct_devices() -> list[torch.device]:
    """Return one device of every kind and name: equal GPUs are checked once."""
    named = {}
    for device in _list_all_devices():
        known = self_tests.identify_device(device)
        named.setdefault((known["kind"], known["name"]), device)
    return list(named.values())


def describe_devices() -> list[dict[str, object]]:
    """Return every device with its driver, memory and compute capability."""
    found = []
    for device in _list_all_devices():
        known = {
            name: value
            for name, value in self_tests.identify_device(device).items()
            if value is not None
        }
        if device.type == "cuda":
            known["memory"] = format_bytes(torch.cuda.get_device_properties(device).total_memory)
        elif device.type == "cpu":
            known["name"] = find_processor()
        known["restorekv's code"] = known.get("code", "")
        names = ("name", "driver", "cuda", "capability", "memory", "restorekv's code")
        shown = {name: known[name] for name in names if name in known}
        found.append({"device": str(device), **shown})
    return found


def describe_places() -> dict[str, str]:
    """Return where models, caches and self-tests are looked for."""
    folder = find_cache_folder() or "nowhere (no home folder)"
    return {
        "models and self-tests of restorekv": str(folder),
        "models from the hub": str(constants.HF_HUB_CACHE),
    }


def check_extras() -> dict[str, str]:
    """Return which optional extras are installed, and the line that installs those that are not."""
    try:
        names = metadata("restorekv").get_all("Provides-Extra") or []
        needed = requires("restorekv") or []
    except PackageNotFoundError:
        return {"unknown": "restorekv runs from a checkout that is not installed"}
    parsed = [Requirement(line) for line in needed]
    found = {}
    for name in names:
        packages = {each.name for each in parsed if _belongs_to_extra(each, name)}
        missing = sorted(packages - {"restorekv", *list_versions(packages)})
        line = f"pip install 'restorekv[{name}]'"
        found[name] = "installed"
        if missing:
            found[name] = f"{', '.join(missing)} missing: {line}"
    return found


def _belongs_to_extra(requirement: Requirement, extra: str) -> bool:
    """Return whether this extra brings the requirement on this system."""
    marker = requirement.marker
    if marker is None:
        return False
    return marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def hide_private_name(name: str) -> str:
    """Return a model's name if it is one of ours or a hub id, else a phrase that does not name it:
    a path may be private.
    """
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.exists(name)
    if to_canonical_name(name) in NAMES or is_hub_id:
        return name
    return "a file or folder on this machine"


def remove_private_data(value: object) -> object:
    """Return a JSON value with the names of the user, home folders and the machine, and secrets,
    removed from all of its texts.
    """
    if isinstance(value, dict):
        return {
            remove_private_data(name): remove_private_data(each) for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [remove_private_data(each) for each in value]
    return remove_private_text(value) if isinstance(value, str) else value


def remove_private_text(text: str) -> str:
    """Return a text with ~ for home folders, and <user>, <machine> and <secret> for the rest."""
    secrets = [secret for name, secret in os.environ.items() if SECRET.search(name)]
    # The longest first: one may begin with another.
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= SHORTEST_SECRET:
            text = text.replace(secret, "<secret>")
    homes = {os.path.expanduser("~"), os.path.realpath(os.path.expanduser("~"))}
    for home in sorted(homes, key=len, reverse=True):
        if len(home) > 1:
            text = text.replace(home, "~")
    text = re.sub(r"(?:/home|/Users|[A-Za-z]:\\Users)[/\\][^/\\\s:'\",]+", "~", text)
    text = re.sub(r"//[^/@\s]+@", "//", text)  # a name and a password in an address
    for name, sign in ((find_user_name(), "<user>"), (platform.node(), "<machine>")):
        if len(name) > 2 and name.lower() not in COMMON:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", sign, text)
    return text


def find_user_name() -> str:
    """Return the user's name, or "" if the system knows none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return ""
