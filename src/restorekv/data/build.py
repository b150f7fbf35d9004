"""Build a mixture: read, filter, let the teacher ask and answer, write.

A build that was killed is resumed: its folder records what is being built and every answer so far
(`build_folder`), and the same settings with the same texts give the same files, byte for byte.
"""

import json
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import __version__
from restorekv.compression.progress import OnStep
from restorekv.data import build_folder
from restorekv.data.config import BuildConfig
from restorekv.data.files import identify_source, iterate_rows, list_source_files
from restorekv.data.gather import AttemptFile, SourceBuilder, compute_longest_context
from restorekv.data.mixture import write_examples
from restorekv.data.overlap import (
    EvaluationIndex,
    read_evaluation_texts,
    warn_of_unread_files,
)
from restorekv.data.sources import Source, select_sources
from restorekv.data.teacher import describe_model
from restorekv.errors import RestoreKVError, warn
from restorekv.files import folder_lock, write_json
from restorekv.seal import digest_file
from restorekv.spec import list_versions
from restorekv.tiny.suite import draw_documents

# Documents of the tiny suite that paper/results/table1.md is measured on; the tiny model's demo
# asks about the first 52 of them.
SUITE_DOCUMENTS = 156
# What writes the data; only reading from the hub needs `datasets`.
LIBRARIES = ("torch", "transformers", "datasets", "pyarrow")
# The texts that ship with other benchmarks. The Factbook's are not among them: countries share
# lists of treaties, so data/factbook.py keeps its countries out by name.
TEXTS = Path(__file__).parents[1] / "tasks" / "texts"
SHIPPED_TEXTS = [
    *(str(path) for path in sorted(TEXTS.glob("facts/*.txt"))),
    str(TEXTS / "fairytaleqa"),
    str(TEXTS / "genres" / "evaluation.jsonl.gz"),
    str(TEXTS / "novels"),
    str(TEXTS / "share-alike"),
]


def build_mixture(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    config: BuildConfig,
    out: Path,
    exclude: Sequence[str] = (),
    resume: bool = False,
    progress: OnStep = lambda *_: None,
) -> dict:
    """Build a mixture, or finish an unfinished one.

    Args:
        model: The teacher, which asks and answers.
        tokenizer: The model's own.
        config: Sources, counts, filters and limits.
        out: Folder of the mixture.
        exclude: Files or folders of evaluation texts, in addition to those that ship.
        resume: Continue what is in `out`; a complete mixture is only checked.
        progress: Called with the contexts or examples done, how many are wanted, and the source.

    Returns:
        The manifest of the folder.

    Raises:
        RestoreKVError: `out` holds something else, or a source gives no example.
    """
    # Everything that can be refused is refused before the teacher works for hours.
    build_folder.check_build_folder(out, resume)
    places = [getattr(config, source.name) for source in select_sources(config)]
    build_folder.check_outside_sources(out, [*places, *exclude])
    earlier_build = build_folder.read_earlier_build(out)
    # The settings are compared first, since describing the sources may ask a hub.
    build_folder.check_same_build(out, earlier_build, {"config": asdict(config)})
    record = _describe_build(model, tokenizer, config, exclude, earlier_build)
    # If the mixture is complete, only compare the settings, and delete what a killed build left.
    if (out / build_folder.MANIFEST_FILE).is_file():
        build_folder.check_same_build(out, earlier_build, record)
        build_folder.delete_build_files(out)
        return build_folder.read_manifest(out)
    if resume and earlier_build is None:
        warn(f"There is nothing in {out} to resume; this is a new build.")
    # Texts of evaluation must not be trained on.
    evaluations = index_excluded_texts(tokenizer, exclude, config.overlap)
    longest = compute_longest_context(model, tokenizer, config)
    _check_source_lengths(config, longest)
    builder = SourceBuilder(model, tokenizer, config, evaluations, longest, progress)
    accounts: dict[str, dict] = {}
    with folder_lock(out, build_folder.LOCK_FILE):
        build_folder.check_not_overtaken(out, earlier_build)
        # From now on the folder says what is being built, so that a killed build can be resumed.
        build_folder.begin_build(out, earlier_build, record)
        try:
            # One source after the other; each resumes from its own file of attempts.
            for source in select_sources(config):
                accounts[source.name] = _build_source(builder, source, out, record)
        except BaseException:
            build_folder.discard_empty_build(out)
            raise
    licenses: Counter[str] = Counter()
    for account in accounts.values():
        licenses.update(account["licenses"])
    manifest = {
        "format": build_folder.FORMAT,
        "version": build_folder.VERSION,
        "mixture": config.mixture,
        "model": record["model"],
        "seed": config.seed,
        "longest": longest,
        "sources": accounts,
        "licenses": dict(licenses),
        "exclusion": {
            "texts": len(evaluations.names),
            "share": config.overlap,
            "files": record["exclude"],
        },
        "settings": asdict(config),
        "versions": {
            "restorekv": __version__,
            "python": platform.python_version(),
            **list_versions(LIBRARIES),
        },
    }
    # The manifest comes last: a folder that has one is complete.
    write_json(out / build_folder.MANIFEST_FILE, manifest, follow=False)
    build_folder.delete_build_files(out)
    return manifest


