"""What experiments are measured on: a model, the benchmarks that replace the paper's, and where the
adapters are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paper.experiment import OWN, Place, Row
from paper.recipe import ABLATIONS, CONTEXTS, LONGEST
from paper.training import Setup, Training
from restorekv import tasks
from restorekv.errors import AdapterError, RestoreKVError
from restorekv.evaluation.grid import FULL, Cell
from restorekv.model.names import TINY
from restorekv.restore import hub
from restorekv.restore.shipped import find_shipped_adapter
from restorekv.tiny import world
from restorekv.train.config import TrainConfig

DOCUMENTS = 104
LONG_DOCUMENTS = 52
CATEGORIES = ("S-QA", "M-QA", "Summ", "Few-shot", "Synth", "Code")
PUBLISHED = "published"
SEEDS = (0, 1, 2)
TRAINED = Path(__file__).parent / "ablations"  # adapters of the ablations, by model and training
ASKED = ("ruler", "qasper", "quality", "longhealth", "longbench", "scbench")
ABOUT_TINY = (
    "The paper's figures are of other models and other questions: what can be compared is the "
    "order of rows and the "
    "size of gains, not the scores. The tiny adapters were trained with the chat prefix kept "
    "beside the budget, so "
    "they are asked so here. Where n restore tokens exceed the budget of a short document, fewer "
    "are used."
)


@dataclass(frozen=True)
class Bench:
    """What is asked here for the paper's benchmark `title`.

    `parts` has the tasks of each of its parts; an empty tuple means all tasks. If another benchmark
    replaces the paper's, `standing` says so in a sentence and `name` is what it is called. `more`
    are specs of further benchmarks with tasks of other names, which count with those of `spec`.
    """

    title: str
    spec: str
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"": ()})
    standing: str = ""
    protocol: str = "kvpress"
    name: str = ""
    more: tuple[str, ...] = ()

    @property
    def specs(self) -> tuple[str, ...]:
        return (self.spec, *self.more)

    @property
    def all_tasks(self) -> tuple[str, ...]:
        """The tasks of all parts, or an empty tuple, meaning all tasks, if a part has all."""
        parts = list(self.parts.values())
        return () if () in parts else tuple(task for tasks in parts for task in tasks)

    @property
    def by_context(self) -> bool:
        return tasks.make_benchmark(self.spec).averages_contexts(self.protocol)

    @property
    def shown(self) -> str:
        """The title for tables and charts, which names the replacement if there is one."""
        if not self.standing:
            return self.title
        return f"{self.name} (for {self.title})" if self.name else f"{self.title} (stand-in)"


@dataclass(frozen=True)
class Setting:
    """A model, the benchmarks that it is asked, and where its adapters are.

    `conventions` are fields of every cell. `adapters` is a folder of adapters by evictor, or
    "published". `more_ratios` are asked in the ablations in addition to the paper's, for a model
    that loses little at those. `name` is what pages call the model, and `about` what readers must
    know about it. `efficiency_tokens` is the length of the context whose compression is timed.
    """

    setup: Setup
    benches: Mapping[str, Bench]
    conventions: Mapping[str, object]
    adapters: str | None = None
    seeds: tuple[int, ...] = SEEDS
    more_ratios: tuple[float, ...] = ()
    name: str = ""
    about: str = ""
    efficiency_tokens: int = 32768  # the paper's

    @property
    def model(self) -> str:
        return self.setup.model

    @property
    def tiny(self) -> bool:
        return self.model == TINY

    @property
    def settings(self) -> TrainConfig:
        """The settings of trainings; their number of restore tokens is also that of the method."""
        return self.setup.settings

    def training(self, changed: Mapping[str, object], seed: int) -> Training:
        return Training(self.setup, changed, seed)

    def cells(self, row: Row, place: Place, adapter: str | None) -> list[Cell]:
        """Return the cells of a row at a place, one for each of the place's benchmarks.

        `adapter` is one that `locate_adapters` found.
        """
        if row.evictor == FULL:
            return self.full(place.benchmark)
        changed = {} if adapter is None else get_trained_config(row)
        own = {**self.conventions, **changed, **row.conventions, "adapter": adapter}
        asked = self.asked(place.benchmark)
        return [
            Cell(evictor=row.evictor, ratio=f"{place.ratio:g}", **each, **own) for each in asked
        ]

    def full(self, benchmark: str) -> list[Cell]:
        """Return the cells of the full cache for a benchmark of the paper."""
        return [Cell.full_cache(**each) for each in self.asked(benchmark)]

    def asked(self, benchmark: str) -> list[dict[str, str]]:
        """Return the fields that all cells for a benchmark of the paper share, for each spec."""
        bench = self.benches[benchmark]
        common = {"model": self.model, "protocol": bench.protocol, "dtype": self.setup.dtype}
        return [{**common, "benchmark": spec} for spec in bench.specs]

    def locate_adapters(self, row: Row) -> dict[int | None, str | None]:
        """Return where the row's adapters are, by seed; None for those that are not available.

        A row without an adapter is returned as {None: None}.
        """
        if row.adapter is None:
            return {None: None}
        if row.adapter == OWN:
            return {0: self.find_adapter(row.evictor, row.evictor)}
        return {seed: self.trained(row.adapter, seed, row.evictor) for seed in self.seeds}

    def find_adapter(self, evictor: str, used: str) -> str | None:
        """Return the adapter that belongs to `evictor`, for caches of the evictor `used`.

        It may be given, published, shipped or trained here; None if there is none.
        """
        if self.adapters == PUBLISHED:
            try:
                return hub.find_published_name(self.model, evictor)
            except AdapterError:
                return None
        if self.adapters and (Path(self.adapters) / evictor / "adapter_config.json").exists():
            return str((Path(self.adapters) / evictor).absolute())
        shipped = find_shipped_adapter(self.model, evictor)
        if shipped and used == evictor:
            return "auto"
        # Do not take an adapter that was trained for another evictor and only serves this one too.
        if shipped and shipped.name == evictor:
            return f"{self.model}:{evictor}"
        return None if self.tiny else self.get_folder(self.training({"evictor": evictor}, 0))

    def trained(self, changed: Mapping[str, object], seed: int, used: str) -> str | None:
        """Return the adapter of a training, for caches of the evictor `used`.

        It may be trained here, shipped or given; None if there is none.
        """
        training = self.training(changed, seed)
        if found := self.get_folder(training):
            return found
        own = self.settings == ABLATIONS or not self.tiny
        stored = TRAINED / self.model / training.name
        if own and stored.is_dir():
            return str(
                stored.relative_to(Path.cwd()) if stored.is_relative_to(Path.cwd()) else stored
            )
        if self.tiny:
            return None
        if seed == 0 and training.config == replace(
            self.settings, evictor=training.config.evictor, seed=0
        ):
            return self.find_adapter(training.config.evictor, used)
        given = Path(self.adapters or "") / training.name
        return (
            str(given.absolute())
            if self.adapters not in (None, PUBLISHED) and given.is_dir()
            else None
        )

    def get_folder(self, training: Training) -> str | None:
        return str(training.adapter.absolute()) if training.done else None

    def list_wanted(self, row: Row) -> list[Training]:
        """Return the trainings that would make the row's missing adapters."""
        lacking = [
            seed
            for seed, place in self.locate_adapters(row).items()
            if seed is not None and place is None
        ]
        if row.adapter is None or (row.adapter == OWN and self.tiny):
            return []
        changed = {"evictor": row.evictor} if row.adapter == OWN else row.adapter
        return [self.training(changed, seed) for seed in lacking]


