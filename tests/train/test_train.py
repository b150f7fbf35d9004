"""The training loop: the loss falls, a killed run resumes with the same losses, the backbone stays
as it was.
"""

import re
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import CohereForCausalLM, GraniteForCausalLM

from restorekv import seal
from restorekv.compression.full_cache import ScoredContext
from restorekv.errors import AdapterError, RestoreKVError, RestoreKVWarning
from restorekv.model import attention
from restorekv.model.attention import cascade
from restorekv.model.prompt import get_default_separator, make_context
from restorekv.model.rope import count_positions
from restorekv.model.shape import compute_logits, find_pairless_layers, list_windows
from restorekv.restore.use_warnings import warn_of_other_use
from restorekv.train import checkpoint
from restorekv.train import teacher as teacher_module
from restorekv.train.checks import check_setup
from restorekv.train.config import TrainConfig, compute_learning_rate
from restorekv.train.draw import StepSample, draw_step_samples, select_own_samples
from restorekv.train.examples import (
    TrainingContext,
    check_example_lengths,
    count_sources,
    keep_short_examples,
    read_examples,
)
from restorekv.train.loop import (
    LOSS_OFFSET,
    make_initial_adapter,
    train_adapter,
    weigh_loss,
    weigh_ratio,
)
from restorekv.train.loss import compute_answer_logits, compute_divergence
from restorekv.train.teacher_cache import KIND, TeacherCache
from tests.helpers.cli_world import cli
from tests.helpers.gates import save_gate
from tests.helpers.hybrids import (
    HYBRIDS,
    WITH_STATES,
    build_hybrid,
    list_targets,
    mark_alike,
)
from tests.helpers.models import ONE_FAMILY, SHAPE, build_model
from tests.helpers.training import CONFIG, EXAMPLES, TEXT, losses


@pytest.mark.parametrize("tiny_model", ONE_FAMILY, indirect=True)
def test_loss_falls_and_the_backbone_is_untouched(tiny_model, tiny_tokenizer, tmp_path):
    before = {name: weight.clone() for name, weight in tiny_model.state_dict().items()}
    ids = torch.arange(3, 40)[None]
    logits = tiny_model(ids).logits
    train_adapter(tiny_model, tiny_tokenizer, EXAMPLES, replace(CONFIG, steps=30), tmp_path / "run")
    curve = losses(tmp_path / "run")
    assert sum(curve[-5:]) < 0.9 * sum(curve[:5])
    assert torch.equal(tiny_model(ids).logits, logits)
    after = tiny_model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("tiny_model", ONE_FAMILY, indirect=True)
def test_a_run_goes_on_from_an_adapter(tiny_model, tiny_tokenizer, tmp_path):
    first = train_adapter(tiny_model, tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "first")
    place = str(tmp_path / "first" / "adapter")
    still = replace(CONFIG, init=place, steps=1, lr=0.0)
    again = train_adapter(tiny_model, tiny_tokenizer, EXAMPLES, still, tmp_path / "again")
    before, after = first.trainable_state(), again.trainable_state()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    begun = f"a local adapter, weights {first.to_stored().weights_hash()}"
    assert again.card.settings["init"] == begun, "the record may be published"
    assert again.card.data[-1]["source"] == "unnamed data, through the adapter it began with"
    named = [replace(example, source="mine") for example in EXAMPLES]
    train_adapter(tiny_model, tiny_tokenizer, named, replace(CONFIG, steps=1), tmp_path / "named")
    more = replace(still, init=str(tmp_path / "named" / "adapter"))
    further = train_adapter(tiny_model, tiny_tokenizer, named, more, tmp_path / "further")
    assert [row["source"] for row in further.card.data] == ["mine"], "the same data is named once"
    for wrong in ({"restore_tokens": 1}, {"rank": 4}, {"alpha": 8}, {"targets": ("q_proj",)}):
        with pytest.raises(AdapterError, match=place):
            make_initial_adapter(tiny_model, tiny_tokenizer, replace(still, **wrong))


def test_data_of_one_name_counts_under_each_of_its_licenses(tiny_tokenizer, tmp_path):
    """A restrictive license of the adapter that a run begins with may not get lost."""
    model, config = build_model("llama"), replace(CONFIG, steps=1)
    strict = [replace(example, source="mine", license="cc-by-nc-4.0") for example in EXAMPLES]
    train_adapter(model, tiny_tokenizer, [*strict, EXAMPLES[0]], config, tmp_path / "first")
    free = [replace(example, license="mit") for example in strict]
    more = replace(config, init=str(tmp_path / "first" / "adapter"))
    card = train_adapter(model, tiny_tokenizer, free, more, tmp_path / "second").card
    assert [(row["source"], row["license"]) for row in card.data] == [
        ("mine", "mit"),
        ("mine, through the adapter it began with", "cc-by-nc-4.0"),
        ("unnamed data, through the adapter it began with", None),
    ]
    assert card.license == "cc-by-nc-4.0"