def index_excluded_texts(
    tokenizer: Tokenizer, exclude: Sequence[str], share: float
) -> EvaluationIndex:
    """Index the texts of the tiny suite, of other benchmarks that ship, and of the files or folders
    `exclude`.
    """

    warn_of_unread_files(exclude)

    def read_texts() -> Iterator[tuple[str, str]]:
        for number, document in enumerate(draw_documents(tokenizer, SUITE_DOCUMENTS)):
            yield f"tiny suite, document {number}", document.text
        yield from read_evaluation_texts([*SHIPPED_TEXTS, *exclude])

    return EvaluationIndex(read_texts(), share)


def _build_source(builder: SourceBuilder, source: Source, out: Path, record: dict) -> dict:
    """Turn the rows of one source into its file; return its entry of the manifest."""
    given = getattr(builder.config, source.name)  # the path or dataset that the user named
    origin = record["sources"][source.name]
    items = source.read(iterate_rows(given, origin), builder.config, builder.tokenizer)
    attempts = AttemptFile(out / build_folder.PARTS_FOLDER / f"{source.name}.jsonl")
    result = builder.gather_examples(source, items, attempts)
    reasons = f"(dropped: {result.describe_drops()})"
    # A part of a build may hold made-up documents alone, but then no row of it was dropped.
    if not result.examples or (result.dropped and not result.count_given()):
        raise RestoreKVError(
            f"{source.title} gave no example from {given} {reasons}; {_advise_on_rows(source)}."
        )
    count = result.count_units(source)
    wanted = source.wanted(builder.config)
    if count < wanted:
        origins = f"all of {given}"
        if result.made:
            origins += f" and {len(result.made)} made up"
        warn(f"{source.title} gave {count} of {wanted} {source.unit}, {origins} {reasons}.")
    path = out / f"{source.name}.parquet"
    write_examples(path, result.examples)
    file = {"name": path.name, "bytes": path.stat().st_size, "sha256": digest_file(path)}
    return {**result.to_account(source), "from": {"given": given, **origin}, "file": file}


def _advise_on_rows(source: Source) -> str:
    """Return advice for a source without a single usable row."""
    if source.name == "corpus":
        return (
            "give rows with genre, text and a free license such as CC0-1.0, or other for texts of "
            "your own, in .jsonl or .json, whose texts are long enough (--passage-shortest) and in "
            "no evaluation set"
        )
    return "check its format"


def _check_source_lengths(config: BuildConfig, longest: int) -> None:
    """Refuse sources whose shortest context is longer than `longest`; warn if that is less than
    was asked for.
    """
    sources = select_sources(config)
    for source in sources:
        shortest = getattr(config, source.length_setting)
        if shortest > longest:
            flag = "--" + source.length_setting.replace("_", "-")
            raise RestoreKVError(
                f"{source.title} needs contexts of {shortest} tokens, and at most {longest} fit "
                f"with a question and an answer; lower {flag}."
            )
    # Passages have separate flags for their lengths.
    uses_longest = any(source.length_setting != "passage_shortest" for source in sources)
    if uses_longest and longest < config.longest:
        warn(
            f"--longest {config.longest} is lowered to {longest}: with a question and an answer "
            "the model has no positions for more."
        )


def _describe_build(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    config: BuildConfig,
    exclude: Sequence[str],
    earlier_build: dict | None,
) -> dict[str, Any]:
    """Return everything that decides the result, as build.json holds it."""
    begun_sources = (earlier_build or {}).get("sources", {})
    origins = {}
    for source in select_sources(config):
        begun = begun_sources.get(source.name, {})
        # A dataset of the hub stays at the commit the build began with.
        if "hub" in begun:
            origins[source.name] = begun
        else:
            origins[source.name] = identify_source(getattr(config, source.name))
    excluded = []
    for given in exclude:
        if Path(given).exists():
            # The hashes of the files, so that a changed file makes a different build.
            for file in list_source_files(Path(given)):
                excluded.append({"name": file.name, "sha256": digest_file(file)})
    record = {
        "config": asdict(config),
        "sources": origins,
        "exclude": excluded,
        "model": describe_model(model, tokenizer),
    }
    # Through JSON and back, so that it compares equal to what is read from the file.
    return json.loads(json.dumps(record))
