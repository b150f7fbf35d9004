"""Every decoder class is refused with a sentence, or answers as transformers does beyond every
length it mentions.
"""

import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from peft import LoHaConfig, LoraConfig, PromptTuningConfig, get_peft_model
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM, MistralConfig

from restorekv import CompressionConfig, compress, load_model
from restorekv.cli import execute
from restorekv.compression.eviction import Eviction
from restorekv.errors import ModelError, RestoreKVError
from restorekv.generation.decoding import generate_ids
from restorekv.model import probe, support
from restorekv.model.cache_argument import find_cache
from restorekv.model.position_limits import count_usable_positions
from restorekv.model.prompt import Context
from restorekv.model.rope import shift_keys
from restorekv.model.shape import CacheShape, compute_logits, get_backbone
from restorekv.restore.adapter import RestoreAdapter
from restorekv.train.loop import train_adapter
from tests import families
from tests.helpers import decoders, exactness
from tests.helpers.models import build_model, build_tokenizer
from tests.helpers.training import CONFIG, EXAMPLES

PAGE = Path(__file__).resolve().parents[2] / "paper" / "results" / "families.md"
# Every class with a window that its config names, and one class of every other way of computing.
SAMPLE = (
    "mistral",
    "mixtral",
    "phi3",
    "phimoe",
    "starcoder2",
    "ministral3",
    "moshi",
    "gemma3_text",
    "cohere2",
    "olmo3",
    "llama4_text",
    "exaone4",
    "qwen3",
    "smollm3",
    "glm",
    "granite",
    "gemma2",
    "gpt_oss",
    "gpt2",
    "bloom",
    "falcon",
    "gpt_neox",
    "opt",
    "deepseek_v3",
    "mamba",
    "diffllama",
    "mimo_v2_flash",
    "gemma4_text",
    "qwen3_next",
)
ROPES = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 40},
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": 40,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "dynamic": {"factor": 4.0},
    "longrope": {
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "factor": 2.0,
        "original_max_position_embeddings": 56,
    },
}
LIMITS = {"dynamic": decoders.POSITIONS - 1, "longrope": 56}  # where keys that are cached change


def rows_of_page():
    """The page's version of transformers and its rows, by model type."""
    text = PAGE.read_text()
    version = re.search(r"transformers (\d+\.\d+\.\d+): \d+ ", text)[1]
    rows = {
        line.split("`")[1]: line
        for line in text.splitlines()
        if re.match(r"\| `[\w-]+` \| \w+ \| ", line)
    }
    return version, rows


def check_family(kind):
    row, problems = families.judge(kind)
    assert not problems
    version, rows = rows_of_page()
    if transformers.__version__ == version:
        assert families.table([row]).splitlines()[-1] == rows[kind]
    return row


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SAMPLE)
def test_a_class_is_right_or_refused(kind):
    if kind not in decoders.causal_types():
        pytest.skip("this transformers does not have it")
    check_family(kind)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(set(decoders.causal_types()) - set(SAMPLE)))
def test_every_other_class_is_right_or_refused(kind):
    check_family(kind)


def test_the_page_has_every_class_of_its_version():
    version, rows = rows_of_page()
    if transformers.__version__ != version:
        pytest.skip(f"the page is about transformers {version}")
    assert sorted(rows) == decoders.causal_types()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ROPES)