@pytest.mark.parametrize(("kind", "other"), [("learned", "fixed"), ("fixed", "learned")])
def test_a_run_goes_on_with_the_kind_of_embeddings_that_the_adapter_has(
    tiny_tokenizer, tmp_path, kind, other
):
    model, config = build_model("llama"), replace(CONFIG, embeddings=kind, init=str(tmp_path))
    make_initial_adapter(model, tiny_tokenizer, replace(config, init="")).save_pretrained(tmp_path)
    again = make_initial_adapter(model, tiny_tokenizer, config)
    assert again.embeddings.requires_grad == (kind == "learned")
    with pytest.raises(AdapterError, match=f"training it with --embeddings {kind}\\.$"):
        make_initial_adapter(model, tiny_tokenizer, replace(config, embeddings=other))


def test_all_that_differs_from_the_first_adapter_is_said_at_once(tiny_tokenizer, tmp_path):
    model = build_model("llama")
    first = replace(CONFIG, restore_tokens=3, rank=5, knows_ratio=True, targets=("q_proj",))
    make_initial_adapter(model, tiny_tokenizer, first).save_pretrained(tmp_path)
    other = replace(
        first, restore_tokens=2, rank=2, knows_ratio=False, targets=("v_proj",), init=str(tmp_path)
    )
    with pytest.raises(AdapterError) as raised:
        make_initial_adapter(model, tiny_tokenizer, other)
    flags = "--restore-tokens 3 --rank 5 --targets q_proj --knows-ratio"
    assert str(raised.value).endswith(f"continue training it with {flags}.")
    make_initial_adapter(model, tiny_tokenizer, replace(first, init=str(tmp_path)))


def test_a_run_may_add_restore_tokens_to_the_adapter_that_it_begins_with(tiny_tokenizer, tmp_path):
    model, config = build_model("llama"), replace(CONFIG, init=str(tmp_path))
    first = make_initial_adapter(model, tiny_tokenizer, replace(config, init=""))
    first.save_pretrained(tmp_path)
    n = first.restore_tokens
    longer = replace(config, restore_tokens=2 * n, steps=2)
    out = tmp_path / "longer"
    notices = []
    trained = train_adapter(model, tiny_tokenizer, EXAMPLES, longer, out, notice=notices.append)
    assert f"has {n} restore tokens and gets {n} more" in notices[0]
    assert f"--restore-tokens {n}" in notices[0]
    assert trained.restore_tokens == trained.card.restore_tokens == 2 * n
    assert not trained.embeddings[:n].equal(trained.embeddings[n:]), "the copies have moved apart"
    resumed = train_adapter(model, tiny_tokenizer, EXAMPLES, longer, out, resume=True)
    assert resumed.embeddings.equal(trained.embeddings)


def test_a_run_may_raise_the_rank_of_the_adapter_that_it_begins_with(tiny_tokenizer, tmp_path):
    model, config = build_model("llama"), replace(CONFIG, init=str(tmp_path), steps=2)
    first = train_adapter(
        model, tiny_tokenizer, EXAMPLES, replace(config, init=""), tmp_path / "first"
    )
    first.save_pretrained(tmp_path)
    rank, alpha = config.rank, config.alpha
    wider = replace(config, rank=2 * rank, alpha=2 * alpha)
    notices = []
    begun = make_initial_adapter(model, tiny_tokenizer, wider, notices.append)
    assert f"has rank {rank} and gets rank {2 * rank}" in notices[0]
    assert f"--rank {rank} --alpha {alpha:g} continues" in notices[0]
    out = tmp_path / "wider"
    trained = train_adapter(model, tiny_tokenizer, EXAMPLES, wider, out)
    assert trained.lora_config.r == 2 * rank
    for name, weight in trained.lora_parameters.items():
        if "layers.0." in name and name.endswith("lora_B.weight"):
            assert weight[:, rank:].abs().max() > 0, "the new columns learn"
    # The seed decides the new rows, so that a resumed run has those of the first one.
    resumed = train_adapter(model, tiny_tokenizer, EXAMPLES, wider, out, resume=True)
    assert resumed.to_stored().weights_hash() == trained.to_stored().weights_hash()
    again = make_initial_adapter(model, tiny_tokenizer, wider)
    assert again.to_stored().weights_hash() == begun.to_stored().weights_hash()
    with pytest.raises(AdapterError, match=f"continue training it with --alpha {2 * alpha:g}"):
        make_initial_adapter(model, tiny_tokenizer, replace(wider, alpha=alpha))


def test_every_adapter_weight_that_can_learn_does(tiny_tokenizer, tmp_path):
    model = build_model("qwen3")
    first = train_adapter(
        model, tiny_tokenizer, EXAMPLES, replace(CONFIG, steps=1, lr=0.0), tmp_path / "start"
    )
    start = {name: weight.clone() for name, weight in first.trainable_state().items()}
    second = train_adapter(model, tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "end")
    still = [
        name
        for name, weight in second.trainable_state().items()
        if torch.equal(weight, start[name])
    ]
    last = f"layers.{model.config.num_hidden_layers - 1}."
    # The last layer leaves its keys and values only, so whatever follows them there never matters.
    assert still and all(
        last in name and not ("k_proj" in name or "v_proj" in name) for name in still
    )


GEMMAS = [kind for kind in HYBRIDS if kind.startswith("gemma")]


