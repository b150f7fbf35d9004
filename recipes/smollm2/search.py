"""Compare training recipes on development passages: they differ in one change at a time, and all
have the same contexts and steps.

    python -m recipes.smollm2.search prepare FOLDER --corpus CORPUS --data DATA [DATA ...]
    python -m recipes.smollm2.search run FOLDER VARIANT [VARIANT ...] [--steps 400] [--seed 0]
    python -m recipes.smollm2.search table FOLDER
    python -m recipes.smollm2.search ship FOLDER VARIANT NAME --data DATA [DATA ...]

`prepare` computes once what every variant needs: full caches (float16), KVzip's scores and the
teacher's targets, for the shorter training contexts, one development passage of every genre and
some generated documents. `run` trains a variant and measures its divergence from the full cache on
the development passages; the adapter is kept next to the result. `table` compares each variant with
the first one, paired by passage. `ship` puts a variant's adapter into the package, with the record
of what it was trained on, and its losses into NAME-loss.csv next to this file. Everything is
resumable: what is in FOLDER is not computed again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache
from transformers import PreTrainedTokenizerBase as Tokenizer

from recipes.run import make_parser, run_recipe
from restorekv.cache.dense import list_dense_layers
from restorekv.compression.eviction import Eviction
from restorekv.compression.full_cache import ScoredContext
from restorekv.data.config import BuildConfig
from restorekv.data.corpus import TRAIN_SPLIT, read_corpus
from restorekv.data.documents import DropRow, SourceDocument
from restorekv.data.files import iterate_rows
from restorekv.data.gather import AttemptFile, identify_document
from restorekv.data.made import make_document
from restorekv.data.mixture import read_mixture
from restorekv.data.self_study import GreedyUntilLoop
from restorekv.evaluation.stats import bootstrap_ratio
from restorekv.generation.decoding import generate_ids
from restorekv.model.load import load_model
from restorekv.model.names import shipped_path
from restorekv.model.prompt import DEFAULT_SEPARATOR, encode_question, make_context
from restorekv.restore import adapter_file
from restorekv.restore.adapter import RestoreAdapter
from restorekv.tasks.splits import DEVELOPMENT, split_corpus
from restorekv.train.examples import TrainingContext, count_sources, read_examples
from restorekv.train.loop import inherit_data, weigh_loss
from restorekv.train.loss import (
    compute_hidden_divergence,
    compute_state_distance,
    run_answers,
    weigh_answer_tokens,
)
from restorekv.train.teacher import Teacher, TeacherTarget

WORDING = "Question: {question}\nAnswer:"
LONGEST = 1300  # tokens of a context in the search, so that its caches fit on a disk
GENRES = 40
MADE = 8
RATIOS = (0.5, 0.3, 0.1, 0.05)  # at which divergence is measured
ANSWER_TOKENS = 96
LOOP = 16
WARMUP = 20  # steps


@dataclass(frozen=True)
class Variant:
    """A training recipe. The defaults are the first row of the table, from which the others differ
    in one thing or two.
    """

    restore_tokens: int = 4
    rank: int = 12
    # The shipped adapter to start from, extended if it has fewer tokens; "" starts from a new one.
    init: str = "kvzip"
    lr: float = 5e-4
    questions: int = 4
    ratio_min: float = 0.025
    ratio_max: float = 0.6
    ratio_weight: float = 0.0
    # The power of the loss that is minimized; 0 is its logarithm, so that ratios weigh the same.
    loss_power: float = 1.0
    hidden_weight: float = 0.0  # weight of the distance of the last hidden states
    answer_decay: float = 0.0  # token t of an answer weighs exp(-t / this); 0: all weigh the same
    knows_ratio: bool = False  # learn vectors that inform the restore tokens of the ratio
    means: bool = False  # add the mean of a chunk's embeddings to each restore token
    made: bool = True  # train on generated documents too


FIRST = "first"
# The first variant of each search, with which its others are compared.
FIRST_ROWS = (FIRST, "shared", "root, n 4")
VARIANTS = {
    FIRST: Variant(),
    "ratios to .25": Variant(ratio_max=0.25),
    "weight 1": Variant(ratio_weight=1.0),
    "relative": Variant(loss_power=0.0),
    "hidden": Variant(hidden_weight=0.5),
    "knows r": Variant(knows_ratio=True),
    "knows r, relative": Variant(knows_ratio=True, loss_power=0.0),
    "lr 1e-3": Variant(lr=1e-3),
    "lr 2e-4": Variant(lr=2e-4),
    "2 questions": Variant(questions=2),
    "nothing made": Variant(made=False),
    "means": Variant(means=True),
    "root, n 4": Variant(loss_power=0.5),
    "root, n 8": Variant(loss_power=0.5, restore_tokens=8),
    "root, n 16": Variant(loss_power=0.5, restore_tokens=16),
    "scratch": Variant(init="", lr=1e-3),
    "scratch, n 8": Variant(init="", lr=1e-3, restore_tokens=8),
    "scratch, n 16": Variant(init="", lr=1e-3, restore_tokens=16),
    "scratch, n 2": Variant(init="", lr=1e-3, restore_tokens=2),
    "scratch, means": Variant(init="", lr=1e-3, means=True),
    "scratch, rank 32": Variant(init="", lr=1e-3, rank=32),
    "scratch, rank 8": Variant(init="", lr=1e-3, rank=8),
}

# Measured in addition to the variants: KVzip alone, and the shipped adapter without more training.
UNTRAINED = {"alone": "", "shipped": "kvzip"}


@dataclass(frozen=True)
class Case:
    """A context with its questions and the teacher's answers."""

    name: str
    text: str
    questions: tuple[str, ...]
    answer_ids: tuple[tuple[int, ...], ...]


