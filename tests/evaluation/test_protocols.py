"""The protocols: what surrounds contexts and questions, what ends an answer, which settings reach
model and evictor.

KVzip's strings are those of snu-mllab/KVzip (model/template.py, data/wrapper.py), written out here
once more.
"""

import pytest
import torch

from restorekv import tasks
from restorekv.compression.eviction import make_compressor
from restorekv.errors import RestoreKVError
from restorekv.evaluation import protocols, worker
from restorekv.evaluation.run import run_grid
from restorekv.evictors.kvzip import KVzip
from restorekv.evictors.kvzip_plus import KVzipPlus
from restorekv.model.load import load_model
from restorekv.model.prompt import make_context
from restorekv.tasks import Question
from tests.helpers.grid_world import Plain, grid
from tests.helpers.models import build_model

TASK = "Given the context, answer to the following question or request without explanation.\n\n"
LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou are a helpful "
    "assistant<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n" + TASK,
    "\n\n<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
)
QWEN_BEFORE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n" + TASK
)
QWEN25 = QWEN_BEFORE, "<|im_end|>\n<|im_start|>assistant\n"
QWEN3 = QWEN_BEFORE, "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
KVPRESS, KVZIP = protocols.make_protocol("kvpress"), protocols.make_protocol("kvzip")
ASKED = Question("0-0", "task", " who lives in the red house? ", ("seven",), 4)


class Pairs:
    """Every two characters are an id, so that it shows whether two texts were tokenised as one."""

    chat_template, bos_token, model_max_length, added_tokens_decoder = None, "<s>", 10**30, {}

    def __len__(self):
        return 1

    def encode(self, text, add_special_tokens=True, verbose=True):
        assert not add_special_tokens
        return [
            ord(a) * 1000 + ord(b)
            for a, b in zip(text[::2], text[1::2] + " " * (len(text) % 2), strict=True)
        ]


def ids(text):
    return Pairs().encode(text, add_special_tokens=False)


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setitem(tasks.BENCHMARKS, "plain", Plain)
    worker.OPEN_MODELS.clear()


@pytest.fixture
def saved(tmp_path, tiny_tokenizer):
    """A tiny model on disk; `stops` are its EOS ids."""

    def save(name="model", stops=2, family="qwen3"):
        model = build_model(family)
        model.generation_config.eos_token_id = stops
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", LLAMA),
        ("runs/my-llama/", LLAMA),
        ("Qwen/Qwen2.5-7B-Instruct-1M", QWEN25),
        ("Qwen/Qwen3-4B", QWEN3),
        ("/models/qwen3-8b", QWEN3),
        ("org/tuned-Qwen3-8B", QWEN3),
    ],
)
def test_kvzips_own_strings(model, wanted):
    assert KVZIP.get_surroundings(model, Pairs()) == wanted
    told = KVZIP.to_json(model, Pairs())
    assert (told["before"], told["after"]) == wanted and told["name"] == "kvzip"


def test_a_model_of_no_family_is_asked_through_its_own_template(tiny_tokenizer):
    own = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    for name in ("tiny", "org/mistral", "Qwen3-runs/of-another"):
        assert (
            KVZIP.get_surroundings(name, tiny_tokenizer)
            == own
            == KVPRESS.get_surroundings("Qwen/Qwen3-4B", tiny_tokenizer)
        )


def test_kvzip_tokenises_piece_by_piece():
    text = "odd"
    context, cut = KVZIP.make_context("Qwen/Qwen3-4B", Pairs(), text)
    assert context.ids[0].tolist() == ids(QWEN3[0]) + ids(text) and cut == 0
    assert context.prefix_length == len(ids(QWEN3[0]))
    assert context.suffix_ids[0].tolist() == ids(QWEN3[1])
    prompt = KVZIP.make_prompt(Pairs(), context, ASKED)[0].tolist()
    assert prompt == ids("\n\nQ:  who lives in the red house?") + ids(QWEN3[1])
    prefixed = Question("0-0", "task", "who?", ("a",), 4, answer_prefix="The answer")
    pieces = ids("\n\nQ: who?") + ids(QWEN3[1])
    assert KVZIP.make_prompt(Pairs(), context, prefixed)[0].tolist() == pieces + ids("The answer")
    assert pieces != ids("\n\nQ: who?" + QWEN3[1]), "the pieces show"