@pytest.mark.parametrize("kind", mark_alike([*GEMMAS, *WITH_STATES]))
def test_models_with_layers_of_several_kinds_are_trained(tiny_tokenizer, tmp_path, kind):
    """Layers that share the pairs of earlier ones leave nothing, so they have no LoRA. Of layers
    that keep states, those of OLMo have queries and keys for it.
    """
    model = build_hybrid(kind)
    config = replace(
        CONFIG, steps=24, targets=list_targets(model), hidden_weight=0.1, attention_weight=0.1
    )

    def train(name, progress=lambda *_: None):
        folder = tmp_path / name
        given = {"store": tmp_path / "store", "store_prefill": True, "progress": progress}
        return train_adapter(model, tiny_tokenizer, EXAMPLES, config, folder, **given)

    def interrupt(step, *_):
        if step == 6:  # by the third, every text has been read
            raise KeyboardInterrupt

    adapter = train("filling")
    curve = losses(tmp_path / "filling")
    assert sum(curve[-3:]) < sum(curve[:3])
    with pytest.raises(KeyboardInterrupt):
        train("filled", interrupt)
    assert losses(tmp_path / "filled") == curve[:6]
    own = set(range(len(list_windows(model.config))))
    if kind != "olmo_hybrid":
        own -= set(find_pairless_layers(model.config))
    learned = {
        int(re.search(r"layers\.(\d+)\.", name)[1]): bool(weight.any())
        for name, weight in adapter.trainable_state().items()
        if "k_proj.lora_B" in name or "q_proj.lora_B" in name
    }
    assert set(learned) == own and any(learned.values())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_program_without_gradients_trains_all_the_same(tiny_tokenizer, tmp_path, mode):
    """Every step would leave the adapter as it was, and nothing would say so."""
    model = build_model("llama")
    config = replace(CONFIG, steps=2)
    wanted = train_adapter(model, tiny_tokenizer, EXAMPLES, config, tmp_path / "run")
    with mode():
        found = train_adapter(model, tiny_tokenizer, EXAMPLES, config, tmp_path / "mode")
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
    assert found.to_stored().weights_hash() == wanted.to_stored().weights_hash()