def get_trained_config(row: Row) -> dict[str, object]:
    """Return the conventions that an ablation's adapter was trained with, which its cells
    need too.
    """
    changed = row.adapter if isinstance(row.adapter, Mapping) else {}
    return {key: changed[key] for key in ("allocation", "restore_from") if key in changed}


def make_tiny_setting(
    out: Path,
    count: int = 0,
    seeds: tuple[int, ...] = SEEDS,
    settings: TrainConfig = ABLATIONS,
    device: str = "cpu",
    dtype: str = "auto",
) -> Setting:
    """Return the setting of the tiny model.

    Groups of the tiny suite's families replace the paper's four main benchmarks; families of it,
    and longer documents, replace the others.
    """
    if count < 0:
        raise RestoreKVError(f"count is a number of documents, at least 0, not {count}.")
    suite = f"tiny:count={count or DOCUMENTS}"
    long = f"tiny:count={count or LONG_DOCUMENTS},low={LONGEST + 20},split=long"
    ruler, qasper, quality, health = world.GROUPS.values()
    of = "of the tiny suite (documents of 512 to 2,048 tokens) stand for"
    benches = {
        "ruler": Bench(
            "RULER-4K", suite, {"": ruler}, f"The families {', '.join(ruler)} {of} RULER-4K."
        ),
        "qasper": Bench(
            "QASPER", suite, {"": qasper}, f"The families {', '.join(qasper)} {of} QASPER."
        ),
        "quality": Bench(
            "QuALITY", suite, {"": quality}, f"Questions with four options {of} QuALITY."
        ),
        "longhealth": Bench(
            "LongHealth", suite, {"": health}, f"Questions with five options {of} LongHealth."
        ),
        "longbench": Bench(
            "LongBench",
            suite,
            {
                "S-QA": ("qa",),
                "M-QA": ("multiquery", "vt"),
                "Summ": ("freeform",),
                "Synth": ("single", "multikey", "multivalue", "cwe", "fwe"),
            },
            "Families of the tiny suite stand for LongBench's categories: qa for S-QA; multiquery "
            "and vt, whose "
            "answers lie in several places, for M-QA; freeform, which gathers all that is said of "
            "someone, for Summ; "
            "single, multikey, multivalue, cwe and fwe for Synth. Few-shot and Code have no "
            "counterpart.",
        ),
        "scbench": Bench(
            "SCBench",
            long,
            standing=f"Documents of {LONGEST + 20:,} to 2,048 tokens stand for SCBench: longer "
            "than every context that "
            f"the adapters were trained on (512 to {LONGEST:,}), if not by SCBench's order of "
            "magnitude.",
        ),
    }
    setup = Setup(out / "trained", settings, contexts=CONTEXTS, device=device, dtype=dtype)
    conventions = {"prefix_policy": "free", "on_small_budget": "fewer"}
    return Setting(
        setup,
        benches,
        conventions,
        seeds=seeds,
        more_ratios=(0.025,),
        name="the tiny model",
        about=ABOUT_TINY,
        efficiency_tokens=2048,
    )


