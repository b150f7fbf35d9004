"""Kinds of files other than caches: how a good one is made, read back, and sealed again as an
attacker who knows the format would do.
"""

import hashlib
import io
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import safetensors.torch
import torch
from gguf import GGMLQuantizationType as Precision

from restorekv import CompressedContext, compress, load_model
from restorekv.cli import execute
from restorekv.data.gather import AttemptFile
from restorekv.data.mixture import read_mixture, summarize_sources
from restorekv.data.table import compute_figures
from restorekv.evaluation import results
from restorekv.evaluation.grid import Grid
from restorekv.evaluation.rows import make_rows
from restorekv.evaluation.run import run_grid
from restorekv.evictors import gate_file
from restorekv.evictors.gate_file import Gate, GateCard
from restorekv.generation.chat import Chat
from restorekv.model import gate_kinds, gguf, model_folder
from restorekv.model.identity import fingerprint_model
from restorekv.model.load import load_tokenizer
from restorekv.model.shape import CacheShape
from restorekv.restore import adapter_file
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.use_warnings import warn_of_other_use
from restorekv.seal import digest_tensors, seal_record
from restorekv.serve.store import Store
from restorekv.storage.portable import load_portable
from restorekv.train import checkpoint
from restorekv.train.checkpoint import TrainingRun
from restorekv.train.config import TrainConfig
from restorekv.train.examples import TrainingContext
from restorekv.train.features import collect_features
from restorekv.train.teacher_cache import TeacherCache
from tests.helpers import gguf_world
from tests.helpers.compressing import compress_with
from tests.helpers.models import build_model, build_tokenizer
from tests.hostile.damage import BLANK, seal

TEXT = "The red house belongs to Ada. The code of the blue house is 482. " * 5
CONFIG = TrainConfig(
    restore_tokens=2,
    rank=2,
    steps=4,
    max_new_tokens=4,
    evictor="snapkv",
    targets=("q_proj", "v_proj"),
)
EXAMPLES = [TrainingContext(TEXT, ("Who owns the red house?", "What is the code?"), (None, None))]
MODEL, TOKENIZER = load_model("tiny")


@dataclass(frozen=True)
class Kind:
    """A kind of files in a folder.

    `read` returns everything that a good folder says, as text. `loose` are the files that no
    checksum covers; "*" means all.
    """

    make: Callable[[Path], object]
    read: Callable[[Path], str]
    seal: Callable[[Path], object] = lambda folder: None
    loose: tuple[str, ...] = ()


def numbers(tensors: dict[str, torch.Tensor]) -> str:
    return digest_tensors(tensors)


def random_adapter(seed: int) -> RestoreAdapter:
    adapter = RestoreAdapter.create(MODEL, 2, rank=2, targets=CONFIG.targets, seed=seed)
    with torch.no_grad():
        for parameter in adapter.lora:
            parameter.normal_(generator=torch.Generator().manual_seed(seed))
    return adapter


def make_adapter(folder: Path) -> None:
    adapter = random_adapter(1)
    data = [{"source": "a", "license": "mit", "examples": 1, "contexts": 1}]
    adapter.record_training(
        evictor="snapkv:window=64", ratio_range=(0.1, 0.2), settings=asdict(CONFIG), data=data
    )
    adapter.record_results(
        [{"benchmark": "a", "ratio": 0.1, "base": 1.0, "restored": 2.0, "full": 3.0}]
    )
    adapter.save_pretrained(folder)


def read_adapter(folder: Path) -> str:
    adapter = RestoreAdapter.from_pretrained(MODEL, folder)
    warn_of_other_use(adapter.card, "snapkv:window=64")
    return repr(
        (adapter.identity(), adapter.card, sorted(adapter.lora_config.to_dict().items(), key=str))
    )


def seal_adapter(folder: Path) -> None:
    path = folder / adapter_file.CARD
    try:
        card = json.loads(path.read_text())
        card["sha256"] = {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
            for name in adapter_file.CHECKSUMMED
        }
        path.write_text(json.dumps(seal_record(card)))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        pass  # there is no card to seal