def test_kinds_of_rope(kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    model = decoders.build("llama", rope_parameters=rope)
    if kind == "dynamic" and is_refused(model):
        # Transformers 5.2 keeps the changed frequencies for texts that are as short as before.
        return
    assert support.get_support(model).positions == LIMITS.get(kind, support.UNLIMITED)
    outcome, why, problems = families.judge_model(model)
    assert not problems
    assert outcome == (families.WINDOWED if kind in LIMITS else families.USED)
    assert ("RoPE changes the keys" in why) == (kind in LIMITS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", LIMITS)
def test_no_scoring_pass_changes_how_a_model_rotates(kind):
    """Such a pass would score with other keys, and answers of other threads would be rotated anew
    meanwhile.
    """
    model = decoders.build(
        "llama", rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    )
    if kind == "dynamic" and is_refused(model):
        return
    tokenizer = build_tokenizer()
    ids = torch.randint(3, 290, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    frequencies = model.model.rotary_emb.inv_freq.clone()
    for evictor in ("kvzip", "kvzip+", "contrastkv"):
        with pytest.raises(ModelError, match=r"reads it again up to position .* such as snapkv"):
            compress(model, tokenizer, ids, adapter=None, evictor=evictor, ratio=0.5)
    small = compress(model, tokenizer, ids, adapter=None, evictor="snapkv:window=8", ratio=0.5)
    small.ask("what?", max_new_tokens=2)
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


def is_refused(model):
    try:
        support.get_support(model)
    except ModelError as error:
        assert "rotates keys in a way that depends on what follows them" in str(error)
        return True
    return False


def with_eager(monkeypatch, change):
    """A Llama whose eager attention is changed, as in a class of its own."""
    module = sys.modules["transformers.models.llama.modeling_llama"]
    monkeypatch.setattr(module, "eager_attention_forward", change(module.eager_attention_forward))
    monkeypatch.setattr(support, "_support_by_key", {})
    return decoders.build("llama")


def test_sinks_that_only_the_class_knows_are_seen(monkeypatch):
    def change(own):
        def with_sink(module, query, key, value, mask, **options):
            output, weights = own(module, query, key, value, mask, **options)
            return output * 0.9, weights  # a sink takes a tenth

        return with_sink

    with pytest.raises(
        ModelError, match="in a different way, such as with a different cap or sink"
    ):
        support.get_support(with_eager(monkeypatch, change))


def test_latent_attention_that_caches_keys_of_every_head_is_refused(monkeypatch):
    """As the classes of older versions of transformers do."""
    monkeypatch.setattr(probe, "install_latent_attention", lambda model: None)
    monkeypatch.setattr(probe.attention, "PROJECTIONS", {})
    monkeypatch.setattr(support, "_support_by_key", {})
    with pytest.raises(ModelError, match=r"use transformers 5\.24 or later"):
        support.get_support(decoders.build("deepseek_v3"))


def test_a_class_that_breaks_over_a_ragged_layer_gets_a_sentence(monkeypatch):
    module = sys.modules["transformers.models.llama.modeling_llama"]
    monkeypatch.setattr(support, "_support_by_key", {})
    own = module.LlamaAttention.forward

    def forward(self, hidden_states, **options):
        cache = find_cache(options)
        if cache is not None and cache.get_seq_length(self.layer_idx):
            cache.layers[self.layer_idx].keys.no_such_thing  # noqa: B018
        return own(self, hidden_states, **options)

    monkeypatch.setattr(module.LlamaAttention, "forward", forward)
    with pytest.raises(ModelError, match=r"does not run over a compressed cache.*no_such_thing"):
        support.get_support(decoders.build("llama"))


@pytest.mark.parametrize("lack", [MemoryError, torch.OutOfMemoryError])
def test_a_lack_of_memory_is_not_the_model_s_fault(monkeypatch, lack):
    module = sys.modules["transformers.models.llama.modeling_llama"]
    monkeypatch.setattr(support, "_support_by_key", {})

    def forward(self, *args, **options):
        raise lack("no memory is left")

    monkeypatch.setattr(module.LlamaAttention, "forward", forward)
    with pytest.raises(lack):
        support.get_support(decoders.build("llama"))


def test_gradient_checkpointing_in_training_mode_is_refused(tiny_tokenizer, tmp_path):
    """With gradients, transformers passes no cache on then: a student would read no context."""
    model = build_model("llama").train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ModelError, match=r"gradient checkpointing.*call model\.eval\(\) first"):
        train_adapter(model, tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    # In evaluation mode it changes nothing.
    model.eval()
    compress(model, tiny_tokenizer, "The house is red. " * 9, ratio=0.5, adapter=None)
    train_adapter(model, tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "run")


def break_weights(model):
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(torch.nan)


def break_head(model):
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.inf)


def break_hook(model):
    model.model.register_forward_hook(lambda *_: 1 / 0)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (break_weights, r"not finite in float32: its weights are damaged or too large"),
        (break_head, r"not finite in float32: its weights are damaged or too large"),
        (break_hook, r"does not run over a compressed cache.*division by zero"),
    ],
)
def test_a_damaged_model_says_nothing_of_its_class(monkeypatch, damage, why):
    """A second one is loaded after the first was refused, perhaps in another dtype."""
    monkeypatch.setattr(support, "_support_by_key", {})
    model = decoders.build("llama")
    damage(model)
    for _ in range(2):
        with pytest.raises(ModelError, match=why):
            support.get_support(model)
    support.get_support(decoders.build("llama"))