def test_weights_that_allow_no_gradients_are_refused(tiny_tokenizer, tmp_path):
    with torch.inference_mode():
        model = build_model("llama")
    with pytest.raises(RestoreKVError, match=r"loaded inside torch\.inference_mode.*outside"):
        train_adapter(model, tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_training_leaves_the_models_own_gradient_flags(tiny_tokenizer, tmp_path):
    """Whoever trains the model next would otherwise train nothing."""
    model = build_model("llama").requires_grad_(True)
    model.lm_head.requires_grad_(False)
    flags = [weight.requires_grad for weight in model.parameters()]
    train_adapter(model, tiny_tokenizer, EXAMPLES, replace(CONFIG, steps=1), tmp_path / "run")
    assert [weight.requires_grad for weight in model.parameters()] == flags
    assert all(weight.grad is None for weight in model.parameters())
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    flags = [weight.requires_grad for weight in wrapped.parameters()]
    with pytest.raises(AdapterError, match="merge or unload"):
        train_adapter(wrapped, tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "other")
    assert [weight.requires_grad for weight in wrapped.parameters()] == flags


def test_targets_are_the_teachers_own_greedy_answers(tiny_model, tiny_tokenizer):
    teachers = TeacherCache(tiny_model, tiny_tokenizer, EXAMPLES, CONFIG)
    prepared, targets = teachers.get_context(0)
    for target in targets:
        ids = torch.cat([prepared.context.ids[0], target.ids])[None]
        plain = tiny_model(ids).logits[0, -target.answer_length - 1 : -1]
        torch.testing.assert_close(tiny_model.lm_head(target.hidden), plain, rtol=1e-4, atol=1e-4)
        assert torch.equal(plain.argmax(-1), target.ids[-target.answer_length :])


def test_a_generated_answer_ends_with_one_stop_id(tiny_tokenizer):
    model = build_model("qwen3")
    question = (TrainingContext(TEXT, ("who lives in the red house?",), (None,)),)
    first = TeacherCache(model, tiny_tokenizer, list(question), CONFIG).get_context(0)[1][0]
    stop = int(first.ids[-first.answer_length :][1])
    model.generation_config.eos_token_id = stop
    again = TeacherCache(model, tiny_tokenizer, list(question), CONFIG).get_context(0)[1][0]
    answer = again.ids[-again.answer_length :].tolist()
    assert answer[-1] == stop and answer.count(stop) == 1
    asked = first.ids[: -first.answer_length].tolist()
    assert again.ids.tolist() == asked + answer == first.ids[: len(again.ids)].tolist()


def test_without_restoring_the_student_is_the_base_evictor(tiny_model, tiny_tokenizer):
    teachers = TeacherCache(tiny_model, tiny_tokenizer, EXAMPLES, CONFIG)
    prepared, targets = teachers.get_context(1)
    alone = compute_answer_logits(
        tiny_model, prepared.evict(0.3), [targets[0].ids], [targets[0].answer_length]
    )
    both = compute_answer_logits(
        tiny_model,
        prepared.evict(0.3),
        [target.ids for target in targets],
        [x.answer_length for x in targets],
    )
    torch.testing.assert_close(both[: targets[0].answer_length], alone, rtol=1e-4, atol=1e-4)
    full = compute_answer_logits(
        tiny_model, prepared.evict(1), [targets[0].ids], [targets[0].answer_length]
    )
    assert (full - alone).abs().max() > 1e-3


def test_the_first_figures_are_those_of_the_full_cache_and_of_the_evictor_alone(
    tiny_model, tiny_tokenizer
):
    teachers = TeacherCache(tiny_model, tiny_tokenizer, EXAMPLES, CONFIG)
    adapter = make_initial_adapter(tiny_model, tiny_tokenizer, CONFIG)
    found = check_setup(adapter, teachers, StepSample(1, (0, 1), "0.400000", 2))
    prepared, targets = teachers.get_context(1)
    rows, answers = [target.ids for target in targets], [target.answer_length for target in targets]
    teacher = tiny_model.lm_head(torch.cat([target.hidden for target in targets]))
    base = compute_divergence(
        teacher, compute_answer_logits(tiny_model, prepared.evict(0.4), rows, answers)
    ).mean()
    assert found.base == pytest.approx(float(base), rel=1e-4) and found.full < 1e-4 < found.base
    assert found.restored != found.base and f"{found.base:.4f} evicted" in str(found)


@pytest.mark.parametrize("broken", ["teacher", "attention", "restore"])
def test_a_mistake_is_found_before_the_first_step(tiny_tokenizer, tmp_path, monkeypatch, broken):
    model = build_model("qwen3")
    if broken == "teacher":
        TeacherCache(model, tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "store").get_context(3)
        for path in (tmp_path / "store" / "teacher").iterdir():
            _, held = seal.read_sealed(path, KIND, "the file")
            seal.write_sealed(
                path,
                KIND,
                {name: -x if "hidden" in name else x for name, x in held.items()},
                follow=False,
            )
    elif broken == "attention":
        right = cascade.attend_ragged
        monkeypatch.setattr(
            cascade, "attend_ragged", lambda q, layer, mask, scale: right(q, layer, mask, 2 * scale)
        )
    else:
        whole = ScoredContext.with_restore_cache
        monkeypatch.setattr(
            ScoredContext,
            "with_restore_cache",
            lambda self, adapter: replace(whole(self, adapter), scores=-self.scores),
        )
    with pytest.raises(RestoreKVError, match="loss"):
        examples = [EXAMPLES[3]]
        train_adapter(
            model, tiny_tokenizer, examples, CONFIG, tmp_path / "run", store=tmp_path / "store"
        )
    assert not (tmp_path / "run").exists()


def test_a_run_that_ends_in_its_warm_up_says_so(tiny_tokenizer, tmp_path):
    said: list[str] = []
    for warmup in (0, 4):
        config = replace(CONFIG, steps=1, warmup=warmup)
        folder = tmp_path / str(warmup)
        train_adapter(
            build_model("llama"), tiny_tokenizer, EXAMPLES, config, folder, notice=said.append
        )
    told = [sentence for sentence in said if "learning rate" in sentence]
    assert told == [
        "The learning rate rises for 4 steps and the run has 1: it ends at 0.0025 of 0.01; a lower "
        "--warmup lets it learn more."
    ]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("lr", 1e39, "lr must be at most 1,000,000, not 1e+39."),
        ("weight_decay", 1e300, "weight_decay must be at most 1,000,000, not 1e+300."),
        ("alpha", 1e7, "alpha must be at most 1,000,000, not 1e+07."),
        ("loss_power", 1000.0, "loss_power must be at most 100, not 1000."),
        ("answer_decay", 1e-300, "answer_decay must be 0 or at least 0.01, not 1e-300."),
        ("lr", float("nan"), "lr must be at least 0, not nan."),
    ],
)
def test_settings_that_no_float_can_compute_with_are_refused(name, value, told):
    """They would end a run in its middle, or leave weights that no file may hold."""
    with pytest.raises(RestoreKVError, match=re.escape(told)):
        replace(CONFIG, **{name: value})


def test_schedule_and_order_are_functions_of_the_step():
    config = TrainConfig(warmup=10, steps=110, lr=1.0)
    assert compute_learning_rate(config, 0) == pytest.approx(0.1)
    assert compute_learning_rate(config, 10) == pytest.approx(1.0)
    assert compute_learning_rate(config, 60) == pytest.approx(0.5)
    examples = [TrainingContext(str(index), ("a?", "b?", "c?"), (None,) * 3) for index in range(10)]
    samples = [
        sample
        for step in range(5)
        for sample in draw_step_samples(replace(config, contexts=2, questions=2), step, examples)
    ]
    assert sorted(sample.index for sample in samples) == list(range(10))
    assert all(
        len(set(sample.questions)) == 2 and 0.025 <= float(sample.ratio) <= 0.25
        for sample in samples
    )
    assert {sample.restore_tokens for sample in samples} == {8}


def test_two_processes_take_the_samples_of_one_with_twice_the_contexts():
    examples = [TrainingContext(str(index), ("a?", "b?"), (None, None)) for index in range(7)]
    one = [draw_step_samples(TrainConfig(contexts=4), step, examples) for step in range(5)]
    assert one == [
        draw_step_samples(TrainConfig(contexts=2), step, examples, processes=2) for step in range(5)
    ]


def test_ratios_may_be_drawn_evenly_in_their_logarithm_and_tokens_at_random():
    examples = [TrainingContext("a", ("b?",), (None,))]
    config = TrainConfig(
        ratio_min=0.01, ratio_max=1, ratio_law="log-uniform", nested=True, restore_tokens=3
    )
    samples = [draw_step_samples(config, step, examples)[0] for step in range(400)]
    assert 0.4 < sum(float(sample.ratio) < 0.1 for sample in samples) / 400 < 0.6
    assert {sample.restore_tokens for sample in samples} == {1, 2, 3}


