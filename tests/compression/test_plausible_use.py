"""What users may plausibly do with the library: use other dtypes and stretched RoPE, keep
everything, append to loaded caches, pass sets.
"""

import asyncio
import gc
import os
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from restorekv import CompressedContext, compress, load_model, pipeline
from restorekv.compression.adapters import ADAPTERS, load_adapter
from restorekv.compression.eviction import make_compressor
from restorekv.errors import BudgetError, CacheFileError, RestoreKVError, RestoreKVWarning
from restorekv.model.names import tiny_path
from restorekv.restore import shipped as shipped_adapters
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.shipped import find_shipped_adapter
from restorekv.restore.use_warnings import warn_of_other_use
from restorekv.storage.portable import load_portable
from tests.helpers.cli_world import cli
from tests.helpers.compressing import compress_with

TEXT = Path("examples/register.txt").read_text()[:1500]
QUESTION = "What is the code of the market?"


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


def small(tiny, **options):
    return compress_with(*tiny, TEXT, **{"ratio": 0.25, "evictor": "snapkv", **options})


def test_at_ratio_1_everything_stays(tiny):
    whole = small(tiny, ratio=1)
    assert (
        whole.kept.all() and whole.manifest.restore_tokens == 0 and whole.manifest.adapter is None
    )
    assert small(tiny, ratio=1, restore_tokens=2).kept.all()
    assert small(tiny, ratio=1, restore_from="evicted").kept.all()
    assert (
        small(tiny, ratio=1, adapter=find_shipped_adapter("tiny", "snapkv")).manifest.restore_tokens
        == 3
    )


def test_auto_restores_at_ratios_of_the_training_alone(tiny):
    """The tiny model's adapters were trained for ratios of up to 0.25; at higher ones there is
    little to restore.
    """
    assert small(tiny).manifest.restore_tokens == 3
    assert small(tiny, ratio="0.251").manifest.adapter is None
    assert small(tiny, ratio=None, tokens_per_head=200).manifest.adapter is None
    shipped = find_shipped_adapter("tiny", "snapkv")
    for asked in {"restore_tokens": 3}, {"restore_from": "evicted"}, {"adapter": shipped}:
        assert small(tiny, ratio=0.5, **asked).manifest.restore_tokens == 3