def make_gate(folder: Path) -> None:
    shape, generator = CacheShape.from_model(MODEL), torch.Generator().manual_seed(0)
    layers = [
        {
            "weight": torch.randn(shape.heads, shape.hidden, generator=generator),
            "bias": torch.zeros(shape.heads),
        }
        for _ in range(shape.layers)
    ]
    card = GateCard.for_model(
        MODEL, "kvzap-linear", "kvzip+", settings={"seed": 1}, figures={"loss": 0.5}
    )
    gate_file.write_gate(folder / "gate.safetensors", Gate(layers, card))


def read_gate(folder: Path) -> str:
    gate_file._loaded.clear()
    gate = gate_file.load_gate(MODEL, str(folder / "gate.safetensors"), gate_kinds.KINDS)
    return repr((gate.card, gate.digest))


def seal_files(folder: Path) -> None:
    """Compute the checksums of all sealed files again."""
    for path in [*folder.rglob("*.safetensors"), *folder.rglob("*.rkv")]:
        if path.is_file() and path.stat().st_size < 1 << 26:
            seal_file(path)


def seal_file(path: Path) -> None:
    """Compute the checksum in the metadata of a safetensors file again, if it still is one."""
    try:
        raw = path.read_bytes()
        tensors, metadata = (
            safetensors.torch.load(raw),
            json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]),
        )
        metadata = {**metadata["__metadata__"], "checksum": BLANK}
        path.write_bytes(seal(safetensors.torch.save(tensors, metadata)))
    except Exception:  # what was harmed is no safetensors file any more
        pass


def a_run(seed: int) -> TrainingRun:
    adapter = random_adapter(seed)
    optimizer = torch.optim.AdamW([adapter.embeddings, *adapter.lora], lr=CONFIG.lr)
    return TrainingRun(
        CONFIG,
        adapter,
        optimizer,
        {"model": "m", "rope": {"a": [1, 2.5]}, "stops": [2], "processes": 1},
    )


def make_checkpoint(folder: Path) -> None:
    run = a_run(3)
    for parameter in run.optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    run.optimizer.step()
    checkpoint.save_checkpoint(folder, run, 2)
    (folder / checkpoint.LOG_FILE).write_text(
        checkpoint.HEADER + "0,0.5,0.1,1\n1,0.25,0.1,1\n2,0.1,0.1,1\n"
    )


def read_checkpoint(folder: Path) -> str:
    run = a_run(4)
    step = checkpoint.load_checkpoint(folder, run)
    if step:
        checkpoint.start_log(folder, step)
    states = run.optimizer.state_dict()["state"]
    moments = {
        f"{index}.{name}": value for index, state in states.items() for name, value in state.items()
    }
    return f"{step} {numbers(run.adapter.trainable_state())} {numbers(moments)}"


def read_store(folder: Path) -> str:
    prepared, targets = TeacherCache(
        MODEL, TOKENIZER, EXAMPLES, CONFIG, folder, store_prefill=True
    ).get_context(0)
    tensors = {"scores": prepared.scores}
    for index, layer in enumerate(prepared.full.layers):
        tensors |= {f"keys{index}": layer.keys, f"values{index}": layer.values}
    for index, target in enumerate(targets):
        tensors |= {
            f"ids{index}": target.ids,
            f"hidden{index}": target.hidden,
            f"n{index}": torch.tensor(target.answer_length),
        }
    return numbers(tensors)


def read_features(folder: Path) -> str:
    found = collect_features(MODEL, TOKENIZER, [TEXT], "snapkv", 7, 0, folder, resume=True)
    return numbers({"hidden": found.hidden, "target": found.target})


