"""Measure whether KVzip's adapter also restores the caches of other evictors, on development
passages.

    python -m recipes.smollm2.search prepare FOLDER --corpus CORPUS --data DATA [DATA ...]
    python -m recipes.smollm2.other_evictors FOLDER [EVICTOR ...] [--texts 48] [--record]

For every evictor, the divergence from the full cache is measured without an adapter, with KVzip's,
and with the evictor's own if one ships, on the development passages of search.py. What is in FOLDER
is not measured again, unless another adapter has shipped since. `--record` writes into the card of
KVzip's adapter which evictors it serves. Those are the evictors whose own adapter (or none, if none
ships) is at no ratio more than 5 % closer to the full cache, and whose divergence it reduces on
average over the ratios. `auto` then uses it for them.
"""

import json
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.run import make_parser, run_recipe
from recipes.smollm2.search import ANSWER_TOKENS, Bench, Case, hash_shipped
from restorekv.compression.eviction import Eviction
from restorekv.compression.full_cache import ScoredContext
from restorekv.evaluation.stats import bootstrap_ratio
from restorekv.model.names import shipped_path
from restorekv.model.prompt import make_context
from restorekv.restore.adapter import RestoreAdapter
from restorekv.train.examples import TrainingContext
from restorekv.train.loss import compute_hidden_divergence, run_answers
from restorekv.train.teacher import Teacher, TeacherTarget

ADAPTER = "kvzip"
EVICTORS = ("fastkvzip", "kvzip+", "snapkv", "h2o", "contrastkv")
RATIOS = (0.3, 0.1, 0.05)
TOLERANCE = 1.05  # times the divergence with an evictor's own adapter
ALONE = ""
MEASURED = "other-evictors.jsonl"