class Bench:
    """The model, the prepared cases in a folder, and what can be measured with them."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self.folder = folder
        self.model, self.tokenizer = load_model("smollm2", dtype=dtype)
        self.model.requires_grad_(False)

    def load_cases(self, split: str) -> list[Case]:
        lines = (self.folder / f"{split}.jsonl").read_text("utf-8").splitlines()
        raw = [json.loads(line) for line in lines]
        return [
            Case(
                row["name"],
                row["text"],
                tuple(row["questions"]),
                tuple(map(tuple, row["answer_ids"])),
            )
            for row in raw
        ]

    def find_path(self, case: Case) -> Path:
        name = identify_document(SourceDocument(case.name, case.text, ""))[1]
        return self.folder / "cases" / f"{name}.safetensors"

    @torch.no_grad()
    def prepare_case(self, case: Case) -> None:
        """Write a case's full cache, scores and targets, unless they are there."""
        path = self.find_path(case)
        if path.exists():
            return
        context = make_context(self.tokenizer, case.text)
        prepared = Eviction.make("kvzip").prepare(self.model, self.tokenizer, context)
        assert isinstance(prepared, ScoredContext), "the recipe does not stream"
        example = TrainingContext(
            case.text, case.questions, (None,) * len(case.questions), case.answer_ids
        )
        targets = Teacher(self.model, self.tokenizer, ANSWER_TOKENS).make_targets(prepared, example)
        tensors = {"scores": prepared.scores}
        for index, layer in enumerate(list_dense_layers(prepared.full)):
            tensors[f"keys.{index}"] = layer.keys.half()
            tensors[f"values.{index}"] = layer.values.half()
        for index, target in enumerate(targets):
            tensors[f"ids.{index}"] = target.ids
            tensors[f"hidden.{index}"] = target.hidden
            tensors[f"answer.{index}"] = torch.tensor(target.answer_length)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        temporary.rename(path)

    def load_case(self, case: Case) -> tuple[ScoredContext, list[TeacherTarget]]:
        tensors = load_file(self.find_path(case))
        full = DynamicCache()
        layers = sum(name.startswith("keys.") for name in tensors)
        for index in range(layers):
            full.update(tensors[f"keys.{index}"].float(), tensors[f"values.{index}"].float(), index)
        context = make_context(self.tokenizer, case.text)
        conventions = Eviction.make("kvzip", on_small_budget="fewer").config
        prepared = ScoredContext(self.model, context, full, tensors["scores"], config=conventions)
        count = sum(name.startswith("ids.") for name in tensors)
        targets = [
            TeacherTarget(
                tensors[f"ids.{index}"], int(tensors[f"answer.{index}"]), tensors[f"hidden.{index}"]
            )
            for index in range(count)
        ]
        return prepared, targets

    def compute_losses(
        self,
        prepared: ScoredContext,
        targets: list[TeacherTarget],
        ratio: float,
        restorer: Restorer | None,
        hidden_weight: float = 0.0,
    ) -> Tensor:
        """Return the divergence at every answer token, plus `hidden_weight` times the relative
        distance of the last hidden states.
        """
        if restorer is not None:
            prepared = restorer.restore_context(prepared)
        cache = prepared.evict(f"{ratio:.6f}")
        output = run_answers(
            self.model, cache, [t.ids for t in targets], [t.answer_length for t in targets]
        )
        expected = torch.cat([t.hidden for t in targets])
        losses = compute_hidden_divergence(self.model, expected, output.hidden)
        if hidden_weight:
            distances = compute_state_distance(expected[None], output.hidden[None])
            losses = losses + hidden_weight * distances
        return losses

    @torch.no_grad()
    def measure_divergence(self, restorer: Restorer | None) -> list[dict]:
        """Return the mean divergence of every development case at every ratio."""
        measured = []
        for case in self.load_cases("development"):
            prepared, targets = self.load_case(case)
            kl = {
                f"{ratio:g}": float(self.compute_losses(prepared, targets, ratio, restorer).mean())
                for ratio in RATIOS
            }
            measured.append({"name": case.name, "kl": kl})
        return measured