def test_a_model_that_returns_tuples_is_refused(tiny_tokenizer):
    model = build_model("llama", return_dict=False)
    with pytest.raises(ModelError, match=r"set model\.config\.return_dict = True\."):
        compress(model, tiny_tokenizer, "The house is red. " * 9, ratio=0.5)
    model.config.return_dict = True
    compress(model, tiny_tokenizer, "The house is red. " * 9, ratio=0.5, adapter=None)


def test_a_default_device_besides_the_cpu_is_refused(tiny_tokenizer):
    """Random numbers of the CPU's generators could not be made there. Here "meta" stands for it."""
    model = build_model("llama")
    refusal = r"default device is 'meta'.*leave the default at 'cpu'.*model\.to\('meta'\)\."
    with torch.device("meta"):
        for use in (
            lambda: compress(model, tiny_tokenizer, "The house is red. " * 9, ratio=0.5),
            lambda: support.prepare_model(model),
        ):
            with pytest.raises(ModelError, match=refusal):
                use()
    support.prepare_model(model)


def test_a_model_with_offloaded_weights_is_refused(tiny_tokenizer, tmp_path):
    """Nothing could be sampled of them to tell the model from others."""
    text = "The house is red. " * 9
    small = compress(build_model("llama"), tiny_tokenizer, text, ratio=0.5, adapter=None)
    refusal = r"weights .* in memory \(.*'meta'.*load the model on devices with room for all of it"
    for offload in (cpu_offload, partial(disk_offload, offload_dir=tmp_path)):
        model = build_model("llama")
        offload(model, execution_device=torch.device("cpu"))
        with pytest.raises(ModelError, match=refusal):
            compress(model, tiny_tokenizer, text, ratio=0.5)
        with pytest.raises(ModelError, match=refusal):
            RestoreAdapter.create(model, 2)
    cpu_offload(small.model, execution_device=torch.device("cpu"))
    with pytest.raises(ModelError, match=refusal):
        small.ask("what?")


def test_a_model_with_a_learned_prompt_is_refused(tiny_tokenizer):
    """Its prompt would be in no cache, and each question would be read without it."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(build_model("llama"), config).eval()
    with pytest.raises(ModelError, match=r"learned prompt.*pass .*model\.get_base_model\(\)\."):
        compress(model, tiny_tokenizer, "The house is red. " * 9, ratio=0.5)
    base = model.get_base_model()
    compress(base, tiny_tokenizer, "The house is red. " * 9, ratio=0.5, adapter=None)


def test_an_activated_lora_is_refused(tiny_tokenizer):
    """It would be off for every token of an answer but the first."""
    options = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    config = LoraConfig(r=2, alora_invocation_tokens=[7], **options)
    model = get_peft_model(build_model("llama"), config).eval()
    with pytest.raises(ModelError, match=r"activated LoRA.*merge a plain LoRA, or pass"):
        compress(model, tiny_tokenizer, "The house is red. " * 9, ratio=0.5)


def test_a_model_in_training_mode_is_refused_if_that_changes_its_passes(tiny_tokenizer):
    """Trainers leave models in that mode."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        attention_dropout=0.2,
    )
    model = LlamaForCausalLM(config).train()
    options = {"ratio": 0.5, "evictor": "knorm"}
    for _ in range(2):  # refused first, then after it was known
        with pytest.raises(ModelError, match=r"training mode.*call model\.eval\(\) first"):
            compress(model, tiny_tokenizer, "The house is red. " * 9, adapter=None, **options)
        model.eval()
        compress(model, tiny_tokenizer, "The house is red. " * 9, adapter=None, **options)
        model.train()
    # An adapter that is made meanwhile reads the text in evaluation mode all the same.
    adapter = RestoreAdapter.create(model, 2)
    model.eval()
    small = [
        compress(model, tiny_tokenizer, "The house is red. " * 9, adapter=adapter, **options)
        for _ in range(2)
    ]
    keys = [each.cache.full_attention[1].restore_keys for each in small]
    assert keys[0].equal(keys[1])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("starcoder2", {"embedding_dropout": 0.5}),
        ("seed_oss", {"residual_dropout": 0.5}),
        ("mixtral", {"router_jitter_noise": 0.5}),
        ("phimoe", {"input_jitter_noise": 0.5, "router_jitter_noise": 0.0}),
    ],
)
def test_dropout_and_noise_that_are_no_modules_are_refused_in_training_mode(
    kind, settings, tiny_tokenizer
):
    """They once changed answers at random, or had the class refused in evaluation mode too."""
    model = decoders.build(
        kind, sliding_window=None, max_position_embeddings=4096, **settings
    ).train()
    options = {"ratio": 0.5, "evictor": "knorm", "adapter": None}
    for _ in range(2):  # refused first, then after it was known
        with pytest.raises(ModelError, match=r"training mode.*call model\.eval\(\) first"):
            compress(model, tiny_tokenizer, "The house is red. " * 9, **options)
        model.eval()
        compress(model, tiny_tokenizer, "The house is red. " * 9, **options)
        model.train()