def make_data(folder: Path) -> None:
    asked = [{"question": "Who owns it?", "answers": ["Ada"]}]
    stories = [
        {"id": f"s{number}", "context": f"{number} {TEXT * 3}", "questions": asked}
        for number in range(3)
    ]
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(story) + "\n" for story in stories))
    novels = folder.with_suffix(".novels")
    novels.mkdir()
    code = execute(
        [
            "data",
            "build",
            "--mixture",
            "passages",
            "--model",
            "tiny",
            "--stories",
            str(source),
            "--novels",
            str(novels),
            "--story-passages",
            "2",
            "--novel-passages",
            "0",
            "--section-passages",
            "0",
            "--out",
            str(folder),
            "--answer-tokens",
            "8",
            "--question-tokens",
            "8",
            "--questions",
            "1",
        ]
    )
    assert code == 0, "the data was not built"


def read_data(folder: Path) -> str:
    contexts, manifest = read_mixture(folder, MODEL, TOKENIZER)
    return repr((contexts, compute_figures(contexts, manifest), summarize_sources(manifest)))


def seal_data(folder: Path) -> None:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        for name, source in manifest["sources"].items():
            source["file"]["sha256"] = hashlib.sha256(
                (folder / f"{name}.parquet").read_bytes()
            ).hexdigest()
        path.write_text(json.dumps(manifest))
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        pass


def make_grid(folder: Path) -> None:
    grid = Grid(("tiny",), [("knorm", None)], ("tiny:count=2,low=60,high=90",), ratios=("0.2",))
    run_grid(grid.list_cells(), folder)


def read_grid(folder: Path) -> str:
    return json.dumps(make_rows(results.load_results(folder)), sort_keys=True)


TEXT_OF_CHAT = TEXT * 2


@cache
def document() -> CompressedContext:
    """Return the document that conversations are about.

    All heads keep the same number of pairs, so that it is portable too.
    """
    options = {"evictor": "snapkv", "adapter": None, "allocation": "per-head"}
    return compress_with(MODEL, TOKENIZER, TEXT_OF_CHAT, ratio=0.5, **options)


def make_chat(folder: Path) -> None:
    chat = document().chat("Be short.")
    chat.ask("Who owns the red house?", 4)
    chat.ask("What is the code?", 4)
    chat.save(folder / "chat.json")


def read_chat(folder: Path) -> str:
    chat = Chat.load(folder / "chat.json", document())
    said = chat.ask("Who?", 1)
    return repr((chat.system, chat.messages, chat.ids(), said))


def make_portable(folder: Path) -> None:
    document().portable().save(folder / "portable.safetensors")


def read_portable(folder: Path) -> str:
    stored = load_portable(folder / "portable.safetensors", MODEL)
    said = stored.ask(MODEL, TOKENIZER, "Who?", 1)
    return repr(
        (
            stored.manifest,
            stored.name,
            stored.context.suffix_text,
            stored.context.suffix_ids.tolist(),
            said,
        )
    )


def make_gguf(folder: Path) -> None:
    gguf_world.write(folder / "model.gguf", build_model("llama"), build_tokenizer(), Precision.F32)


def read_gguf(folder: Path) -> str:
    """Read the header, build the tokenizer and have transformers read the weights, by
    `gguf.convert_file`.
    """
    made = folder.parent / "made"
    try:
        gguf.convert_file(folder / "model.gguf", gguf.load_header(folder / "model.gguf"), made)
        marker = json.loads((made / gguf.MARKER).read_text())
        return json.dumps(marker["files"])
    finally:
        shutil.rmtree(made, ignore_errors=True)


def make_cache(folder: Path) -> None:
    compress(MODEL, TOKENIZER, TEXT, ratio=0.2).save(folder / "cache.rkv")


def open_cache_file(folder: Path) -> str:
    loaded = CompressedContext.load(folder / "cache.rkv", MODEL, TOKENIZER)
    tensors = {
        f"{index}.{n}": x
        for index, y in enumerate(loaded.cache.layers)
        for n, x in enumerate(y.list_tensors())
    }
    said = loaded.ask("Who?", 1)
    return repr((loaded.manifest, loaded.context.suffix_text, numbers(tensors), said))