def test_kvpress_tokenises_question_suffix_and_answer_prefix_as_one():
    context, _ = KVPRESS.make_context("Qwen/Qwen3-4B", Pairs(), "odd")
    assert context.ids[0].tolist() == ids("<s>odd") and context.prefix_length == len(ids("<s>"))
    prefixed = Question("0-0", "task", "who?", ("a",), 4, answer_prefix="It")
    assert KVPRESS.make_prompt(Pairs(), context, prefixed)[0].tolist() == ids("who?\nIt")
    empty = Question("0-0", "task", "", ("a",), 4)
    assert KVPRESS.make_prompt(Pairs(), context, empty)[0].tolist() == ids("\n"), (
        "a context may end with what is asked"
    )


@pytest.mark.parametrize(("protocol", "text"), [(KVPRESS, ""), (KVPRESS, " \n "), (KVZIP, "")])
def test_an_empty_context_is_refused(protocol, text, tiny_tokenizer):
    with pytest.raises(RestoreKVError, match="context is empty"):
        protocol.make_context("Qwen/Qwen3-4B", tiny_tokenizer, text)


@pytest.mark.parametrize("protocol", [KVPRESS, KVZIP])
def test_long_contexts_lose_their_end_and_keep_their_prefix(protocol, tiny_tokenizer):
    text = "the code of the red house is seven; " * 9
    whole, none = protocol.make_context("Qwen/Qwen3-4B", tiny_tokenizer, text)
    shorter, cut = protocol.make_context(
        "Qwen/Qwen3-4B", tiny_tokenizer, text, whole.prefix_length + 7
    )
    assert none == 0 and cut == whole.num_tokens - whole.prefix_length - 7
    assert shorter.prefix_length == whole.prefix_length and shorter.text_tokens == 7
    assert shorter.ids.equal(whole.ids[:, : whole.prefix_length + 7]) and shorter.suffix_ids.equal(
        whole.suffix_ids
    )
    assert protocol.make_context("Qwen/Qwen3-4B", tiny_tokenizer, text, whole.num_tokens)[1] == 0
    with pytest.raises(RestoreKVError, match="no room for a text"):
        protocol.make_context("Qwen/Qwen3-4B", tiny_tokenizer, text, whole.prefix_length)


def test_the_tokenizers_own_limit_cuts_too(tiny_tokenizer):
    tokenizer = Pairs()
    tokenizer.model_max_length = 5
    context, cut = KVPRESS.make_context("m", tokenizer, "twelve chars")
    assert (context.num_tokens, cut) == (5, len(ids("<s>twelve chars")) - 5)


def test_what_is_cut_is_told(saved, tmp_path):
    model = saved()
    tokenizer = load_model(model)[1]
    whole = make_context(
        tokenizer, next(iter(Plain(contexts=1).load_samples(tokenizer, "kvpress"))).context
    )
    result = run_grid(grid(model, "plain:contexts=1", max_context=20), tmp_path / "run")[1]
    line = result.lines[0]
    assert (line["tokens"], line["prefix"]) == (20 - whole.prefix_length, whole.prefix_length)
    assert line["cut"] == whole.num_tokens - 20 > 0


@pytest.mark.parametrize(
    ("spec", "kind", "wanted"),
    [
        ("kvzip", KVzip, (2000, 37, True)),
        ("kvzip+", KVzipPlus, (2000, 37, True)),
        ("kvzip:chunk=512", KVzip, (512, 37, True)),
        ("kvzip:sinks=0", KVzip, (2000, 0, True)),
        ("kvzip+:chunk=512,sinks=1,space=true", KVzipPlus, (512, 1, True)),
    ],
)
def test_kvzips_own_settings_where_the_spec_leaves_them(spec, kind, wanted):
    made = KVZIP.adapt_method(make_compressor(spec), 37).evictor
    assert type(made) is kind and (made.chunk, made.sinks, made.space) == wanted
    assert KVPRESS.adapt_method(make_compressor(spec), 37) == make_compressor(spec)


@pytest.mark.parametrize("spec", ["snapkv", "h2o", "streaming:sinks=4", "contrastkv", "am-fast"])
def test_other_methods_stay_as_they_are(spec):
    made = KVZIP.adapt_method(make_compressor(spec), 37)
    assert KVPRESS.adapt_method(make_compressor(spec), 37) == make_compressor(spec)
    assert made == make_compressor(spec) or isinstance(made.evictor, KVzip)


