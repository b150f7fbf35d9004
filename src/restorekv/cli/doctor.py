"""`restorekv doctor`: reports what this machine has, and which components pass their self-tests on
its devices and are therefore used.

Every self-test of `model/attention/self_tests.py` runs, on CPUs too. The file that `-o` writes is
meant to be attached to an issue: it names no user, no home folder, no machine and no secret.
"""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast

import torch
import typer
from rich.table import Table
from rich.text import Text
from transformers import AutoConfig, PreTrainedModel

import restorekv.evictors
import restorekv.generation.decoding
import restorekv.model.offload  # noqa: F401  (each registers its components)
from restorekv.cli import diagnosis, options
from restorekv.cli.inputs import check_json_output
from restorekv.cli.loading import silence_transformers
from restorekv.cli.terminal import (
    STDOUT,
    notes,
    output,
    print_figures,
    print_written,
    write_figures,
)
from restorekv.errors import ModelError, RestoreKVError, summarize_error
from restorekv.model.attention import self_tests
from restorekv.model.attention.self_tests import COMPONENTS, Component, SelfTest, Target
from restorekv.model.load import check_dtype, find_source, parse_device
from restorekv.model.names import SMOLLM2
from restorekv.model.shape import CacheShape, get_dtype_name

SMOLLM2_SHAPE = (3, 3, 64)  # KV heads, query heads for each, head dimension
PLAIN = "reference"  # the component that replaces any other one that fails
CAPTION = (
    "Error: that of the case that comes closest to what rounding explains (allowed). For 8-bit "
    "numbers, 1 is half a step between two codes."
)
# What a self-test runs on a CPU, which has no CUDA.
ON_CPU = {"graph": "here the same steps, without a graph"}


def run(
    model: Annotated[
        str,
        typer.Option(
            help=f"Model whose shape is tested, without its weights: {options.MODEL_HELP}"
        ),
    ] = SMOLLM2,
    device: Annotated[
        str | None,
        typer.Option(help="Device to test; by default the CPU and one GPU of every kind."),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Type to test: auto (bfloat16 on a GPU, float32 on a CPU), float32, bfloat16 or "
            "float16."
        ),
    ] = "auto",
    out: Annotated[
        Path | None,
        options.make_json_option(
            "JSON file for the report, to attach to an issue; it names no user.", "--output", "-o"
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Test everything again, even what has passed before.")
    ] = False,
) -> None:
    check_dtype(dtype)
    check_json_output(out)
    silence_transformers()
    heads, groups, dim = _read_shape(model)
    devices = [parse_device(device)] if device else diagnosis.list_distinct_devices()
    with notes.status("looking at this machine"):
        report = {
            "versions": diagnosis.describe_versions(),
            "machine": diagnosis.describe_machine(),
            "devices": diagnosis.describe_devices(),
            "places": diagnosis.describe_places(),
            "extras": diagnosis.check_extras(),
            "shape": {
                "model": diagnosis.hide_private_name(model),
                "heads": heads,
                "groups": groups,
                "dim": dim,
            },
        }
    for title in ("versions", "machine"):
        print_figures(title, report[title])
    for each in report["devices"]:
        print_figures(
            f"device {each['device']}",
            {name: str(value) for name, value in each.items() if name != "device"},
        )
    report["checks"] = []
    for each in devices:
        target = Target(each, heads, groups, dim, _choose_dtype(each, dtype))
        with notes.status(f"checking {each}"):
            checked = _check_device(target, again)
        report["checks"].append(
            {
                "device": str(each),
                "dtype": get_dtype_name(target.dtype),
                "components": checked,
            }
        )
        output.print(_tabulate_checks(target, checked))
    print_figures("places", report["places"])
    print_figures("optional extras", report["extras"])
    if out:
        write_figures(out, diagnosis.remove_private_data(report))
        if out != STDOUT:
            print_written(out)
    _report_problems(report["checks"])


