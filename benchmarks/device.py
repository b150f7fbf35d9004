"""`python -m benchmarks device`: a GPU compared with the CPU, and what the GPU's own code paths
save.

agreement   The tiny model in float32 on both: the same texts compressed by every method, with every
            `kv_dtype` and allocation, offloaded and appended to. It counts the pairs that both
            keep or both evict, and the answers that are the same.
modes       A model of random bfloat16 weights in the shape of Qwen3-0.6B, with the tiny model's
            vocabulary, compresses T tokens with KVzip: seconds, and the most memory that the device
            held above the weights. With a full cache in the device's memory and with one in pinned
            host memory (offload), the second compression is timed, after a warm-up; streaming is
            timed once, because it takes the longest.
steps       Milliseconds of a decode step over that model's small cache, in answers of 128 tokens:
            steps launched one by one, and a CUDA graph, its capture included.
families    Agreement as above, of models of random weights with windows, sinks, two kinds of RoPE
            or layers without RoPE, restored by an untrained adapter; answers are longer than the
            windows.
training    Ten steps of training on the tiny model: losses on the CPU and the device in float32,
            and on the device in bfloat16.
"""

import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.agreement import count_agreement
from benchmarks.compress_cost import measure_peak
from benchmarks.device_families import compare_families
from benchmarks.workload import SHAPE, describe_machine, save_model
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import COMPRESSORS
from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError
from restorekv.evictors import EVICTORS
from restorekv.evictors.kvpress_bridge import FromKVPress
from restorekv.generation.decoding import generate_ids
from restorekv.model.attention.self_tests import synchronize_device
from restorekv.model.load import load_model, parse_device
from restorekv.pipeline import compress
from restorekv.tiny.suite import draw_documents
from restorekv.tiny.world import WorldDocument
from restorekv.train.config import TrainConfig
from restorekv.train.examples import make_tiny_examples
from restorekv.train.loop import train_adapter
from restorekv.train.run_folder import read_losses

# All but kvpress's, which needs another package.
METHODS = tuple(name for name in {**EVICTORS, **COMPRESSORS} if name != FromKVPress.name)
SETTINGS = {
    "int8 numbers": CompressionConfig(kv_dtype="int8"),
    "fp8 numbers": CompressionConfig(kv_dtype="fp8"),
    "per-layer budgets": CompressionConfig(allocation="per-layer"),
    "per-head budgets": CompressionConfig(allocation="per-head"),
    "adakv budgets": CompressionConfig(allocation="adakv"),
    "offload": CompressionConfig(offload=True),
}
PART = 2048  # tokens streamed at a time
SEED = 991  # of the texts of the tiny world
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """The options of `device`.

    `texts` is how many texts of the tiny world are compared on both devices. The others are of the
    random model: it has `layers` layers, compresses `tokens` tokens to `ratio`, and gives answers
    of `answer` tokens in batches of each size in `batches`.
    """

    device: str = "cuda"
    texts: int = 4
    tokens: int = 32768
    layers: int = 28
    ratio: float = 0.05
    answer: int = 128
    batches: Sequence[int] = (1, 8)
    training_steps: int = 10

    def __post_init__(self) -> None:
        counts = (self.texts, self.tokens, self.layers, self.answer, self.training_steps)
        if min(*counts, *self.batches) < 1:
            raise RestoreKVError("Measure at least 1 of everything.")


def run_device(options: Options, tell: Tell = lambda what: None) -> dict:
    """Compare and measure everything; raise RestoreKVError if the device does not exist."""
    device = parse_device(options.device)
    result = {
        "machine": {**describe_machine(torch.get_num_threads()), "cuda": torch.version.cuda},
        "options": asdict(options),
    }
    result["agreement"] = compare_with_cpu(options, tell)
    result["families"] = compare_families(options.device, options.texts, SEED, tell)
    tell("a model in the shape of Qwen3-0.6B")
    _, tokenizer = load_model("tiny")
    # A small vocabulary: what is measured does not depend on it.
    shape = {"num_hidden_layers": options.layers, "vocab_size": len(tokenizer) + 64}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), SHAPE | shape, seed=0)
        tokenizer.save_pretrained(folder)
        model, tokenizer = load_model(folder, device=device, dtype="bfloat16")
    result["modes"] = measure_modes(model, tokenizer, options, tell)
    result["steps"] = measure_steps(model, tokenizer, options, tell)
    del model
    result["training"] = compare_training(options, tell)
    return result