class Comparison:
    """The divergences stored in a folder, by passage, evictor and adapter, and how to
    measure them.
    """

    def __init__(self, folder: Path) -> None:
        self.bench = Bench(folder)
        self.file = folder / MEASURED
        self.adapters: dict[str, RestoreAdapter] = {}
        self.hashes: dict[str, str] = {}

    def load_rows(self) -> dict[tuple[str, str, str], dict[str, float]]:
        """Return the divergence at every ratio, by passage, evictor and adapter.

        Rows of an adapter that no longer ships are left out, and so are old rows that do not have
        their adapter's hash.
        """
        if not self.file.exists():
            return {}
        rows = {}
        for line in self.file.read_text("utf-8").splitlines():
            row = json.loads(line)
            if row["adapter"] == ALONE or row.get("hash") == self.find_hash(row["adapter"]):
                rows[row["passage"], row["evictor"], row["adapter"]] = row["kl"]
        return rows

    def find_hash(self, name: str) -> str:
        """Return the hash of the adapter that ships under a name."""
        if name not in self.hashes:
            self.hashes[name] = hash_shipped(name)
        return self.hashes[name]

    def load_adapter(self, name: str) -> RestoreAdapter:
        if name not in self.adapters:
            folder = shipped_path("smollm2", "adapters", name)
            self.adapters[name] = RestoreAdapter.from_pretrained(self.bench.model, folder)
        return self.adapters[name]

    @torch.no_grad()
    def measure(self, evictor: str, texts: int) -> None:
        """Measure an evictor alone, with KVzip's adapter, and with its own if one ships."""
        adapters = [ALONE, ADAPTER]
        if shipped_path("smollm2", "adapters", evictor).is_dir():
            adapters.append(evictor)
        done = self.load_rows()
        cases = self.bench.load_cases("development")[:texts]
        for number, case in enumerate(cases, 1):
            missing = [name for name in adapters if (case.name, evictor, name) not in done]
            if not missing:
                continue
            prepared, targets = self.prepare(case, evictor)
            for name in missing:
                restored = prepared
                if name != ALONE:
                    restored = prepared.with_restore_cache(self.load_adapter(name))
                kl = dict(self.measure_ratios(restored, targets))
                row: dict[str, Any] = {"passage": case.name, "evictor": evictor, "adapter": name}
                if name != ALONE:
                    row["hash"] = self.find_hash(name)
                row["kl"] = kl
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            print(f"{evictor}: {number} of {len(cases)} passages", flush=True)

    def prepare(self, case: Case, evictor: str) -> tuple[ScoredContext, list[TeacherTarget]]:
        """Return a passage with the evictor's scores, and the teacher's answers about it."""
        model, tokenizer = self.bench.model, self.bench.tokenizer
        context = make_context(tokenizer, case.text)
        eviction = Eviction.make(evictor, on_small_budget="fewer")
        prepared = eviction.prepare(model, tokenizer, context)
        assert isinstance(prepared, ScoredContext), "the recipe does not stream"
        unknown = (None,) * len(case.questions)
        example = TrainingContext(case.text, case.questions, unknown, case.answer_ids)
        return prepared, Teacher(model, tokenizer, ANSWER_TOKENS).make_targets(prepared, example)

    def measure_ratios(
        self, prepared: ScoredContext, targets: list[TeacherTarget]
    ) -> Iterator[tuple[str, float]]:
        """Yield every ratio with the mean divergence over the answers' tokens."""
        model = self.bench.model
        expected = torch.cat([target.hidden for target in targets])
        ids = [target.ids for target in targets]
        lengths = [target.answer_length for target in targets]
        for ratio in RATIOS:
            output = run_answers(model, prepared.evict(f"{ratio:.6f}"), ids, lengths)
            losses = compute_hidden_divergence(model, expected, output.hidden)
            yield f"{ratio:g}", float(losses.mean())

    def list_served(self, evictors: list[str]) -> dict[str, float]:
        """Print a table, and return the evictors that KVzip's adapter serves, each with the lowest
        ratio at and above which it does no harm.
        """
        rows = self.load_rows()
        print("| evictor | r | passages | alone | its own | KVzip's | gain over its own or alone |")
        print("|---|---|---|---|---|---|---|")
        served = {}
        for evictor in evictors:
            others = [ALONE] + [evictor] * any(key[1:] == (evictor, evictor) for key in rows)
            names = [
                name
                for name in dict.fromkeys(key[0] for key in rows)
                # An interrupted run may have measured only some of a passage's adapters.
                if all((name, evictor, adapter) in rows for adapter in (*others, ADAPTER))
            ]
            left = []  # the share of the evictor's divergence that remains, at every ratio
            serves = True
            for ratio in (f"{each:g}" for each in RATIOS):
                kl = {
                    adapter: np.array([rows[name, evictor, adapter][ratio] for name in names])
                    for adapter in (*others, ADAPTER)
                }
                serves &= kl[ADAPTER].mean() <= TOLERANCE * kl[others[-1]].mean()
                left.append(kl[ADAPTER].mean() / kl[ALONE].mean())
                weights = np.ones(len(names))
                gain, low, high = bootstrap_ratio(kl[others[-1]] - kl[ADAPTER], weights)
                shown = f"{gain:.4f}"
                if low is not None and high is not None:
                    shown += f" ({low:.4f} to {high:.4f})"
                own = f"{kl[evictor].mean():.4f}" if evictor in kl else ""
                cells = [evictor, ratio, str(len(names)), f"{kl[ALONE].mean():.4f}", own]
                print(f"| {' | '.join([*cells, f'{kl[ADAPTER].mean():.4f}', shown])} |")
            # The ratios from the highest down to the last before restoring does harm.
            helpful = list(takewhile(lambda pair: pair[1] <= 1, zip(RATIOS, left, strict=True)))
            if serves and np.mean(left) < 1 and helpful:
                served[evictor] = helpful[-1][0]
        return served

    def record(self, served: dict[str, float]) -> None:
        """Write the evictors into the card of KVzip's adapter."""
        folder = shipped_path("smollm2", "adapters", ADAPTER)
        adapter = self.load_adapter(ADAPTER)
        specs = [Eviction.make(evictor).identity(self.bench.model) for evictor in served]
        # The others are helped even at the lowest measured ratio, so they need no limit.
        limits = {evictor: ratio for evictor, ratio in served.items() if ratio > RATIOS[-1]}
        adapter.record_results(adapter.card.results or [], also_for=specs, helps_from=limits)
        # An existing README would be taken for one that a person wrote, and kept.
        (folder / "README.md").unlink(missing_ok=True)
        adapter.save_pretrained(folder, dtype=torch.bfloat16)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("evictors", nargs="*", default=EVICTORS)
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    comparison = Comparison(options.folder)
    for evictor in options.evictors:
        comparison.measure(evictor, options.texts)
    served = comparison.list_served(list(options.evictors))
    print(f"KVzip's adapter serves: {', '.join(served) or 'none'}")
    if options.record:
        comparison.record(served)


if __name__ == "__main__":
    run_recipe(main)