def hash_shipped(name: str) -> str:
    """Return the hash of a shipped adapter's weights, or "" if none ships under the name."""
    folder = shipped_path("smollm2", "adapters", name)
    return adapter_file.read_adapter(folder).weights_hash() if folder.is_dir() else ""


class Restorer:
    """An adapter with the additions that a variant may have."""

    def __init__(self, bench: Bench, variant: Variant, seed: int) -> None:
        self.bench = bench
        self.variant = variant
        if variant.init:
            self.adapter = RestoreAdapter.from_pretrained(
                bench.model, shipped_path("smollm2", "adapters", variant.init)
            )
            if variant.restore_tokens > self.adapter.restore_tokens:
                self.adapter = self.adapter.extend(variant.restore_tokens)
        else:
            n = variant.restore_tokens
            rank = variant.rank
            self.adapter = RestoreAdapter.create(
                bench.model, n, rank=rank, alpha=2.0 * rank, seed=seed
            )
        if variant.knows_ratio:
            self.adapter.add_ratio_vectors()

    def parameters(self) -> list[Tensor]:
        return [parameter for parameter in self.adapter.parameters() if parameter.requires_grad]

    def restore_context(self, prepared: ScoredContext) -> ScoredContext:
        """Return the context with its restore cache."""
        if not self.variant.means:
            return prepared.with_restore_cache(self.adapter)
        table = self.bench.model.get_input_embeddings()
        context = prepared.context
        states = table(context.ids[0, context.prefix_length :])
        inputs = self.adapter.embeddings
        means = [chunk.mean(0) for chunk in states.tensor_split(len(inputs))]
        inputs = inputs + torch.stack(means)
        # The adapter reads its attribute `embeddings`. Put the sum there for one pass; a parameter
        # cannot be assigned a computed tensor, and gradients must reach both parts.
        parameter = self.adapter._parameters.pop("embeddings")
        vars(self.adapter)["embeddings"] = inputs
        try:
            return prepared.with_restore_cache(self.adapter)
        finally:
            del vars(self.adapter)["embeddings"]
            self.adapter._parameters["embeddings"] = parameter


def train_variant(
    bench: Bench,
    variant: Variant,
    steps: int,
    seed: int,
    report: Callable[[int, float, float], None],
) -> Restorer:
    """Train a variant on the search's contexts; the rate has a linear warm-up, then a cosine."""
    restorer = Restorer(bench, variant, seed)
    parameters = restorer.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=variant.lr, betas=(0.9, 0.999), weight_decay=0.01)
    cases = [
        case
        for case in bench.load_cases("train")
        if variant.made or not case.name.startswith("made ")
    ]
    rng = random.Random(f"search {seed}")
    order: list[int] = []
    for step in range(steps):
        if not order:
            order = rng.sample(range(len(cases)), len(cases))
        prepared, targets = bench.load_case(cases[order.pop()])
        targets = rng.sample(targets, min(variant.questions, len(targets)))
        ratio = math.exp(rng.uniform(math.log(variant.ratio_min), math.log(variant.ratio_max)))
        losses = bench.compute_losses(prepared, targets, ratio, restorer, variant.hidden_weight)
        lengths = [target.answer_length for target in targets]
        loss = (losses * weigh_answer_tokens(lengths, variant.answer_decay)).mean()
        if loss.requires_grad:
            weight = (ratio / variant.ratio_max) ** variant.ratio_weight
            weight *= weigh_loss(variant.loss_power, float(loss.detach()))
            (loss * weight).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        done = (step - WARMUP) / (steps - WARMUP)
        rate = (step + 1) / WARMUP if step < WARMUP else 0.5 * (1 + math.cos(math.pi * done))
        optimizer.param_groups[0]["lr"] = variant.lr * rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report(step, ratio, float(loss.detach()))
    return restorer