def test_dropout_of_whole_ranks_of_an_adapter_is_refused_in_training_mode(tiny_tokenizer):
    config = LoHaConfig(r=2, rank_dropout=0.5, target_modules=["q_proj"], init_weights=False)
    model = get_peft_model(build_model("llama"), config).train()
    with pytest.raises(ModelError, match=r"training mode.*call model\.eval\(\) first"):
        compress(model, tiny_tokenizer, "The house is red. " * 9, ratio=0.5)


def test_a_model_is_asked_once(monkeypatch):
    monkeypatch.setattr(support, "_support_by_key", {})
    probes = []
    own = support.probe_model
    monkeypatch.setattr(support, "probe_model", lambda model: probes.append(model) or own(model))
    for seed in range(3):
        support.get_support(decoders.build("llama", seed))
    assert len(probes) == 1
    support.get_support(decoders.build("llama", num_hidden_layers=2))
    assert len(probes) == 2
    for _ in range(2):
        with pytest.raises(ModelError, match="bias"):
            support.get_support(decoders.build("doge"))
    assert len(probes) == 3


WINDOW = 300


@pytest.fixture(scope="module")
def mistral():
    """A Mistral with a window of 300 tokens, and its tokenizer."""
    return decoders.build(
        "mistral", sliding_window=WINDOW, max_position_embeddings=4096
    ), build_tokenizer()


def test_the_window_bounds_whatever_a_query_would_see(mistral):
    model, tokenizer = mistral
    assert count_usable_positions(model) == WINDOW
    ids = exactness.random_ids(400)[0].tolist()
    refusal = r"400 tokens, .* because every layer sees at most 300 positions, .*on_long_text='cut'"
    with pytest.raises(RestoreKVError, match=refusal):
        compress(model, tokenizer, ids, adapter=None)
    cut = compress(
        model,
        tokenizer,
        ids,
        adapter=None,
        config=CompressionConfig(on_long_text="cut"),
        evictor="random",
    )
    assert cut.context.num_tokens < WINDOW and cut.manifest.cut
    small = compress(model, tokenizer, ids[:150], adapter=None, evictor="random", ratio=0.5)
    beyond = (
        "needs .* positions, and in MistralForCausalLM every layer sees at most 300 positions, "
    )
    with pytest.raises(RestoreKVError, match=f"longest answer allowed {beyond}"):
        small.ask("what?")  # 128 tokens unless told otherwise
    assert isinstance(small.ask("what?", max_new_tokens=8), str)
    with pytest.raises(RestoreKVError, match=beyond):
        small.append(ids[:200])
    chat = small.chat()
    with pytest.raises(RestoreKVError, match=beyond):
        chat.ask("what?", max_new_tokens=200)
    assert not chat.turns
    chat.ask("what?", max_new_tokens=8)
    for options in ({"max_new_tokens": 200}, {"max_length": 310}):
        with pytest.raises(RestoreKVError, match=f"longest answer allowed {beyond}"):
            small.generate("what?", **options)
    # Of a question of 310 tokens transformers' mask hides a part, but nothing of the context.
    for question, answer in ((10, 200), (310, 2)):
        with pytest.raises(RestoreKVError, match="sees 300 positions, and the cache has"):
            model.generate(
                exactness.random_ids(small.context.num_tokens + question),
                past_key_values=small.cache.fork(),
                max_new_tokens=answer,
                eos_token_id=-1,
            )
    adapter = RestoreAdapter.create(model, 140, rank=1, targets=("q_proj",))
    with pytest.raises(RestoreKVError, match=f"with its restore tokens {beyond}"):
        compress(model, tokenizer, ids[:190], adapter=adapter, evictor="random", ratio=1)