def _read_shape(name: str) -> tuple[int, int, int]:
    """Return a model's number of KV heads, query heads for each KV head, and head dimension, from
    its config alone.
    """
    if name == SMOLLM2:
        return SMOLLM2_SHAPE
    source = find_source(name)
    local = source.is_local()
    source.check(local, weights=False)
    try:
        config = AutoConfig.from_pretrained(
            source.path, local_files_only=local, trust_remote_code=False
        )
    except (
        Exception
    ) as error:  # transformers raises many kinds: missing, damaged, unreachable, unknown
        raise ModelError(
            f"Cannot read the config of {name!r} ({summarize_error(error)}); give a model folder "
            "or leave out --model."
        ) from error
    # The shape is read from the config alone, so that no weights are loaded.
    shape = CacheShape.from_model(cast("PreTrainedModel", SimpleNamespace(config=config)))
    return shape.heads, shape.groups, shape.head_dim


def _choose_dtype(device: torch.device, name: str) -> torch.dtype:
    """Return the dtype to check: the one that was named, or what models usually have on the
    device.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def _check_device(target: Target, again: bool) -> list[dict[str, Any]]:
    """Return a row for each component: whether it is used on the device, and what its self-test
    found.
    """
    rows = []
    for component in COMPONENTS.values():
        row: dict[str, Any] = {
            "component": component.name,
            "title": component.title,
            "used": False,
            "why": component.unavailable_reason(target.device, target.dtype),
        }
        if not row["why"]:
            found = _find_self_test(component, target, again)
            row["used"] = found.passed
            row["self_test"] = asdict(found)
            if not found.passed:
                row["why"] = f"{found.reason()}. {component.instead}"
        rows.append(row)
    return rows


def _find_self_test(component: Component, target: Target, again: bool) -> SelfTest:
    """Return the outcome of a component's self-test, which runs now unless its outcome is known.

    On a CPU the self-test always runs and its outcome is not recorded: the library does not depend
    on it there, because the project's own tests check that code.
    """
    if self_tests.needs_self_test(target.device):
        return self_tests.run_self_test(component.name, target, again)
    return self_tests.run_cases(component, target)


def _tabulate_checks(target: Target, rows: list[dict[str, Any]]) -> Table:
    """Show the components of a device, each with the case that came closest to what is allowed."""
    shape = (
        f"{target.heads} KV heads, {target.groups} query heads each, head dimension {target.dim}"
    )
    title = f"{target.device}, {str(target.dtype).removeprefix('torch.')}, {shape}"
    table = Table(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        caption=CAPTION,
        caption_justify="left",
    )
    for name in ("component", "used", "error", "allowed", "cases"):
        table.add_column(name)
    table.add_column("remarks", overflow="fold")
    for row in rows:
        self_test = row.get("self_test") or {}
        numbers = [
            "" if self_test.get(name) is None else f"{self_test[name]:.1e}"
            for name in ("error", "tolerance")
        ]
        used = "yes" if row["used"] else "no" if self_test else "-"
        here = ON_CPU.get(row["component"]) if target.device.type == "cpu" else None
        remark = f"{row['title']} ({here})" if here else row["title"]
        if row["why"]:
            remark = f"{row['title']}: {row['why']}"
        cells = [row["component"], used, *numbers, str(self_test.get("cases", "")), remark]
        table.add_row(*map(Text, cells))
    return table


def _report_problems(checks: list[dict]) -> None:
    """Report components that failed their checks; fail if a device has no correct fallback."""
    broken = [each["device"] for each in checks if not _is_used(each, PLAIN)]
    if broken:
        raise RestoreKVError(
            f"PyTorch's own operations compute attention wrongly on {', '.join(broken)}; use "
            "another device, and attach the file of `restorekv doctor -o report.json` to an issue."
        )
    wrong = [
        f"{row['component']} on {each['device']}"
        for each in checks
        for row in each["components"]
        if not row["used"] and row.get("self_test")
    ]
    if wrong:
        output.print(
            Text(
                f"Not used because it failed its self-test: {', '.join(wrong)}. Answers stay right "
                f"but take longer; please {self_tests.REPORT}."
            ),
            soft_wrap=True,
        )
    else:
        output.print("Everything that is used here has passed its self-test.")


def _is_used(check: dict, name: str) -> bool:
    """Return whether a component has passed its self-test on a device."""
    return next(row["used"] for row in check["components"] if row["component"] == name)