def read_answered_cases(corpus: Path, data: list[Path], tokenizer: Tokenizer) -> Iterator[Case]:
    """Yield the contexts of data builds with their answers; unfinished builds give those answered
    so far.
    """
    answered: dict[str, list[dict]] = {}
    for folder in data:
        if (folder / "manifest.json").exists():
            for each in read_mixture(folder)[0]:
                yield Case(each.document, each.context, each.questions, each.answer_ids)
        else:
            lines = AttemptFile(folder / "parts" / "corpus.jsonl").done
            answered |= {"\n".join(line["context"]): line["attempts"] for line in lines}
    config = BuildConfig(
        mixture="corpus", passage_shortest=300, passage_longest=4000, wording=WORDING
    )
    if not answered:
        return
    # Unfinished builds store answers without texts, so draw the texts again until all are found.
    left = len(answered)
    for item in read_corpus(iterate_rows(str(corpus), {}), config, tokenizer):
        if isinstance(item, DropRow):
            continue
        attempts = answered.get("\n".join(identify_document(item)))
        if not attempts:
            continue
        good = [each for each in attempts if "fault" not in each]
        yield Case(
            name=item.name,
            text=item.text,
            questions=tuple(each["question"] for each in good),
            answer_ids=tuple(tuple(each["answer_ids"]) for each in good),
        )
        left -= 1
        if not left:
            return


def draw_development_documents(corpus: Path, bench: Bench) -> list[SourceDocument]:
    """Return a passage of every genre's development split, and generated documents of
    other seeds.
    """
    config = BuildConfig(
        mixture="corpus",
        passage_shortest=300,
        passage_longest=LONGEST,
        wording=WORDING,
        made=0.0,
        seed=77,
        invented=0.3,
    )
    development = (
        {**row, "split": TRAIN_SPLIT}
        for row in iterate_rows(str(corpus), {})
        if row.get("split") and split_corpus(row["split"], row["id"]) == DEVELOPMENT
    )
    documents = []
    for item in read_corpus(development, config, bench.tokenizer):
        if isinstance(item, DropRow):
            continue
        documents.append(item)
        if len(documents) == GENRES:
            break
    for number in range(MADE):
        rng = random.Random(f"development made {number}")
        made = make_document(rng, rng.randint(300, LONGEST))
        documents.append(
            SourceDocument(f"made {number}", made.text, "cc0-1.0", asked=tuple(made.questions))
        )
    return documents


def prepare_cases(options: argparse.Namespace) -> None:
    """Write the cases of both splits, and for each case what every variant needs."""
    options.folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.folder)
    development = options.folder / "development.jsonl"
    if not development.exists():
        lines = [
            answer_document(bench, document)
            for document in draw_development_documents(options.corpus, bench)
        ]
        development.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    for case in bench.load_cases("development"):
        bench.prepare_case(case)
        print(f"development: {case.name}", flush=True)
    training = options.folder / "train.jsonl"
    if not training.exists():
        lines = []
        for case in read_answered_cases(options.corpus, options.data, bench.tokenizer):
            tokens = make_context(bench.tokenizer, case.text).text_tokens
            if case.questions and tokens <= LONGEST and len(lines) < options.contexts:
                ids = [each[:ANSWER_TOKENS] for each in case.answer_ids]
                lines.append({**asdict(case), "answer_ids": ids})
        training.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        print(f"{len(lines)} training contexts", flush=True)
    cases = bench.load_cases("train")
    for number, case in enumerate(cases, 1):
        bench.prepare_case(case)
        print(f"train {number}/{len(cases)}", flush=True)


@torch.no_grad()
def answer_document(bench: Bench, document: SourceDocument) -> dict:
    """Return a development case, as a JSON object, with the teacher's answers."""
    context = make_context(bench.tokenizer, document.text)
    cache = Eviction.make("snapkv").prepare(bench.model, bench.tokenizer, context).evict(1)
    questions = [DEFAULT_SEPARATOR + question for _, question in document.asked]
    prompts = [
        encode_question(bench.tokenizer, context, question, empty=True)[0] for question in questions
    ]
    samplers = [GreedyUntilLoop(LOOP) for _ in prompts]
    ids = generate_ids(
        bench.model, bench.tokenizer, cache, prompts, ANSWER_TOKENS, samplers=samplers
    )
    print(document.name, flush=True)
    return {
        "name": document.name,
        "text": document.text,
        "questions": questions,
        "answer_ids": [x.tolist() for x in ids],
    }