def make_backbone_setting(
    out: Path,
    model: str,
    adapters: str | None,
    count: int = 0,
    seeds: tuple[int, ...] = SEEDS,
    given: Sequence[str] = (),
    data: Path | None = None,
    device: str = "cpu",
    dtype: str = "auto",
) -> Setting:
    """Return the setting of a real model with the paper's benchmarks, settings and protocols.

    `given` are specs that replace the defaults of the benchmarks they name.
    """
    check_adapters(adapters)
    chosen = {made.name: made for made in map(tasks.make_benchmark, given)}
    if foreign := chosen.keys() - ASKED:
        raise RestoreKVError(
            f"The paper does not ask {', '.join(sorted(foreign))}; it asks {', '.join(ASKED)}."
        )

    def asked(spec: str) -> str:
        made = chosen.get(spec.partition(":")[0]) or tasks.make_benchmark(spec)
        return (replace(made, count=count) if count else made).spec

    ruler = asked("ruler:source=hub")
    benches = {
        "ruler": Bench("RULER-4K", ruler, standing=_describe_generated(ruler)),
        "qasper": Bench("QASPER", asked("qasper")),
        "quality": Bench("QuALITY", asked("quality")),
        "longhealth": Bench("LongHealth", asked("longhealth")),
        # Its categories are means over all their tasks.
        "longbench": Bench(
            "LongBench",
            asked("longbench"),
            dict(tasks.make_benchmark(asked("longbench")).group_tasks()),
        ),
        "scbench": Bench("SCBench", asked("scbench"), protocol="kvzip"),
    }
    # The prefix policy under which RULER is asked.
    settings = TrainConfig(prefix_policy="counted")
    setup = Setup(out / "trained", settings, model, data, device=device, dtype=dtype)
    return Setting(setup, benches, {"on_small_budget": "fewer"}, adapters, seeds)


def _describe_generated(ruler: str) -> str:
    """Return a sentence on what replaces RULER's own samples; "" if kvpress's data set is asked."""
    told = tasks.make_benchmark(ruler).to_json()
    stand_ins = told.get("stand_ins")
    if not isinstance(stand_ins, Mapping):
        return ""
    parts = "; ".join(f"{task}: {what}" for task, what in stand_ins.items())
    return f"RULER-4K is {told['data']}" + (f" ({parts})." if parts else ".")


def check_adapters(adapters: str | None) -> None:
    """Refuse a folder of adapters that does not exist."""
    if adapters not in (None, PUBLISHED) and not Path(adapters).is_dir():
        raise RestoreKVError(
            f"There is no folder {adapters}; give one of adapters by evictor, or {PUBLISHED}."
        )