def compare_with_cpu(options: Options, tell: Tell) -> list[dict]:
    """Return how many pairs and answers are the same on both devices, for every method
    and setting.
    """
    on_cpu, tokenizer = load_model("tiny")
    on_device, _ = load_model("tiny", device=options.device)
    documents = list(draw_documents(tokenizer, options.texts, f"restore {SEED}", SEED, 700, 1200))
    cases = [(method, method, CompressionConfig()) for method in METHODS]
    cases += [(f"kvzip, {name}", "kvzip", config) for name, config in SETTINGS.items()]
    rows = []
    for name, method, config in cases:
        tell(name)

        def make_small(
            model: PreTrainedModel,
            document: WorldDocument,
            method: str = method,
            config: CompressionConfig = config,
        ) -> CompressedContext:
            return compress(
                model, tokenizer, document.text, ratio=0.1, evictor=method, config=config
            )

        rows.append({"what": name, **count_agreement(on_cpu, on_device, documents, make_small)})
    tell("append")

    def make_longer(model: PreTrainedModel, document: WorldDocument) -> CompressedContext:
        small = compress(model, tokenizer, document.text, ratio=0.1)
        return small.append("\nThe code of the harbor is 12.")

    rows.append(
        {"what": "kvzip, appended to", **count_agreement(on_cpu, on_device, documents, make_longer)}
    )
    tell("the same bits")
    digests = {
        hash_cache(compress(on_device, tokenizer, documents[0].text, ratio=0.1)) for _ in range(3)
    }
    rows.append({"what": "different caches of one text in three runs", "caches": len(digests)})
    return rows