def test_the_settings_reach_the_evictor(saved, tmp_path, monkeypatch):
    seen, score = [], KVzip.score

    def scoring(self, model, tokenizer, context, full, observer=None):
        seen.append((self.chunk, self.sinks, self.space, context.prefix_length))
        return score(self, model, tokenizer, context, full, observer)

    monkeypatch.setattr(KVzip, "score", scoring)
    model = saved("Qwen3-tiny")
    cells = [grid(model, "plain:contexts=1", protocol=name)[1] for name in ("kvpress", "kvzip")]
    kvpress, kvzip = run_grid(cells, tmp_path / "run")
    short, prefix = (result.lines[0]["prefix"] for result in (kvpress, kvzip))
    # The second method is tried on a short text first, without its protocol's settings.
    trial = (2048, 4, False, short)
    assert prefix > 4
    assert seen == [trial, (2048, 4, False, short), (2000, prefix, True, prefix)]
    assert kvpress.identity["method"] == "kvzip"
    assert kvzip.identity["method"] == f"kvzip:chunk=2000,sinks={prefix},space=true"


def test_yarn_for_qwen3_by_name_under_kvzip_alone(saved, tmp_path):
    """Factor 4 over 32,768 positions (notes/field.md Z.1), whatever folder the model's own one lies
    in.
    """
    places = {"Qwen3-tiny": True, "Qwen3-of/other": False}
    for name, stretched in places.items():
        model = saved(name)
        cells = [
            grid(model, "plain:contexts=1", protocol=protocol)[1]
            for protocol in ("kvpress", "kvzip")
        ]
        own, changed = (result.identity["rope"] for result in run_grid(cells, tmp_path / "run"))
        assert own["rope_type"] == "default"
        wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        assert (wanted.items() <= changed.items()) is stretched and (
            changed == own
        ) is not stretched
    assert (
        KVZIP.get_rope_changes("Qwen/Qwen3-8B")["factor"] == 4
        and KVZIP.get_rope_changes("Qwen/Qwen2.5-7B")
        is KVPRESS.get_rope_changes("Qwen3-8B")
        is None
    )


def greedy(model, prompt, context, length):
    """Ids by the full model alone, one forward pass each."""
    found, row = [], torch.cat([context, prompt], -1)
    for _ in range(length):
        found.append(int(model(row).logits[0, -1].argmax()))
        row = torch.cat([row, torch.tensor([[found[-1]]])], -1)
    return found


@torch.no_grad()
def test_how_answers_end(saved, tmp_path):
    """The full cache's answers where the first id that comes, or the second, is EOS."""
    model, tokenizer = load_model(saved("any"))
    text = next(iter(Plain(contexts=1, questions=1).load_samples(tokenizer, "kvpress")))
    question = text.questions[0]
    context = KVPRESS.make_context("any", tokenizer, text.context)[0]
    said = {
        protocol.name: greedy(
            model, protocol.make_prompt(tokenizer, context, question), context.ids, 4
        )
        for protocol in (KVPRESS, KVZIP)
    }
    for stop, lengths in ((0, (None, 0)), (1, (1, 1)), (None, (4, 3))):
        for protocol, length in zip((KVPRESS, KVZIP), lengths, strict=True):
            ids = said[protocol.name]
            end = ids[stop] if stop is not None else 2
            name = saved(f"{protocol.name}-{stop}", stops=end)
            cells = grid(name, "plain:contexts=1,questions=1", protocol=protocol.name)[:1]
            told = run_grid(cells, tmp_path / name)[0].answers[0].prediction
            if length is None:  # kvpress: the first ends nothing, the next of its kind does
                again = next((turn for turn in range(1, 4) if ids[turn] == end), 4)
                wanted = ids[:again]
            else:
                wanted = ids[:length]
            assert told == tokenizer.decode(wanted, skip_special_tokens=True), (protocol.name, stop)


def test_an_unknown_protocol_is_refused():
    with pytest.raises(RestoreKVError, match="no protocol 'vllm'; use kvpress or kvzip"):
        protocols.make_protocol("vllm")
