"""Building a mixture: read, filter, let the teacher ask and answer, write. Killed at any moment, it goes on from there.

While it is made the folder holds build.json (what is being made) and parts/ (answers so far); the manifest comes last
and takes their place, so a folder with a manifest is complete.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.config import BuildConfig
from restorekv.data.files import identity, local_files, sha256
from restorekv.data.filters import room
from restorekv.data.folder import PARTS, abandon, check_folder, check_same, clear, earlier, finished, start
from restorekv.data.gather import Builder, Progress, account
from restorekv.data.manifest import FORMAT, NAME, VERSION, model_facts, versions
from restorekv.data.overlap import Evaluations, evaluation_texts
from restorekv.data.parts import Parts
from restorekv.data.rows import rows
from restorekv.data.shard import write_shard
from restorekv.data.sources import Source, sources
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.files import write_json
from restorekv.tiny.suite import documents as suite

TESTED = 156  # documents of the bundled suite that docs/table1.md is measured on; the demo asks the first 52


def build(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    config: BuildConfig,
    out: Path,
    exclude: Sequence[str] = (),
    resume: bool = False,
    progress: Progress = lambda *_: None,
) -> dict:
    """Makes the mixture in `out` and returns its manifest; texts of `exclude` and of the bundled suite are kept out."""
    check_folder(out, resume)
    before = earlier(out)
    check_same(out, before, {"config": asdict(config)})  # before a hub is asked
    record = describe_run(model, tokenizer, config, exclude, before)
    if (out / NAME).is_file():
        return finished(out, before, record)
    if resume and before is None:
        tell(f"There is nothing in {out} to go on with; this is a new build.")
    texts = chain(suite_texts(tokenizer), evaluation_texts(list(exclude)))
    evaluations = Evaluations(texts, config.overlap)
    builder = Builder(model, tokenizer, config, evaluations, room(model, tokenizer, config), progress)
    check_room(builder)
    start(out, before, record)
    try:
        told = {source.name: make(builder, source, out, record) for source in sources(config)}
    except BaseException:
        abandon(out)
        raise
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "mixture": config.mixture,
        "model": record["model"],
        "seed": config.seed,
        "longest": builder.longest,
        "sources": told,
        "licences": dict(sum((Counter(source["licences"]) for source in told.values()), Counter())),
        "exclusion": {"texts": len(evaluations.names), "share": config.overlap, "files": record["exclude"]},
        "settings": asdict(config),
        "versions": versions(),
    }
    write_json(out / NAME, manifest)
    clear(out)
    return manifest


def make(builder: Builder, source: Source, out: Path, record: dict) -> dict:
    """One source from its rows to its file; returns its account."""
    where, known = getattr(builder.config, source.name), record["sources"][source.name]
    found = source.read(rows(where, known), builder.config, builder.tokenizer)
    got = builder.gather(source, found, Parts(out / PARTS / f"{source.name}.jsonl"))
    if not got.examples:
        raise RestoreKVError(
            f"{source.title} gave no example from {where} (dropped: {got.reasons()}); check its format."
        )
    reached, wanted = got.reached(source), source.wanted(builder.config)
    if reached < wanted:
        tell(f"{source.title} gave {reached} of {wanted} {source.unit}, all of {where} (dropped: {got.reasons()}).")
    path = out / f"{source.name}.parquet"
    write_shard(path, got.examples)
    return {**account(source, got), "from": {"given": where, **known}, "file": described(path)}


def tell(words: str) -> None:
    warnings.warn(words, RestoreKVWarning, stacklevel=3)


def described(path: Path) -> dict:
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def suite_texts(tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """The test documents of the bundled suite, as this tokenizer makes them."""
    return ((f"bundled suite, document {number}", made.text) for number, made in enumerate(suite(tokenizer, TESTED)))


def check_room(builder: Builder) -> None:
    """Refuses sources whose shortest context the model cannot hold; tells if the longest is none of those wanted."""
    for source in sources(builder.config):
        least = builder.config.chunk if source.name == "pg19" else source.shortest(builder.config)
        if least > builder.longest:
            raise RestoreKVError(
                f"{source.title} needs contexts of {least} tokens, and at most {builder.longest} fit with a question "
                "and an answer; lower --shortest, --chunk or --flan-shortest."
            )
    if builder.longest < builder.config.longest:
        tell(
            f"--longest {builder.config.longest} is lowered to {builder.longest}: with a question and an answer "
            "the model has no positions for more."
        )


def describe_run(
    model: PreTrainedModel, tokenizer: Tokenizer, config: BuildConfig, exclude: Sequence[str], before: dict | None
) -> dict:
    """Everything that decides the result; a dataset of the hub stays at the commit it was begun with."""
    known = {}
    for source in sources(config):
        where = getattr(config, source.name)
        begun = (before or {}).get("sources", {}).get(source.name, {})
        known[source.name] = begun if "hub" in begun else identity(where)
    kept_out = [
        {"name": file.name, "sha256": sha256(file)}
        for given in exclude if Path(given).exists() for file in local_files(Path(given))
    ]  # fmt: skip
    facts = {"config": asdict(config), "sources": known, "exclude": kept_out, "model": model_facts(model, tokenizer)}
    return json.loads(json.dumps(facts))