def test_json_lines_are_read(tiny_model, tiny_tokenizer, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"context": "a b", "questions": ["c?"]}\n\n'
        '{"context": "d", "questions": ["e?"], "answers": ["f"], '
        '"source": "mine", "license": "CC BY 4.0"}\n'
    )
    plain, told = read_examples(path, tiny_model, tiny_tokenizer)
    assert plain.drafts == (None,) and plain.license is None
    assert told.drafts == ("f",) and (told.source, told.license) == ("mine", "cc-by-4.0")
    # Files of the benchmark `lines` too, with several answers to a question or none known.
    path.write_text(
        '{"id": "1", "task": "t", "context": "a", "questions": ["b?", "c?"], '
        '"answers": [["d", "e"], null]}\n'
    )
    assert read_examples(path, tiny_model, tiny_tokenizer)[0].drafts == ("d", None)
    assert count_sources([plain, told, told]) == [
        {"source": None, "license": None, "contexts": 1, "examples": 1},
        {"source": "mine", "license": "cc-by-4.0", "contexts": 2, "examples": 2},
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"context": 3}', 'has no text in "context"'),
        ('["a"]', "is not an object"),
        ('{"context": "a"}', 'has no list in "questions"'),
        ('{"context": "a", "questions": "b?"}', 'has no list in "questions"'),
        ('{"context": "a", "questions": ["b?"]', "is not JSON .*character 37"),
        ('{"context": "a", "questions": ["b?", " "]}', 'has no text in "questions", number 2'),
        (
            '{"context": "a", "questions": ["b?"], "answers": [" "]}',
            'has no text in "answers", number 1',
        ),
        (
            '{"context": "a", "questions": ["b?"], "answers": ["c", "d"]}',
            "has 1 questions and 2 answers",
        ),
        ('{"context": "a", "questions": ["b?"], "answer": ["c"]}', "has the unknown key 'answer'"),
        (
            '{"context": "a", "questions": ["b?", "c?"], "answers": ["d", ["e", ""]]}',
            'has no text in "answers", number 2',
        ),
        (
            '{"context": "a", "questions": ["b?"], "answers": [[]]}',
            'has no text in "answers", number 1',
        ),
        (
            '{"context": "a", "questions": ["b?"], "license": "all mine"}',
            "has the unknown license 'all mine'",
        ),
    ],
)
def test_a_poisoned_line_is_named(tiny_model, tiny_tokenizer, tmp_path, line, told):
    path = tmp_path / "data.jsonl"
    path.write_text('{"context": "a b", "questions": ["c?"]}\n' + line + "\n")
    with pytest.raises(RestoreKVError, match=f"data.jsonl, line 2 {told}"):
        read_examples(path, tiny_model, tiny_tokenizer)


def test_a_plain_text_is_no_training_data(tiny_model, tiny_tokenizer, tmp_path):
    path = tmp_path / "story.txt"
    path.write_text("Once upon a time.")
    with pytest.raises(RestoreKVError, match=r"story.txt is a plain text; .* JSON lines"):
        read_examples(path, tiny_model, tiny_tokenizer)


def test_long_contexts_are_left_out_in_order(tiny_tokenizer):
    examples = [TrainingContext(TEXT * count, ("What?",), (None,)) for count in (2, 1, 3)]
    lengths = [make_context(tiny_tokenizer, example.context).text_tokens for example in examples]
    assert keep_short_examples(tiny_tokenizer, examples, max(lengths)) == examples
    assert keep_short_examples(tiny_tokenizer, examples, lengths[0]) == examples[:2]
    shortest = min(lengths)
    told = f"All 3 contexts have more than {shortest - 1} tokens, the shortest {shortest}; raise --"
    with pytest.raises(RestoreKVError, match=told):
        keep_short_examples(tiny_tokenizer, examples, shortest - 1)


def test_contexts_must_fit_the_model_and_hold_a_token(tiny_model, tiny_tokenizer):
    long = replace(EXAMPLES[0], context="house " * 5000, where="line 7")
    with pytest.raises(RestoreKVError, match=r"line 7 needs .* made for 4096"):
        check_example_lengths(tiny_model, tiny_tokenizer, [EXAMPLES[0], long], CONFIG)
    fits = replace(EXAMPLES[0], context="house " * 2000, where="line 7")
    check_example_lengths(tiny_model, tiny_tokenizer, [fits], CONFIG)
    tokens = make_context(tiny_tokenizer, fits.context).num_tokens
    with pytest.raises(RestoreKVError, match="line 7 needs"):
        check_example_lengths(
            tiny_model, tiny_tokenizer, [fits], replace(CONFIG, max_new_tokens=4096 - tokens)
        )
    short = replace(EXAMPLES[0], context="red", where="line 9")
    with pytest.raises(RestoreKVError, match=r"line 9 has 1 token: .* of them; leave out"):
        check_example_lengths(tiny_model, tiny_tokenizer, [short], CONFIG)
    others = [replace(short, where=f"line {number}") for number in (10, 11)]
    with pytest.raises(RestoreKVError, match=r"line 9 has .* \(2 more contexts are like this\);"):
        check_example_lengths(tiny_model, tiny_tokenizer, [short, fits, *others], CONFIG)
    other = replace(long, where="line 8")
    told = r"line 7 needs .* \(1 more context is like this\); shorten or .* \(--longest-context\)"
    with pytest.raises(RestoreKVError, match=told):
        check_example_lengths(tiny_model, tiny_tokenizer, [long, short, other], CONFIG)
    with pytest.warns(
        RestoreKVWarning, match="5 of 5 contexts are too short for 90 restore tokens"
    ):
        check_example_lengths(
            tiny_model, tiny_tokenizer, EXAMPLES, replace(CONFIG, restore_tokens=90)
        )