def test_layers_without_rope_keep_keys_from_being_moved():
    plain, mixed = (decoders.build(kind, num_hidden_layers=4) for kind in ("llama", "smollm3"))
    keys = torch.randn(1, decoders.KV_HEADS, 5, decoders.HEAD_DIM)
    assert shift_keys(plain, keys, 7).shape == keys.shape
    with pytest.raises(RestoreKVError, match="layers that do not rotate keys"):
        shift_keys(mixed, keys, 7)


def test_queries_scaled_by_position_keep_keys_from_being_moved():
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 40,
    }
    config = {"sliding_window": None, "rope_parameters": {**rope, "llama_4_scaling_beta": 0.3}}
    if "ministral3" not in decoders.causal_types():
        pytest.skip("this transformers does not have it")
    model = decoders.build("ministral3", **config)
    with pytest.raises(RestoreKVError, match="queries by RoPE alone"):
        shift_keys(model, torch.randn(1, decoders.KV_HEADS, 5, decoders.HEAD_DIM), 7)


def saved(model, folder):
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return str(folder)


def test_commands_say_one_sentence(tmp_path, capsys, mistral):
    text = tmp_path / "long.txt"
    text.write_text("the code of the red house is seven. " * 40)
    folder = saved(mistral[0], tmp_path / "mistral")
    assert execute(["compress", str(text), "--model", folder, "-o", str(tmp_path / "x.rkv")]) != 0
    error = capsys.readouterr().err
    assert (
        "every layer sees at most 300 positions" in error.replace("\n", " ")
        and "Traceback" not in error
    )
    assert not (tmp_path / "x.rkv").exists()
    folder = saved(decoders.build("gpt2"), tmp_path / "gpt2")
    assert execute(["compress", str(text), "--model", folder, "-o", str(tmp_path / "x.rkv")]) != 0
    assert "GPT2LMHeadModel has no RoPE" in capsys.readouterr().err.replace("\n", " ")


def test_load_model_refuses_and_accepts_by_what_is_computed(tmp_path):
    with pytest.raises(ModelError, match="bias"):
        load_model(saved(decoders.build("doge"), tmp_path / "doge"))
    model, _ = load_model(saved(decoders.build("mistral"), tmp_path / "mistral"))
    assert count_usable_positions(model) == decoders.WINDOW


def test_a_context_as_long_as_the_window_is_exact():
    """What the mask function says is what attention does: at the limit nothing is hidden, one
    position later it is.
    """
    for config in (MistralConfig, LlamaConfig):
        kind = config.model_type
        model = decoders.build(kind)
        limit = min(count_usable_positions(model), decoders.WINDOW)
        ids = exactness.random_ids(limit)
        prepared = Eviction.make("random").prepare(
            model, build_tokenizer(), Context(ids[:, :-1], 2, ids[:, :0])
        )
        plain = exactness.plain_copy(model)
        own = model(
            input_ids=ids[:, -1:],
            position_ids=torch.tensor([[limit - 1]]),
            past_key_values=prepared.evict(1).fork(),
            use_cache=True,
        ).logits
        assert torch.allclose(
            own, plain(input_ids=ids).logits[:, -1:], atol=1e-3 * float(own.abs().max())
        )


def test_attention_without_a_mask_is_refused(monkeypatch):
    """Nothing then says what a layer sees of a longer text."""
    module = sys.modules["transformers.models.llama.modeling_llama"]
    monkeypatch.setattr(support, "_support_by_key", {})
    monkeypatch.setattr(module, "create_causal_mask", lambda *args, **options: None)
    with pytest.raises(ModelError, match="calls attention without a mask"):
        support.get_support(decoders.build("llama"))


def test_a_padded_batch_may_come_to_the_windows_end(mistral):
    """Rows are padded to the longest question, so the tail has more columns than any row sees."""
    model, tokenizer = mistral
    ids = exactness.random_ids(150)[0].tolist()
    small = compress(model, tokenizer, ids, adapter=None, evictor="random", ratio=1)
    short, long = exactness.random_ids(3), exactness.random_ids(100, seed=1)
    room = WINDOW - small.context.num_tokens - 3
    both = generate_ids(model, tokenizer, small.cache, [long, short], [2, room])
    alone = generate_ids(model, tokenizer, small.cache, [short], [room])
    assert both[1].tolist() == alone[0].tolist()