def make_folder(folder: Path) -> None:
    """Make a model's folder, with the weights in several files that an index names."""
    build_model("llama").save_pretrained(folder, max_shard_size="60KB")
    build_tokenizer().save_pretrained(folder)
    names = {path.name for path in folder.iterdir()}
    assert (
        model_folder.INDEX in names
        and len([name for name in names if name.endswith(".safetensors")]) > 1
    )


def read_folder(folder: Path) -> str:
    """Load the model, and its tokenizer separately."""
    model, tokenizer = load_model(folder)
    alone = load_tokenizer(str(folder))
    ids = [each("The red house belongs to Ada.")["input_ids"] for each in (tokenizer, alone)]
    return repr((fingerprint_model(model), ids, numbers(dict(model.named_parameters()))))


def make_served(folder: Path) -> None:
    """Make a server's store with three uploads, one of them expired, and a cache."""
    store = Store(folder, 1 << 30)
    for number in range(2):
        store.add_upload(f"{number}.txt", "user_data", io.BytesIO(b"text %d" % number))
    store.add_upload("old.txt", "user_data", io.BytesIO(b"old"), -1)
    with store.write_cache_file("cd" * 16, store.list_uploads()[0].sha256) as path:
        path.write_bytes(b"cache")
    store.close()


def read_served(folder: Path) -> str:
    """Open the store, list and read everything, drop what has no room, delete an upload, and close
    it.
    """
    store = Store(folder, 1)
    try:
        uploads = store.list_uploads()
        contents = [store.read_upload(each) for each in uploads]
        store._enforce_quota("")
        deleted = bool(uploads) and store.delete_upload(uploads[-1].id)
        return repr(([(each.name, each.status, each.bytes) for each in uploads], contents, deleted))
    finally:
        store.close()


def make_build(folder: Path) -> None:
    """Make the attempts of an unfinished data build; the last line was cut by a kill."""
    line = json.dumps({"context": ["a", "b"], "attempts": [{"question": "Who?"}]})
    (folder / "parts").mkdir()
    (folder / "parts" / "a.jsonl").write_text(f"{line}\n{line}\n{line[:20]}")


def read_build(folder: Path) -> str:
    return repr(AttemptFile(folder / "parts" / "a.jsonl").done)


def make_moving(folder: Path) -> None:
    """Make an adapter as a writer leaves it that was killed before it moved the files
    into place.
    """
    make_adapter(folder / adapter_file.PENDING)


def read_moving(folder: Path) -> str:
    adapter_file.move_into_place(folder)
    return read_adapter(folder)


def seal_moving(folder: Path) -> None:
    seal_adapter(folder / adapter_file.PENDING)


KINDS = {
    "chat": Kind(make_chat, read_chat, loose=("chat.json",)),
    "portable": Kind(make_portable, read_portable, seal_files),
    "gguf": Kind(make_gguf, read_gguf, loose=("model.gguf",)),
    "adapter": Kind(make_adapter, read_adapter, seal_adapter, (adapter_file.README,)),
    "gate": Kind(make_gate, read_gate, seal_files),
    "checkpoint": Kind(make_checkpoint, read_checkpoint, seal_files),
    "store": Kind(read_store, read_store, seal_files),
    "features": Kind(read_features, read_features, seal_files),
    "data": Kind(make_data, read_data, seal_data, ("manifest.json",)),
    "cache": Kind(make_cache, open_cache_file, seal_files),
    "folder": Kind(make_folder, read_folder, loose=("*",)),
    "served": Kind(make_served, read_served, loose=("*",)),
    "build": Kind(make_build, read_build, loose=("*",)),
    "moving": Kind(make_moving, read_moving, seal_moving, (adapter_file.README,)),
    "grid": Kind(
        make_grid, read_grid, loose=("cell.json", "answers.jsonl", "seconds.jsonl", "summary.json")
    ),
}


def some_file(rng: random.Random, folder: Path) -> Path:
    return rng.choice(
        sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    )