def test_a_ratio_without_room_for_a_token_teaches_nothing_and_breaks_nothing(
    tiny_tokenizer, tmp_path
):
    config = replace(CONFIG, ratio_min=0.001, ratio_max=0.02, restore_from="evicted", steps=4)
    with pytest.warns(RestoreKVWarning, match="too short"):
        train_adapter(build_model("qwen3"), tiny_tokenizer, EXAMPLES, config, tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 4


def test_a_loss_that_is_not_finite_stops_the_run_before_the_weights_are_spoilt(
    tiny_tokenizer, tmp_path
):
    config = replace(CONFIG, lr=1e6, warmup=0, checkpoint_every=1)
    with pytest.raises(RestoreKVError, match=r"step \d is not finite"):
        train_adapter(build_model("qwen3"), tiny_tokenizer, EXAMPLES, config, tmp_path / "run")
    held = load_file(tmp_path / "run" / "checkpoint.safetensors")
    assert all(value.isfinite().all() for value in held.values())
    # Without a checkpoint at every step the steps before are kept too.
    rare = replace(config, checkpoint_every=100)
    with pytest.raises(RestoreKVError, match=r"step \d is not finite.*steps before it are kept"):
        train_adapter(build_model("qwen3"), tiny_tokenizer, EXAMPLES, rare, tmp_path / "rare")
    again = load_file(tmp_path / "rare" / "checkpoint.safetensors")
    assert all(torch.equal(again[name], held[name]) for name in held)


@pytest.mark.slow
def test_no_clipping_is_not_no_training(tiny_tokenizer, tmp_path):
    free = train_adapter(
        build_model("qwen3"), tiny_tokenizer, EXAMPLES, replace(CONFIG, clip=0.0), tmp_path / "free"
    )
    wide = train_adapter(
        build_model("qwen3"), tiny_tokenizer, EXAMPLES, replace(CONFIG, clip=1e9), tmp_path / "wide"
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            free.trainable_state().values(), wide.trainable_state().values(), strict=True
        )
    )
    assert any("lora_B" in name and value.any() for name, value in free.trainable_state().items())


def test_half_precision_that_loses_gradients_is_refused(tiny_tokenizer, tmp_path):
    with pytest.raises(RestoreKVError, match="vanish in float16"):
        train_adapter(
            build_model("llama").half(), tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "run"
        )


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        (GraniteForCausalLM, {"logits_scaling": 8.0, "attention_multiplier": 0.3}),
        (CohereForCausalLM, {"logit_scale": 0.0625}),
    ],
)
def test_the_loss_is_that_of_the_models_own_logits(tiny_tokenizer, tmp_path, kind, extra):
    torch.manual_seed(0)
    model = (
        kind(kind.config_class(**{**SHAPE, "eos_token_id": 2, **extra}))
        .eval()
        .requires_grad_(False)
    )
    attention.install_attention(model)
    teachers = TeacherCache(model, tiny_tokenizer, EXAMPLES, CONFIG)
    prepared, targets = teachers.get_context(0)
    for target in targets:
        ids = torch.cat([prepared.context.ids[0], target.ids])[None]
        plain = model(ids).logits[0, -target.answer_length - 1 : -1]
        torch.testing.assert_close(
            compute_logits(model, target.hidden), plain, rtol=1e-4, atol=1e-4
        )
    train_adapter(model, tiny_tokenizer, EXAMPLES, replace(CONFIG, steps=1), tmp_path / "run")


def test_a_head_of_another_kind_is_found_before_the_first_step(
    tiny_tokenizer, tmp_path, monkeypatch
):
    model = build_model("llama")
    whole = type(model).forward

    def bent(self, *args, **kwargs):
        out = whole(self, *args, **kwargs)
        out.logits = out.logits * 0.1
        return out

    monkeypatch.setattr(type(model), "forward", bent)
    with pytest.raises(RestoreKVError, match="not those of this model"):
        train_adapter(model, tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "run")


def test_a_stretched_rope_has_more_positions():
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 1e4,
    }
    assert count_positions(build_model("llama", rope_parameters=rope).config) == 16384
    assert count_positions(build_model("llama").config) == 4096


def test_many_questions_are_read_a_few_at_a_time(tiny_model, tiny_tokenizer, monkeypatch):
    many = TrainingContext(TEXT, tuple(f"is {word} red?" for word in "abcdefg"), (" seven",) * 7)
    whole = TeacherCache(tiny_model, tiny_tokenizer, [many], CONFIG).get_context(0)[1]
    widths = []
    inner = teacher_module.run_answers
    monkeypatch.setattr(teacher_module, "BATCH", 3)
    monkeypatch.setattr(
        teacher_module, "run_answers", lambda *args: (widths.append(len(args[2])), inner(*args))[1]
    )
    parts = TeacherCache(tiny_model, tiny_tokenizer, [many], CONFIG).get_context(0)[1]
    assert max(widths) == 3
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.ids, other.ids)
        torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", ["model", "data", "dtype", "lr"])