def test_chunks_of_llama_4_bound_generate():
    settings = {"attention_chunk_size": 96, "max_position_embeddings": 4096}
    model = decoders.build("llama4_text", **settings)
    ids = exactness.random_ids(50)
    small = compress(model, build_tokenizer(), ids[0].tolist(), adapter=None, evictor="random")
    with pytest.raises(RestoreKVError, match="longest answer allowed needs"):
        small.generate("what?", max_new_tokens=60)
    with pytest.raises(RestoreKVError, match="sees 96 positions, and the cache has"):
        model.generate(
            exactness.random_ids(small.context.num_tokens + 60),
            past_key_values=small.cache.fork(),
            max_new_tokens=2,
        )


@pytest.mark.skipif("hyperclovax" not in CONFIG_MAPPING, reason="a newer class")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hyperclova_x_multiplies_its_logits(dtype):
    """Its config calls the factor what Granite's calls the divisor."""
    model = decoders.build("hyperclovax", logits_scaling=0.125).to(dtype)
    support.get_support(model)
    ids = exactness.random_ids(5)
    with torch.no_grad():
        hidden = get_backbone(model)(input_ids=ids).last_hidden_state
        assert compute_logits(model, hidden).equal(model(input_ids=ids).logits)


class _LoudLlama(LlamaForCausalLM):
    """A class that scales its logits by a number that no config names."""

    def forward(self, *args, **options):
        output = super().forward(*args, **options)
        output.logits = 3 * output.logits
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_class_that_scales_its_logits_unasked_is_refused_in_every_dtype(dtype):
    config = LlamaConfig(
        hidden_size=32,
        # A refusal holds for every model of a class and config, so each dtype has its own.
        intermediate_size=16 * dtype.itemsize,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=320,
    )
    model = _LoudLlama(config).eval().to(dtype)
    with pytest.raises(ModelError, match="logits"):
        support.get_support(model)


def test_llama_4_is_used_up_to_the_positions_from_which_on_it_scales_queries():
    """It scales by what its cache has seen, which is not the position of a row of `ask`."""
    settings = {"attention_chunk_size": 1000, "max_position_embeddings": 4096}
    scaled = decoders.build("llama4_text", floor_scale=50, attn_scale=0.8, **settings)
    assert support.get_support(scaled).positions == 49
    assert "scale their queries" in support.get_support(scaled).beyond
    plain = decoders.build("llama4_text", attn_temperature_tuning=False, **settings)
    assert support.get_support(plain).positions == 1000
    # The real ones scale from where their chunk ends.
    later = decoders.build("llama4_text", floor_scale=8192, **settings)
    assert support.get_support(later).positions == 1000


@pytest.mark.skipif(not decoders.HAS_LAYER_CONFIGS, reason="layers have no configs of their own")
def test_layers_of_one_kind_have_heads_of_one_kind():
    """No class of transformers allows others, so the config alone is asked."""

    def find_shape(sizes):
        settings = {"layer_types": decoders.MIXED, "use_sliding_window": True}
        config = decoders.tiny_config("qwen3", per_layer_config=sizes, **settings)
        return CacheShape.from_model(SimpleNamespace(config=config))

    fewer = {"num_key_value_heads": 1}
    assert find_shape({1: fewer, 3: fewer}).heads == 1  # of the layers that see the whole text
    assert find_shape({0: fewer, 2: fewer}).heads == 2
    with pytest.raises(ModelError, match=r"numbers or sizes .*that see the whole text"):
        find_shape({1: fewer})
    with pytest.raises(ModelError, match=r"numbers or sizes .*that have a window"):
        find_shape({2: fewer})


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "lets tokens see later ones"),
    ],
)
def test_a_config_that_rules_a_model_out_is_named(kind, settings, why):
    """The probe's passes fail with errors of PyTorch, or with sentences about something else."""
    model = decoders.build(kind, **settings)
    with pytest.raises(ModelError, match=rf"{why}.* \({next(iter(settings))}\); use a decoder"):
        support.get_support(model)
