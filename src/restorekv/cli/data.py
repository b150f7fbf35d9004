"""`restorekv data build` and `restorekv data show`: the training mixture; BuildConfig's fields are
options.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from restorekv.cli import options
from restorekv.cli.errors import explain_interrupt
from restorekv.cli.inputs import check_json_output, check_outputs_apart
from restorekv.cli.terminal import output, print_written, show_progress_bar, write_figures
from restorekv.data.build_folder import check_build_folder, check_outside_sources, read_manifest
from restorekv.data.config import BuildConfig
from restorekv.errors import RestoreKVError, import_extra

NOTHING: list[str] = []  # typer wants lists as defaults of options that are repeatable

app = typer.Typer(
    add_completion=False,
    help="Build or show training data: documents, questions and the model's answers.",
)


@app.command("build")
@options.add_options_of(BuildConfig)
def run(
    out: Annotated[Path, options.make_folder_option("Folder to write the data to.")],
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    exclude: Annotated[
        list[str], typer.Option(help="File or folder of evaluation texts to keep out; repeatable.")
    ] = NOTHING,
    permissive: Annotated[
        bool, typer.Option("--permissive", help="Short for --mixture permissive.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the unfinished data in the folder.")
    ] = False,
    **settings: Any,
) -> None:
    """Build training data: texts, questions about them and greedy answers of the model itself."""
    if permissive:
        # "paper" is the default, so it may not have been chosen on purpose.
        if settings["mixture"] not in ("paper", "permissive"):
            raise RestoreKVError(
                f"--permissive is short for --mixture permissive, but --mixture is "
                f"{settings['mixture']}; leave out one of them."
            )
        settings["mixture"] = "permissive"
    config = BuildConfig(**settings)
    check_build_folder(out, resume)
    for name in exclude:
        if not Path(name).exists():
            raise RestoreKVError(f"There is no evaluation file or folder {name}; check the path.")

    # From here on PyTorch is imported.
    from restorekv.cli.loading import open_model
    from restorekv.data.build import build_mixture
    from restorekv.data.files import check_source
    from restorekv.data.sources import select_sources

    _refuse_other_sources(config)
    places = [getattr(config, source.name) for source in select_sources(config)]
    # Checked before the model is loaded, which can take minutes.
    for place in places:
        check_source(place)
    check_outside_sources(out, [*places, *exclude])
    packages = ["pyarrow"]
    # Only what comes from the hub is read through `datasets`.
    if not all(Path(place).exists() for place in places):
        packages.append("datasets")
    for package in packages:
        import_extra(package, "data", "Building data")
    loaded, tokenizer = open_model(model, dtype, device)
    with (
        explain_interrupt(f"continue with --resume, nothing in {out} is asked twice"),
        show_progress_bar("asking and answering") as progress,
    ):
        build_mixture(loaded, tokenizer, config, out, exclude, resume, progress)
    print_written(out)
    _print_tables(out)


@app.command("show")
def show(
    folder: Annotated[Path, typer.Argument(help="Folder of the data.")],
    json: Annotated[
        Path | None, options.make_json_option("JSON file for the figures and the manifest.")
    ] = None,
) -> None:
    """Print what training data holds; the paper's mixture, next to the paper's numbers."""
    read_manifest(folder)
    check_outputs_apart([json], folder.glob("*"))
    check_json_output(json)
    rows, manifest = _print_tables(folder)
    if json:
        write_figures(json, {"rows": rows, "manifest": manifest})


def _refuse_other_sources(config: BuildConfig) -> None:
    """Refuse an option that names the place of a source of a different mixture: this one would not
    read it.
    """
    from restorekv.data.sources import MIXTURES  # which imports PyTorch

    own = {source.name for source in MIXTURES[config.mixture]}
    for mixture, sources in MIXTURES.items():
        for name in (source.name for source in sources):
            if name not in own and getattr(config, name) != getattr(BuildConfig, name):
                raise RestoreKVError(
                    f"--{name} is for --mixture {mixture}; add that, or leave out --{name}."
                )


def _print_tables(folder: Path) -> tuple[list[dict], dict]:
    """Read the data back, so that only verified data is shown."""
    # These imports load PyTorch; the checks before do not need it.
    from restorekv.data.mixture import read_mixture
    from restorekv.data.table import compute_figures, make_data_table, make_drops_table

    contexts, manifest = read_mixture(folder)
    rows = compute_figures(contexts, manifest)
    output.print(make_data_table(rows, manifest))
    drops = make_drops_table(manifest)
    if drops.row_count:
        output.print(drops)
    return rows, manifest