def test_a_run_is_resumed_as_it_was_and_what_differs_is_named(tiny_tokenizer, tmp_path, change):
    train_adapter(build_model("llama"), tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "run")
    before = (tmp_path / "run" / "loss.csv").read_text()
    model = build_model("llama", seed=int(change == "model"))
    model = model.double() if change == "dtype" else model
    examples = (
        [replace(EXAMPLES[0], license="mit"), *EXAMPLES[1:]] if change == "data" else EXAMPLES
    )
    config = replace(CONFIG, lr=1.0) if change == "lr" else CONFIG
    with pytest.raises(RestoreKVError, match=f"is a different one .{change} is .*, was ") as raised:
        train_adapter(model, tiny_tokenizer, examples, config, tmp_path / "run", resume=True)
    # An adapter can be trained on with other settings, but not for another model.
    assert (f"--init {tmp_path / 'run' / 'adapter'}" in str(raised.value)) == (change != "model")
    assert (tmp_path / "run" / "loss.csv").read_text() == before


def test_a_draft_is_confirmed_whichever_stop_id_the_model_uses(tiny_tokenizer, monkeypatch):
    model = build_model("qwen3")
    question = TrainingContext(TEXT, ("who lives in the red house?",), (None,))
    first = TeacherCache(model, tiny_tokenizer, [question], CONFIG).get_context(0)[1][0]
    stop = int(first.ids[-first.answer_length :][1])
    model.generation_config.eos_token_id = [1, stop]  # the lower one is not the model's own
    written = TeacherCache(model, tiny_tokenizer, [question], CONFIG).get_context(0)[1][0]
    answer = written.ids[-written.answer_length :]
    assert answer[-1] == stop
    draft = tiny_tokenizer.decode(answer[:-1])
    assert tiny_tokenizer.encode(draft, add_special_tokens=False) == answer[:-1].tolist()
    monkeypatch.setattr(teacher_module, "generate_ids", None)
    again = TeacherCache(
        model, tiny_tokenizer, [replace(question, drafts=(draft,))], CONFIG
    ).get_context(0)[1][0]
    assert torch.equal(again.ids, written.ids) and again.answer_length == written.answer_length


def test_the_adapter_records_settings_data_and_license(tiny_tokenizer, tmp_path):
    made = replace(EXAMPLES[0], source="books", license="cc-by-sa-4.0")
    adapter = train_adapter(
        build_model("llama"), tiny_tokenizer, [made, *EXAMPLES[1:]], CONFIG, tmp_path / "run"
    )
    assert adapter.card.settings["lr"] == CONFIG.lr and adapter.card.settings["processes"] == 1
    assert [row["contexts"] for row in adapter.card.data] == [1, 4]
    assert adapter.card.license == "unknown" and adapter.card.separator == get_default_separator(
        tiny_tokenizer
    )


def test_the_record_names_a_gate_by_its_hash(tiny_tokenizer, tmp_path):
    model = build_model("llama")
    gate = save_gate(tmp_path / "gate.safetensors", "fastkvzip", model)
    config = replace(CONFIG, evictor=f"knorm,fastkvzip:gate={gate}", steps=1)
    card = train_adapter(model, tiny_tokenizer, EXAMPLES, config, tmp_path / "run").card
    assert card.settings["evictor"] == card.evictor
    assert re.fullmatch("knorm,fastkvzip:gate=[0-9a-f]{16}", card.evictor)