def hash_cache(small: CompressedContext) -> str:
    """Return a hash of everything that a cache's full-attention layers hold."""
    digest = hashlib.sha256()
    for layer in small.cache.full_attention:
        for tensor in layer.list_tensors():
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def draw_ids(tokenizer: Tokenizer, count: int, seed: int) -> torch.Tensor:
    """Return ids (count,) of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, len(tokenizer), (count,), generator=generator)


def measure_modes(
    model: PreTrainedModel, tokenizer: Tokenizer, options: Options, tell: Tell
) -> list[dict]:
    """Return seconds and peak memory of every way to compress the same text."""
    ids = draw_ids(tokenizer, options.tokens, seed=3)
    part = min(PART, options.tokens // 2)
    modes = {
        "plain": (CompressionConfig(), 2),
        "offload": (CompressionConfig(offload=True), 2),
        "streaming": (CompressionConfig(streaming_chunk=part), 1),
    }
    rows = []
    expected = None
    small = None
    row: dict = {}
    for mode, (config, times) in modes.items():
        tell(f"{options.tokens:,} tokens, {mode}")
        for _ in range(times):
            row = {"mode": mode, "warm-ups": times - 1}
            with measure_peak(model.device, row):
                start = time.perf_counter()
                small = compress(
                    model, tokenizer, ids, ratio=options.ratio, adapter=None, config=config
                )
                synchronize_device(model.device)
                row["seconds"] = time.perf_counter() - start
        assert small is not None, "every mode is measured"
        if mode == "plain":
            expected = small.kept
        elif mode == "offload":
            assert expected is not None, "plain is the first mode"
            row["keeps what plain keeps"] = torch.equal(small.kept, expected)
        rows.append(row)
    return rows


def measure_steps(
    model: PreTrainedModel, tokenizer: Tokenizer, options: Options, tell: Tell
) -> list[dict]:
    """Return the milliseconds of a decode step for each batch size, with and without a
    CUDA graph.
    """
    ids = draw_ids(tokenizer, options.tokens, seed=3)
    small = compress(model, tokenizer, ids, ratio=options.ratio, adapter=None)
    rows = []
    for batch in options.batches:
        prompts = [draw_ids(tokenizer, 12, seed) for seed in range(batch)]
        answers = {}
        written: list[Tensor] = []
        seconds = 0.0
        for graph in (False, True):
            tell(f"{batch} answers at a time, {'a graph' if graph else 'step by step'}")
            # The first answers are a warm-up.
            for _ in range(2):
                synchronize_device(model.device)
                start = time.perf_counter()
                written = generate_ids(
                    model, tokenizer, small.cache, prompts, options.answer, graph=graph
                )
                synchronize_device(model.device)
                seconds = time.perf_counter() - start
            answers[graph] = [each.tolist() for each in written]
            steps = max(len(each) for each in written)
            rows.append({"batch": batch, "graph": graph, "milliseconds": 1000 * seconds / steps})
        rows[-1]["same tokens"] = answers[True] == answers[False]
    return rows


def compare_training(options: Options, tell: Tell) -> list[dict]:
    """Return the losses of a short training on the CPU and on the device."""
    rows = []
    runs = (("cpu", "float32"), (options.device, "float32"), (options.device, "bfloat16"))
    for device, dtype in runs:
        tell(f"training on {device} in {dtype}")
        model, tokenizer = load_model("tiny", device=device, dtype=dtype)
        examples = make_tiny_examples(tokenizer, 12, 5, 512, 700)
        config = TrainConfig(
            steps=options.training_steps,
            restore_tokens=4,
            warmup=2,
            draws=2,
            max_new_tokens=16,
            lr=1e-3,
        )
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            train_adapter(model, tokenizer, examples, config, run)
            losses = [round(loss, 5) for loss in read_losses(run)]
        rows.append({"device": device, "dtype": dtype, "losses": losses})
    return rows


def format_agreement(row: dict) -> str:
    """Return a Markdown row with how many pairs and answers are the same on both devices."""
    pairs = f"{row['pairs equal']:,} of {row['pairs']:,}"
    answers = f"{row['answers equal']} of {row['answers']}"
    return f"| {row['what']} | {pairs} | {answers} |"


def format_tables(result: dict) -> str:
    """Return everything as Markdown."""
    machine = result["machine"]
    options = result["options"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    lines = [
        f"{machine['date']}, {machine.get('device', machine['processor'])}, {versions}, "
        f"CUDA {machine['cuda']}; compared is {options['device']}.",
        "",
        f"The tiny model in float32, {options['texts']} texts, r = 0.1, beside the CPU.",
        "",
        "| what | pairs kept or evicted alike | answers alike |",
        "|---|---|---|",
    ]
    for row in result["agreement"]:
        if "caches" in row:
            lines.append(f"| {row['what']} | {row['caches']} | |")
            continue
        lines.append(format_agreement(row))
    if "families" in result:  # older results do not have them
        lines += [
            "",
            "Models of random weights in float32, KVzip, r = 0.2, beside the CPU.",
            "",
            "| family | pairs kept or evicted alike | answers alike |",
            "|---|---|---|",
        ]
        lines += [format_agreement(row) for row in result["families"]]
    lines += [
        "",
        f"Random bfloat16 weights in the shape of Qwen3-0.6B, {options['layers']} layers, "
        f"{options['tokens']:,} tokens, KVzip, r = {options['ratio']:g}.",
        "",
        "| mode | seconds | most memory above the weights |",
        "|---|---|---|",
    ]
    for row in result["modes"]:
        peak = f"{row['peak'] / 2**20:,.0f} MiB"
        lines.append(f"| {row['mode']} | {row['seconds']:.1f} | {peak} |")
    lines += [
        "",
        "| answers at a time | step by step | a graph | same tokens |",
        "|---|---|---|---|",
    ]
    plain, graphs = result["steps"][::2], result["steps"][1::2]
    for one, other in zip(plain, graphs, strict=True):
        same = "yes" if other["same tokens"] else "no"
        lines.append(
            f"| {one['batch']} | {one['milliseconds']:.1f} ms | {other['milliseconds']:.1f} ms "
            f"| {same} |"
        )
    lines += ["", "| training on | losses |", "|---|---|"]
    for row in result["training"]:
        losses = " ".join(f"{loss:.5f}" for loss in row["losses"])
        lines.append(f"| {row['device']}, {row['dtype']} | {losses} |")
    return "\n".join(lines)