def run_variants(options: argparse.Namespace) -> None:
    """Train and measure variants, and write each one's result to a file."""
    for name in options.variants:
        if name not in UNTRAINED and name not in VARIANTS:
            known = ", ".join([*UNTRAINED, *VARIANTS])
            raise SystemExit(f"There is no variant {name!r}; choose from {known}.")
    if options.steps <= WARMUP and not set(options.variants) <= set(UNTRAINED):
        raise SystemExit(f"--steps is above {WARMUP}, the steps of the warm-up.")
    bench = Bench(options.folder)
    for name in options.variants:
        stem = name_result(name, options.seed, options.steps)
        path = options.folder / "results" / f"{stem}.json"
        if path.exists():
            if is_current(json.loads(path.read_text("utf-8"))):
                continue
            if name not in UNTRAINED:
                raise SystemExit(
                    f"{path} began with another adapter than ships now; move it away, or choose "
                    "another folder."
                )
        losses = []
        start = time.perf_counter()

        def report(
            step: int, ratio: float, loss: float, name: str = name, losses: list = losses
        ) -> None:
            losses.append((ratio, loss))
            if step % 20 == 19:
                print(
                    f"{name}: step {step + 1}, loss {sum(x for _, x in losses[-20:]) / 20:.4f}",
                    flush=True,
                )

        if name in UNTRAINED:
            variant = Variant(init=UNTRAINED[name])
            restorer = Restorer(bench, variant, 0) if variant.init else None
        else:
            variant = VARIANTS[name]
            restorer = train_variant(bench, variant, options.steps, options.seed, report)
        seconds = time.perf_counter() - start
        measured = bench.measure_divergence(restorer)
        path.parent.mkdir(exist_ok=True)
        if restorer is not None and name not in UNTRAINED:
            restorer.adapter.save_pretrained(path.with_suffix(""))
        result = {
            "variant": name,
            **asdict(variant),
            "steps": options.steps,
            "seed": options.seed,
            "seconds": seconds,
            "init_hash": hash_shipped(variant.init) if variant.init else "",
            "losses": losses,
            "development": measured,
        }
        path.write_text(json.dumps(result), "utf-8")
        means = {
            ratio: sum(row["kl"][f"{ratio:g}"] for row in measured) / len(measured)
            for ratio in RATIOS
        }
        print(
            f"{name}: {seconds:.0f} s, "
            + ", ".join(f"{ratio:g}: {kl:.4f}" for ratio, kl in means.items()),
            flush=True,
        )


def is_current(result: Mapping[str, Any]) -> bool:
    """Return whether a result's training started from the adapter that ships now, or from none.

    Old results that do not have the adapter's hash do not count as current.
    """
    init = result["init"]
    return not init or result.get("init_hash") == hash_shipped(init)


def format_mean(gains: np.ndarray) -> str:
    """Return the mean of gains, with a 95 % bootstrap interval if there are enough of them."""
    gain, low, high = bootstrap_ratio(gains, np.ones(len(gains)))
    if low is None or high is None:
        return f"{gain:+.4f}"
    return f"{gain:+.4f} ({low:+.4f} to {high:+.4f})"