@pytest.mark.parametrize("how", [{"rope": 4}, {"dtype": "float16"}])
def test_where_the_shipped_adapter_does_not_fit_nothing_is_restored(how):
    model = load_model("tiny", **how)
    with pytest.warns(RestoreKVWarning, match="Nothing is restored"):
        made = small(model)
    assert made.manifest.adapter is None and made.ask(QUESTION, 4)
    if "dtype" in how:
        with pytest.raises(RestoreKVError, match="load it in float32 or bfloat16"):
            small(model, adapter=find_shipped_adapter("tiny", "snapkv"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_commands_load_a_cache_in_its_own_dtype(dtype, tmp_path):
    (text := tmp_path / "a.txt").write_text(TEXT)
    made, grown = tmp_path / "a.rkv", tmp_path / "b.rkv"
    assert (
        cli(
            "compress", text, "--model", "tiny", "--dtype", dtype, "--adapter", "none", "-o", made
        ).code
        == 0
    )
    assert cli("ask", made, QUESTION).code == 0
    assert cli("append", made, text, "-o", grown).code == 0
    assert cli("chat", grown, stdin=b"who?\n").code == 0


def test_another_dtype_is_named_before_another_model(tiny, tmp_path):
    small(tiny).save(tmp_path / "a.rkv")
    with pytest.raises(CacheFileError, match="holds float32; load the model with dtype='float32'"):
        CompressedContext.load(tmp_path / "a.rkv", *load_model("tiny", "float16"))


def test_a_loaded_cache_goes_on_as_its_record_says(tiny, tmp_path):
    own = RestoreAdapter.from_pretrained(tiny[0], find_shipped_adapter("tiny", "snapkv"))
    small(tiny, evictor="knorm", adapter=own).save(tmp_path / "a.rkv")
    loaded = CompressedContext.load(tmp_path / "a.rkv", *tiny)
    with pytest.raises(RestoreKVError, match="not available; pass its folder, or adapter=None"):
        loaded.append(TEXT)
    assert loaded.append(TEXT, adapter=None).manifest.adapter is None
    with pytest.warns(RestoreKVWarning):
        part = small(tiny, restore_tokens=2)
        part.save(tmp_path / "b.rkv")
        again = CompressedContext.load(tmp_path / "b.rkv", *tiny).append(TEXT)
    assert again.manifest.adapter["hash"] == part.manifest.adapter["hash"]
    gated = small(tiny, evictor="fastkvzip:window=0.2", adapter=None)
    gated.save(tmp_path / "c.rkv")
    assert (
        CompressedContext.load(tmp_path / "c.rkv", *tiny).append(TEXT).manifest.evictor
        == gated.manifest.evictor
    )


def test_contexts_share_the_adapter_of_a_folder(tiny, tmp_path):
    how = make_compressor("snapkv")
    first = load_adapter(tiny[0], "auto", how)
    assert load_adapter(tiny[0], "auto", how) is first
    first.save_pretrained(tmp_path / "own")
    own = load_adapter(tiny[0], str(tmp_path / "own"), how)
    os.utime(tmp_path / "own" / "restorekv.json", (1, 1))
    assert load_adapter(tiny[0], str(tmp_path / "own"), how) not in (own, first)
    for number in range(9):
        first.save_pretrained(tmp_path / str(number))
        load_adapter(tiny[0], tmp_path / str(number), how)
    assert len(vars(tiny[0])[ADAPTERS]) == 4


def test_a_model_and_its_adapters_can_go():
    model, tokenizer = load_model("tiny")
    compress(model, tokenizer, TEXT, evictor="snapkv")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_contexts_can_be_compared_and_put_into_sets(tiny):
    one, other = small(tiny), small(tiny)
    assert (
        one != other
        and one in [other, one]
        and len({one, other, one}) == 2
        and len({one.chat(), one.chat()}) == 2
    )


def test_generate_heeds_the_models_own_generation_config(tiny, monkeypatch):
    model, tokenizer = tiny
    small = compress(model, tokenizer, TEXT, ratio=0.5, adapter=None)
    assert model.generation_config.num_beams in (None, 1)
    beams = small.generate("Which code?", max_new_tokens=4, num_beams=2)
    monkeypatch.setattr(model.generation_config, "num_beams", 2)
    assert small.generate("Which code?", max_new_tokens=4) == beams
    monkeypatch.setattr(model.generation_config, "return_dict_in_generate", True)
    assert small.generate("Which code?", max_new_tokens=4) == beams
    monkeypatch.setattr(model.generation_config, "num_return_sequences", 2)
    with pytest.raises(RestoreKVError, match="returns one text"):
        small.generate("Which code?", max_new_tokens=4)


def test_generate_takes_a_generation_config(tiny):
    made = small(tiny)
    whole = made.ask(QUESTION)
    short = made.generate(QUESTION, generation_config=GenerationConfig(max_new_tokens=2))
    assert whole.startswith(short) and short != whole
    beams = made.generate(
        QUESTION, generation_config=GenerationConfig(num_beams=2, max_new_tokens=16)
    )
    assert beams == made.generate(QUESTION, num_beams=2, max_new_tokens=16)
    for option in (
        {"num_return_sequences": 2, "do_sample": True},
        {"return_dict_in_generate": True},
    ):
        with pytest.raises(RestoreKVError, match="generate returns one text"):
            made.generate(QUESTION, **option)


def test_options_that_would_be_ignored_are_refused(tiny):
    for options, message in (
        ({"evictor": "knorm", "restore_tokens": 2}, "restore_tokens needs an adapter"),
        ({"adapter": None, "restore_tokens": 2}, "restore_tokens needs an adapter"),
        ({"streaming_chunk": 64, "offload": True}, "leave out one of them"),
        ({"system": "half \udcff"}, "not Unicode"),
        ({"evictor": "am-fast:instruction=a\nb"}, "one line without commas"),
    ):
        with pytest.raises(RestoreKVError, match=message):
            small(tiny, **options)
    for number in ("abc", float("nan"), 2.5):
        with pytest.raises(BudgetError, match="whole number"):
            compress(*tiny, TEXT, tokens_per_head=number)
    with pytest.raises(RestoreKVError, match="YaRN's factor"):
        load_model("tiny", rope=0)
    with pytest.raises(RestoreKVError, match="There is no device 'None' here"):
        load_model("tiny", device=None)


def test_a_model_may_be_named_by_a_path(tiny):
    assert load_model(tiny_path("model"))[0].config.vocab_size == tiny[0].config.vocab_size


def test_a_portable_cache_answers_in_a_model_of_transformers(tiny, tmp_path):
    made = small(tiny, allocation="per-head", adapter=None)
    made.portable().save(tmp_path / "a.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(tiny_path("model"))
    stored = load_portable(tmp_path / "a.safetensors", plain)
    assert stored.ask(plain, tiny[1], QUESTION, 8) == made.ask(QUESTION, 8)
    assert stored.ask(plain, tiny[1], [QUESTION], 8) == [made.ask(QUESTION, 8)]


def test_a_stop_string_cuts_log_probabilities_too(tiny):
    said = small(tiny).chat().ask(QUESTION, 16, stop="a", details=True, logprobs=1)
    assert len(said.ids) == len(said.logprobs) == len(said.top)


def test_asynchronous_asking_takes_a_limit_and_no_stream(tiny):
    made = small(tiny)
    assert asyncio.run(made.ask_async(QUESTION, 2)) == made.ask(QUESTION, 2)
    with pytest.raises(RestoreKVError, match="stream=True"):
        asyncio.run(made.chat().ask_async(QUESTION, stream=True))


def test_chat_survives_what_is_typed(tmp_path):
    (text := tmp_path / "a.txt").write_text(TEXT)
    made, saved = tmp_path / "a.rkv", tmp_path / "b.rkv"
    assert cli("compress", text, "--model", "tiny", "--evictor", "snapkv", "-o", made).code == 0
    lines = ["/undo ²", "/undo x", "/undo -3", "/save ~nosuchuser/x.json", f"/save {saved}", "who?"]
    result = cli("chat", made, stdin="\n".join(lines).encode())
    assert (
        result.code == 0
        and result.err.count("Give a number of turns") == 3
        and "read " in result.err
    )
    assert cli("ask", saved, "who?").code == 0


def test_a_text_is_not_written_over(tmp_path):
    (text := tmp_path / "a.txt").write_text(TEXT)
    result = cli("compress", text, "--model", "tiny", "-o", text)
    assert (
        result.code == 1
        and "another file of this command" in result.err
        and text.read_text() == TEXT
    )
    assert (
        cli(
            "compress", text, "--model", "tiny", "--evictor", "snapkv", "-o", tmp_path / "a.rkv"
        ).code
        == 0
    )
    assert (
        "another file of this command" in cli("append", tmp_path / "a.rkv", text, "-o", text).err
        and text.read_text() == TEXT
    )


def test_brackets_in_a_setting_are_printed(tmp_path):
    (text := tmp_path / "a.txt").write_text(TEXT)
    result = cli(
        "compress",
        text,
        "--model",
        "tiny",
        "--evictor",
        "am-fast:instruction=Repeat [/all] this",
        "-o",
        tmp_path / "a.rkv",
    )
    assert result.code == 0 and "[/all]" in result.out + result.err


class Crowded(dict):
    """A dict of adapters that, as if other threads pushed them out, is emptied after each write."""

    def __setitem__(self, key: object, value: object) -> None:
        super().__setitem__(key, value)
        self.clear()


def test_an_adapter_that_other_threads_push_out_is_still_returned(tiny, monkeypatch):
    monkeypatch.setitem(vars(tiny[0]), ADAPTERS, Crowded())
    assert load_adapter(tiny[0], "auto", make_compressor("snapkv")).restore_tokens == 3


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """A folder that replaces the one that ships for the tiny model."""
    monkeypatch.setattr(
        shipped_adapters, "shipped_path", lambda name, *parts: tmp_path.joinpath(*parts)
    )
    return tmp_path


def ship_adapter(tiny, folder, evictors, helps_up_to=None, also_for=None):
    adapter = RestoreAdapter.create(tiny[0], 2, rank=1)
    adapter.record_training(
        evictor=evictors, ratio_range=(0.1, 0.6), settings={"evictor": evictors}
    )
    adapter.record_results([], helps_up_to, also_for)
    adapter.save_pretrained(folder)


def test_auto_takes_the_adapter_for_several_evictors_where_none_is_for_one(tiny, shipped):
    ship_adapter(tiny, shipped / "adapters" / "shared", "knorm,snapkv:window=8,kernel=5,h2o")
    for evictor in "knorm", "snapkv:window=8,kernel=5", "h2o":
        assert find_shipped_adapter("tiny", evictor).name == "shared"
    for evictor in "snapkv", "kvzip", "window=8", "":
        assert find_shipped_adapter("tiny", evictor) is None
    assert small(tiny, evictor="knorm").manifest.restore_tokens == 2
    ship_adapter(tiny, shipped / "adapters" / "knorm", "knorm")
    assert find_shipped_adapter("tiny", "knorm").name == "knorm"
    assert find_shipped_adapter("tiny", "h2o").name == "shared"


def test_auto_takes_the_adapter_that_was_measured_with_other_evictors(tiny, shipped):
    """It does so without a warning, and takes no adapter of another allocation, whatever the
    adapter's record says.
    """
    also_for = ["snapkv:window=8,kernel=5", "fastkvzip:gate=0123456789abcdef"]
    ship_adapter(tiny, shipped / "adapters" / "kvzip", "kvzip", also_for=also_for)
    for evictor in "kvzip", "snapkv:window=8,kernel=5", "fastkvzip":
        assert find_shipped_adapter("tiny", evictor).name == "kvzip"
    assert find_shipped_adapter("tiny", "snapkv") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert small(tiny, evictor="snapkv:window=8,kernel=5").manifest.restore_tokens == 2
    loaded = RestoreAdapter.from_pretrained(tiny[0], shipped / "adapters" / "kvzip")
    assert loaded.card.also_for == also_for
    loaded.record_results([])
    assert loaded.card.also_for == also_for
    with pytest.warns(RestoreKVWarning, match="evictor"):
        warn_of_other_use(loaded.card, "fastkvzip:gate=fedcba9876543210")
    warn_of_other_use(loaded.card, "fastkvzip:gate=0123456789abcdef")
    loaded.record_training(evictor="kvzip")
    assert loaded.card.also_for is None


def test_auto_recognizes_a_copy_of_a_model_by_its_weights(tiny, shipped, tmp_path):
    """Users have such a copy if they save a model, or get its files from elsewhere."""
    model, tokenizer = tiny
    ship_adapter(tiny, shipped / "adapters" / "knorm", "knorm")
    model.save_pretrained(tmp_path / "copy")
    copied = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    options = {"ratio": 0.3, "evictor": "knorm"}
    assert compress(copied, tokenizer, TEXT, **options).manifest.restore_tokens == 2
    # Rounded otherwise, or trained a little: restored all the same, with a word.
    with torch.no_grad():
        copied.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    with pytest.warns(RestoreKVWarning, match="made for other weights of tiny"):
        assert compress(copied, tokenizer, TEXT, **options).manifest.restore_tokens == 2
    with torch.no_grad():
        for weight in copied.parameters():
            weight.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    assert compress(copied, tokenizer, TEXT, **options).manifest.adapter is None


def test_auto_restores_nothing_below_the_lowest_ratio_that_helps_an_evictor(tiny, shipped):
    adapter = RestoreAdapter.create(tiny[0], 2, rank=1)
    adapter.record_training(evictor="kvzip", settings={"evictor": "kvzip"})
    adapter.record_results([], 0.5, ["knorm", "keydiff"], {"knorm": 0.3})
    adapter.save_pretrained(shipped / "adapters" / "kvzip")
    options = {"adapter": "auto"}
    restored = {
        (evictor, ratio): small(
            tiny, evictor=evictor, ratio=ratio, **options
        ).manifest.restore_tokens
        for evictor in ("knorm", "keydiff")
        for ratio in ("0.29", "0.3")
    }
    assert restored == {
        ("knorm", "0.29"): 0,
        ("knorm", "0.3"): 2,
        ("keydiff", "0.29"): 2,
        ("keydiff", "0.3"): 2,
    }
    # Whoever names the adapter wants it.
    named = small(tiny, evictor="knorm", ratio="0.2", adapter=shipped / "adapters" / "kvzip")
    assert named.manifest.restore_tokens == 2


def test_an_adapter_of_another_allocation_is_not_taken_for_the_global_ranking(tiny, shipped):
    folder = shipped / "adapters" / "kvzip.per-head"
    adapter = RestoreAdapter.create(tiny[0], 2, rank=1)
    adapter.record_training(evictor="kvzip", allocation="per-head", settings={"evictor": "kvzip"})
    adapter.save_pretrained(folder)
    assert find_shipped_adapter("tiny", "kvzip") is None
    assert find_shipped_adapter("tiny", "kvzip", "per-head") == folder


def test_auto_restores_up_to_the_ratio_at_which_the_adapter_is_known_to_help(tiny, shipped):
    ship_adapter(tiny, shipped / "adapters" / "snapkv", "snapkv")
    assert small(tiny, ratio=0.6).manifest.restore_tokens == 2
    ship_adapter(tiny, shipped / "adapters" / "snapkv", "snapkv", helps_up_to=0.3)
    assert small(tiny, ratio=0.3).manifest.restore_tokens == 2
    assert small(tiny, ratio="0.301").manifest.adapter is None
    named = shipped / "adapters" / "snapkv"
    assert small(tiny, ratio=0.5, adapter=named).manifest.restore_tokens == 2


def test_a_ratio_at_which_a_named_adapter_is_not_known_to_help_is_told_once(tiny, shipped):
    folder = shipped / "adapters" / "kvzip"

    def collect_warnings(text: str = TEXT, **options: object) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compress_with(*tiny, text, **{"adapter": folder, "evictor": "kvzip", **options})
        return [str(each.message) for each in caught]

    ship_adapter(tiny, folder, "kvzip")
    assert collect_warnings(ratio=0.6) == []
    (told,) = collect_warnings(ratio=0.7)
    assert told == (
        "The adapter was trained for ratios up to 0.6, and is used at 0.7; answers may be better "
        "without it (adapter=None)."
    )
    assert collect_warnings(ratio=0.7, adapter="auto") == []
    assert collect_warnings(ratio=0.7, adapter=None) == []

    adapter = RestoreAdapter.from_pretrained(tiny[0], folder)
    adapter.record_results([], 0.3, ["knorm"], {"knorm": 0.2})
    adapter.save_pretrained(folder)
    assert collect_warnings(ratio="0.3") == collect_warnings(ratio=0.1) == []
    (told,) = collect_warnings(ratio=0.5)
    assert "was measured to help up to the ratio 0.3, and is used at 0.5;" in told
    # Whoever asks "auto" for some of its tokens gets them at any ratio.
    assert collect_warnings(ratio=0.5, adapter="auto", restore_tokens=2) == [told]
    # Nothing is restored of a text that is kept whole, since the restore tokens need more room.
    (told,) = collect_warnings("a text", ratio=0.31)
    assert "is kept whole" in told
    (told,) = collect_warnings(ratio=0.1, evictor="knorm")
    assert "was measured to help knorm from the ratio 0.2 on, and is used at 0.1;" in told


def test_another_training_does_not_inherit_up_to_which_ratio_an_adapter_helps(tiny, tmp_path):
    ship_adapter(tiny, tmp_path, "snapkv", helps_up_to=0.3)
    loaded = RestoreAdapter.from_pretrained(tiny[0], tmp_path)
    assert loaded.card.helps_up_to == 0.3
    loaded.record_results([])
    assert loaded.card.helps_up_to == 0.3
    loaded.record_training(evictor="snapkv")
    assert loaded.card.helps_up_to is None


def test_a_wrong_budget_is_refused_before_the_weights_are_read(
    tiny_model, tiny_tokenizer, monkeypatch
):
    def identify(*given):
        raise AssertionError("a hash of all weights takes a while")

    monkeypatch.setattr(pipeline, "identify_model", identify)
    for size in ({"ratio": 1.5}, {"tokens_per_head": 0}, {"ratio": 0.5, "tokens_per_head": 3}):
        with pytest.raises(BudgetError):
            compress(tiny_model, tiny_tokenizer, "a text", **size)
