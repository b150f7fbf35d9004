"""Building a mixture: read, filter, let the teacher ask and answer, write. A build that was killed
can be resumed.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data import manifest as folder
from restorekv.data.config import BuildConfig
from restorekv.data.files import identify_source, iterate_rows, list_source_files
from restorekv.data.gather import AttemptFile, Progress, SourceBuilder, compute_longest_context
from restorekv.data.mixture import write_examples
from restorekv.data.overlap import EvaluationIndex, read_evaluation_texts
from restorekv.data.sources import Source, select_sources
from restorekv.errors import RestoreKVError, warn
from restorekv.files import folder_lock, write_json
from restorekv.seal import digest_file
from restorekv.tiny.suite import draw_documents as suite

# Documents of the tiny suite that paper/results/table1.md is measured on; the demo asks the first
# 52.
SUITE_DOCUMENTS = 156
# What other benchmarks ask and ships. Factbook countries share lists of treaties: tasks/splits.py
# parts those by name.
TEXTS = Path(__file__).parents[1] / "tasks" / "texts"
SHIPPED_TEXTS = [str(TEXTS / name) for name in ("fairytaleqa", "novels", "share-alike")]


def build_mixture(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    config: BuildConfig,
    out: Path,
    exclude: Sequence[str] = (),
    resume: bool = False,
    progress: Progress = lambda *_: None,
) -> dict:
    """Make the mixture in `out` and return its manifest; see `index_excluded_texts` for `exclude`."""
    folder.check_folder(out, resume)
    before = folder.read_earlier_build(out)
    folder.check_same_build(out, before, {"config": asdict(config)})  # before a hub is asked
    record = _describe_build(model, tokenizer, config, exclude, before)
    if (out / folder.MANIFEST_FILE).is_file():
        folder.check_same_build(out, before, record)
        folder.delete_build_files(out)
        return folder.read_manifest(out)
    if resume and before is None:
        warn(f"There is nothing in {out} to resume; this is a new build.")
    evaluations = index_excluded_texts(tokenizer, exclude, config.overlap)
    longest = compute_longest_context(model, tokenizer, config)
    _check_source_lengths(config, longest)
    builder = SourceBuilder(model, tokenizer, config, evaluations, longest, progress)
    with folder_lock(out, folder.LOCK_FILE):
        folder.begin_build(out, before, record)
        try:
            accounts = {
                source.name: _build_source(builder, source, out, record)
                for source in select_sources(config)
            }
        except BaseException:
            folder.discard_empty_build(out)
            raise
    manifest = {
        "format": folder.FORMAT,
        "version": folder.VERSION,
        "mixture": config.mixture,
        "model": record["model"],
        "seed": config.seed,
        "longest": longest,
        "sources": accounts,
        "licenses": dict(
            sum((Counter(source["licenses"]) for source in accounts.values()), Counter())
        ),
        "exclusion": {
            "texts": len(evaluations.names),
            "share": config.overlap,
            "files": record["exclude"],
        },
        "settings": asdict(config),
        "versions": folder.list_versions(),
    }
    write_json(out / folder.MANIFEST_FILE, manifest, follow=False)
    folder.delete_build_files(out)
    return manifest


def index_excluded_texts(
    tokenizer: Tokenizer, exclude: Sequence[str], share: float
) -> EvaluationIndex:
    """Return the texts of the tiny suite, of other benchmarks that ship, and of the files or
    folders `exclude`.
    """
    tests = (
        (f"tiny suite, document {number}", made.text)
        for number, made in enumerate(suite(tokenizer, SUITE_DOCUMENTS))
    )
    return EvaluationIndex(chain(tests, read_evaluation_texts([*SHIPPED_TEXTS, *exclude])), share)


def _build_source(builder: SourceBuilder, source: Source, out: Path, record: dict) -> dict:
    """Turn the rows of one source into its file; return its account."""
    where = getattr(builder.config, source.name)
    known = record["sources"][source.name]
    items = source.read(iterate_rows(where, known), builder.config, builder.tokenizer)
    gathered = builder.gather_examples(
        source, items, AttemptFile(out / folder.PARTS_FOLDER / f"{source.name}.jsonl")
    )
    reasons = f"(dropped: {gathered.describe_drops()})"
    if not gathered.examples:
        raise RestoreKVError(
            f"{source.title} gave no example from {where} {reasons}; check its format."
        )
    count = gathered.count_units(source)
    wanted = source.wanted(builder.config)
    if count < wanted:
        warn(f"{source.title} gave {count} of {wanted} {source.unit}, all of {where} {reasons}.")
    path = out / f"{source.name}.parquet"
    write_examples(path, gathered.examples)
    file = {"name": path.name, "bytes": path.stat().st_size, "sha256": digest_file(path)}
    return {**gathered.to_account(source), "from": {"given": where, **known}, "file": file}


def _check_source_lengths(config: BuildConfig, longest: int) -> None:
    """Refuse sources whose shortest context is longer than `longest`; warn if that is less than
    was asked for.
    """
    for source in select_sources(config):
        least = config.chunk if source.name == "pg19" else source.shortest(config)
        if least > longest:
            raise RestoreKVError(
                f"{source.title} needs contexts of {least} tokens, and at most {longest} fit with a question "
                "and an answer; lower --shortest, --chunk or --flan-shortest."
            )
    if longest < config.longest:
        warn(
            f"--longest {config.longest} is lowered to {longest}: with a question and an answer "
            "the model has no positions for more."
        )


def _describe_build(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    config: BuildConfig,
    exclude: Sequence[str],
    before: dict | None,
) -> dict:
    """Return everything that decides the result; a dataset of the hub stays at the commit the
    build began with.
    """
    known = {}
    for source in select_sources(config):
        begun = (before or {}).get("sources", {}).get(source.name, {})
        known[source.name] = (
            begun if "hub" in begun else identify_source(getattr(config, source.name))
        )
    excluded = [
        {"name": file.name, "sha256": digest_file(file)}
        for given in exclude
        if Path(given).exists()
        for file in list_source_files(Path(given))
    ]
    facts = {"config": asdict(config), "sources": known, "exclude": excluded}
    return json.loads(json.dumps(facts | {"model": folder.describe_model(model, tokenizer)}))