def compare_results(results: list[dict]) -> str:
    """Return a Markdown table of variants: mean divergence at every ratio, and the gain over the
    first.

    Gains are paired by development case, with 95 % bootstrap intervals over the cases.
    """
    lines = [
        "| variant | seed | steps | seconds | "
        + " | ".join(f"KL at {ratio:g} | gain" for ratio in RATIOS)
        + " |"
    ]
    lines.append("|" + "---|" * (4 + 2 * len(RATIOS)))
    first = next((result for result in results if result["variant"] in FIRST_ROWS), results[0])
    expected = {row["name"]: row["kl"] for row in first["development"]}
    for result in results:
        cells = [
            result["variant"],
            str(result["seed"]),
            str(result["steps"]),
            f"{result['seconds']:.0f}",
        ]
        for ratio in RATIOS:
            own = [row["kl"][f"{ratio:g}"] for row in result["development"]]
            gains = [
                expected[row["name"]][f"{ratio:g}"] - row["kl"][f"{ratio:g}"]
                for row in result["development"]
            ]
            cells += [f"{np.mean(own):.4f}", format_mean(np.array(gains))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def print_table(options: argparse.Namespace) -> None:
    """Print the comparison of all variants that are done, in the order of VARIANTS."""
    results = [
        json.loads(path.read_text("utf-8"))
        for path in sorted((options.folder / "results").glob("*.json"))
    ]
    if not results:
        raise SystemExit(f"{options.folder} has no results; run some variants first.")
    order = [*UNTRAINED, *VARIANTS]
    for result in results:
        # Variants of an earlier search that are no longer offered come last.
        if result["variant"] not in order:
            order.append(result["variant"])
    results.sort(
        key=lambda result: (order.index(result["variant"]), result["seed"], result["steps"])
    )
    print(compare_results(results))
    others = [result["variant"] for result in results if not is_current(result)]
    if others:
        print(f"\nBegan with another adapter than ships now: {', '.join(others)}.")


def ship_variant(options: argparse.Namespace) -> None:
    """Put an adapter of the search, which was trained with KVzip only, into the package."""
    bench = Bench(options.folder)
    name = name_result(options.variant, options.seed, options.steps)
    result = json.loads((options.folder / "results" / f"{name}.json").read_text("utf-8"))
    trained_on = {case.text for case in bench.load_cases("train")}
    examples = [
        example
        for folder in options.data
        for example in read_examples(folder, bench.model, bench.tokenizer)
        if example.context in trained_on
    ]
    assert len(examples) == len(trained_on), "every training context is in one of the folders"
    adapter = RestoreAdapter.from_pretrained(bench.model, options.folder / "results" / name)
    own = count_sources(examples)
    variant = VARIANTS[options.variant]
    settings = asdict(variant) | {
        "init": f"smollm2:{variant.init}" if variant.init else "",
        "evictor": "kvzip",
        "ratio_law": "log-uniform",
        "max_new_tokens": ANSWER_TOKENS,
        "seed": options.seed,
        "steps": options.steps,
    }
    adapter.record_training(
        evictor="kvzip",
        prefix_policy="free",
        ratio_range=(variant.ratio_min, variant.ratio_max),
        settings=settings,
        data=own + inherit_data(adapter.card.data or [], own),
        separator=DEFAULT_SEPARATOR,
    )
    adapter.record_results(adapter.card.results or [], options.helps_up_to)
    target = shipped_path("smollm2", "adapters", options.name)
    # The model card of the adapter that is replaced would be taken for one that a person wrote.
    (target / "README.md").unlink(missing_ok=True)
    adapter.save_pretrained(target, dtype=torch.bfloat16)
    lines = ["step,ratio,loss\n"]
    for step, (ratio, loss) in enumerate(result["losses"]):
        lines.append(f"{step},{ratio:.6f},{loss:.6f}\n")
    Path(__file__).with_name(f"{options.name}-loss.csv").write_text("".join(lines), "utf-8")


def name_result(variant: str, seed: int, steps: int) -> str:
    """Return the name, without ending, of a variant's files among the results."""
    return f"{variant}, seed {seed}, {steps} steps"


def main(args: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(required=True)
    first = commands.add_parser("prepare")
    first.add_argument("folder", type=Path)
    first.add_argument("--corpus", type=Path, required=True)
    first.add_argument("--data", type=Path, nargs="+", required=True)
    first.add_argument("--contexts", type=int, default=240, help="To train on, at most.")
    first.set_defaults(call=prepare_cases)
    second = commands.add_parser("run")
    second.add_argument("folder", type=Path)
    second.add_argument("variants", nargs="+")
    second.add_argument("--steps", type=int, default=400)
    second.add_argument("--seed", type=int, default=0)
    second.set_defaults(call=run_variants)
    third = commands.add_parser("table")
    third.add_argument("folder", type=Path)
    third.set_defaults(call=print_table)
    fourth = commands.add_parser("ship")
    fourth.add_argument("folder", type=Path)
    fourth.add_argument("variant")
    fourth.add_argument("name", help="The folder of the shipped adapter: an evictor.")
    fourth.add_argument("--steps", type=int, default=400)
    fourth.add_argument("--seed", type=int, default=0)
    fourth.add_argument("--data", type=Path, nargs="+", required=True)
    fourth.add_argument(
        "--helps-up-to",
        type=float,
        help="The highest measured ratio at which KL on the development passages is not above that "
        "of KVzip alone.",
    )
    fourth.set_defaults(call=ship_variant)
    options = parser.parse_args(args)
    options.call(options)


if __name__ == "__main__":
    run_recipe(main)