@pytest.mark.parametrize(
    "harm",
    [
        lambda meta, own: meta.update(step="9" * 30),
        lambda meta, own: meta.update(step="7"),
        lambda meta, own: meta.update(config="[" * 9000),
        lambda meta, own: meta.update(config='{"lr": "high"}'),
        lambda meta, own: meta.update(origin="[]"),
        lambda meta, own: meta.pop("origin"),
        lambda meta, own: own.pop("adapter.embeddings"),
        lambda meta, own: own.update(more=torch.ones(1)),
        lambda meta, own: own.update({"adapter.embeddings": own["adapter.embeddings"] * torch.nan}),
        lambda meta, own: own.update({"optimizer.0.exp_avg_sq": own["optimizer.0.exp_avg_sq"] - 1}),
        lambda meta, own: own.update({"optimizer.0.step": torch.tensor(99.0)}),
        lambda meta, own: own.update(
            {"optimizer.0.exp_avg": own["optimizer.0.exp_avg"][:1].clone()}
        ),
    ],
)
def test_checkpoints_that_cannot_be_are_refused_and_change_nothing(tiny_tokenizer, tmp_path, harm):
    model = build_model("qwen3")
    train_adapter(model, tiny_tokenizer, EXAMPLES[:2], replace(CONFIG, steps=2), tmp_path / "run")
    path = tmp_path / "run" / checkpoint.CHECKPOINT_FILE
    metadata, own = seal.read_sealed(path, checkpoint.KIND)
    config = replace(CONFIG, steps=2)
    train_adapter(model, tiny_tokenizer, EXAMPLES[:2], config, tmp_path / "run", resume=True)
    harm(metadata, own)
    seal.write_sealed(path, checkpoint.KIND, own, metadata)
    with pytest.raises(RestoreKVError, match=r"damaged|not finite|is a different one") as caught:
        train_adapter(model, tiny_tokenizer, EXAMPLES[:2], config, tmp_path / "run", resume=True)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_each_step_draws_one_of_several_evictors(tiny_tokenizer, tmp_path):
    model = build_model("llama")
    config = replace(CONFIG, evictor="snapkv:window=8,kernel=3,h2o", ratio_weight=1.0)
    adapter = train_adapter(
        model, tiny_tokenizer, EXAMPLES, config, tmp_path / "run", store=tmp_path / "store"
    )
    assert [each.spec for each in config.make_evictions()] == ["snapkv:window=8,kernel=3", "h2o"]
    drawn = {draw_step_samples(config, step, EXAMPLES)[0].evictor for step in range(20)}
    assert drawn == {0, 1}
    assert draw_step_samples(CONFIG, 0, EXAMPLES)[0].evictor == 0
    assert adapter.card.evictor == "snapkv:window=8,kernel=3,h2o"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_use(adapter.card, "h2o")
        warn_of_other_use(adapter.card, "snapkv:window=8,kernel=3")
    with pytest.warns(RestoreKVWarning, match="trained with the evictor"):
        warn_of_other_use(adapter.card, "kvzip")


def test_the_weight_of_a_step_rises_with_its_ratio():
    flat, steep = replace(CONFIG, ratio_max=0.5), replace(CONFIG, ratio_max=0.5, ratio_weight=1.0)
    assert weigh_ratio(flat, 0.05) == 1
    assert weigh_ratio(steep, 0.05) == pytest.approx(0.1) and weigh_ratio(steep, 0.5) == 1


def test_a_power_below_1_makes_small_losses_count_more(tiny_tokenizer, tmp_path):
    """The weight times the gradient of the loss is the gradient of its power, or logarithm."""
    for power, minimized in ((0.0, torch.log), (0.5, lambda x: 2 * x.sqrt())):
        for value in (0.0, 0.01, 0.3):
            loss = torch.tensor(value, dtype=torch.float64, requires_grad=True)
            minimized(loss + LOSS_OFFSET).backward()
            assert weigh_loss(power, value) == pytest.approx(float(loss.grad))
    assert weigh_loss(CONFIG.loss_power, 0.01) == 1, "1 is the plain loss, to the bit"
    adapters = [
        train_adapter(
            build_model("llama"),
            tiny_tokenizer,
            EXAMPLES,
            replace(CONFIG, loss_power=power, steps=2),
            tmp_path / f"{power}",
        )
        for power in (1.0, 0.0)
    ]
    assert not torch.equal(adapters[0].embeddings, adapters[1].embeddings)


def test_draws_read_a_context_once(tiny_tokenizer, tmp_path, monkeypatch):
    """Several ratios of one context have the gradient of as many contexts that are read anew."""
    model = build_model("llama")
    reads = []
    plain = TeacherCache.prepare_context

    def counted(self, context, eviction):
        reads.append(context.text_tokens)
        return plain(self, context, eviction)

    monkeypatch.setattr(TeacherCache, "prepare_context", counted)
    config = replace(CONFIG, keep=0, contexts=1, draws=3, steps=2)
    train_adapter(model, tiny_tokenizer, EXAMPLES, config, tmp_path / "run")
    assert len(reads) == 2, (
        "one context a step; the check before the first step read its context for it"
    )
    samples = draw_step_samples(config, 1, EXAMPLES)
    assert len(samples) == 3 and len({sample.index for sample in samples}) == 1
    assert len({sample.ratio for sample in samples}) == 3
    assert draw_step_samples(replace(config, draws=1), 1, EXAMPLES)[0] == samples[0]


def test_processes_share_contexts_and_not_draws():
    config = replace(CONFIG, contexts=2, draws=3)
    samples = draw_step_samples(config, 0, EXAMPLES, processes=2)
    shares = [select_own_samples(samples, 3, rank, 2) for rank in range(2)]
    assert sorted(map(repr, shares[0] + shares[1])) == sorted(map(repr, samples))
    for share in shares:
        assert [share[0].index] * 3 == [sample.index for sample in share[:3]] and len(share) == 6


def test_training_without_tensorboard_is_refused_before_the_first_step(
    tiny_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RestoreKVError, match=r"install 'restorekv\[train\]'"):
        train_adapter(build_model("llama"), tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("package", "extra"), [("torch.utils.tensorboard", "train"), ("pyarrow.parquet", "data")]
)
def test_a_missing_extra_is_found_before_the_model_is_loaded(tmp_path, monkeypatch, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("restorekv.cli.loading.open_model", None)
    monkeypatch.setattr("restorekv.cli.train.read_manifest", lambda folder: {})
    (tmp_path / "mixture").mkdir()
    result = cli("train", "--out", tmp_path / "run", "--data", tmp_path / "mixture")
    assert result.code != 0
    assert f"run pip install 'restorekv[{extra}]'." in " ".join(result.err.split())
    assert not (tmp_path / "run").exists()
