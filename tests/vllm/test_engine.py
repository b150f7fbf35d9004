"""The connector inside the real vLLM: `make vllm`, which uses a separate environment."""

import urllib.error

import pytest

from restorekv.vllm import chat, prompt
from tests.helpers.engine import (
    TOKENS,
    answers,
    ask,
    ask_and_leave,
    engine,
    make_world,
    post,
    server,
    without_halves,
)
from tests.helpers.models import build_model, build_tokenizer

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
BLOCK = 32  # the fewest tokens of a block on a CPU


@pytest.fixture(scope="module", params=[True, False], ids=["prefix caching", "no prefix caching"])
def llm(request, world):
    with engine(world, enable_prefix_caching=request.param) as llm:
        yield llm


def test_answers_equal_those_of_ask_in_mixed_batches_and_alone(world, llm):
    rows = [
        (number, place)
        for place in range(len(world.questions))
        for number in range(len(world.documents))
    ]
    found = answers(llm, [world.prompt(*row) for row in rows])
    assert found == [world.expected[number][place] for number, place in rows]  # 100 of 100
    for number, place in rows[::17]:
        assert answers(llm, [world.prompt(number, place)]) == [world.expected[number][place]]


def test_an_unknown_document_ends_its_request_alone(world, llm):
    good, bad = world.prompt(0, 1), world.prompt(1, 1)
    bad[10] = (bad[10] + 1) % 1000
    named = {"extra_args": {"kv_transfer_params": {"document": "Eve"}}}
    outputs = ask(llm, [bad, good, bad])
    assert [output.text for output in outputs] == ["", world.expected[0][1], ""]
    assert (outputs[0].finish_reason, outputs[2].finish_reason) == ("error", "error")
    other = ask(llm, [good], **named)[0]  # the prompt asks another document than the request names
    assert (other.text, other.finish_reason) == ("", "error")
    short = ask(llm, [good[-1:]], **named)[0]  # one token, of which nothing can be promised
    assert (short.text, short.finish_reason) == ("", "error")
    assert answers(llm, [world.tokenizer.encode("The sea is")])[0]


def test_a_refusal_leaves_nothing_in_the_prefix_cache(world):
    """vLLM takes a request's blocks into its prefix cache at once if nothing is loaded for it."""
    plain = [(7 * place) % 200 + 5 for place in range(2 * BLOCK + 1)]
    named = {"extra_args": {"kv_transfer_params": {"document": "Ada"}}}
    path = world.store / "Ada.safetensors"
    with engine(world, block_size=BLOCK) as llm:
        path.rename(path.with_suffix(".away"))
        try:
            ask_and_leave(llm, world.prompt(0, 1))
        finally:
            path.with_suffix(".away").rename(path)
        rows = [world.prompt(0, place) for place in range(len(world.questions))]
        assert answers(llm, rows) == world.expected[0]
        # Asked before without a document: vLLM has all blocks but that of the last token.
        assert ask(llm, [plain])[0].finish_reason == "length"
        assert ask(llm, [plain], **named)[0].finish_reason == "error"


def test_who_wants_the_prompts_likelihoods_is_refused(world, llm):
    """vLLM would compute the placeholders itself, as if they were a text."""
    plain = world.tokenizer.encode("The sea is")
    found = ask(llm, [world.prompt(0, 1), plain], prompt_logprobs=1)
    assert [each.finish_reason for each in found] == ["error", "length"]
    assert answers(llm, [world.prompt(0, 1)]) == [world.expected[0][1]]


def test_documents_survive_eviction_from_a_small_cache(world):
    """Blocks for three documents at a time: the others are loaded again when they are asked
    again.
    """
    small = {"max_model_len": 512, "max_num_seqs": 2, "num_gpu_blocks_override": 8}
    with engine(world, enable_prefix_caching=True, **small) as llm:
        for _ in range(2):
            found = answers(
                llm, [world.prompt(number, 1) for number in range(len(world.documents))]
            )
            assert found == [row[1] for row in world.expected]


@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "no prefix caching"])
def test_preempted_requests_resume_with_their_document(tmp_path, caching):
    """Blocks in which two requests can begin and only one can end."""
    texts = {
        color: f"The code of the {color} house is seven; nobody lives there. " * 3
        for color in ("red", "blue")
    }
    model = build_model("llama", hidden_size=128, head_dim=32)
    # Answers that take two blocks more.
    options = {"evictor": "knorm", "tokens_per_head": 40, "tokens": 2 * BLOCK}
    world = make_world(
        tmp_path, model, build_tokenizer(), texts, ["Which code?", "who lives there?"], **options
    )
    rows = [(number, place) for number in range(2) for place in range(2)]
    first = -(-max(len(world.prompt(*row)) for row in rows) // BLOCK)
    small = {
        "block_size": BLOCK,
        "max_model_len": BLOCK * (first + 3),
        "num_gpu_blocks_override": 2 * first + 2,
    }
    with engine(world, enable_prefix_caching=caching, disable_log_stats=False, **small) as llm:
        before = preemptions(llm)
        found = answers(llm, [world.prompt(*row) for row in rows], max_tokens=options["tokens"])
        assert preemptions(llm) > before
    assert without_halves(found) == without_halves(
        [world.expected[number][place] for number, place in rows]
    )


def test_a_file_that_became_another_ends_the_request_that_waits_for_it(tmp_path):
    """While vLLM takes steps, its thread reads the file, and finds a different document in it."""
    texts = {
        color: f"The code of the {color} house is seven; nobody lives there. " * 3
        for color in ("red", "blue")
    }
    model = build_model("llama", hidden_size=128, head_dim=32)
    world = make_world(
        tmp_path,
        model,
        build_tokenizer(),
        texts,
        ["Which code?"],
        evictor="knorm",
        tokens_per_head=40,
    )
    with engine(world) as llm:
        (world.store / "red.safetensors").write_bytes(
            (world.store / "blue.safetensors").read_bytes()
        )
        outputs = ask(llm, [world.prompt(0, 0), world.prompt(1, 0)])
        assert (outputs[0].text, outputs[0].finish_reason) == ("", "error")
        found = [outputs[1].text, *answers(llm, [world.prompt(1, 0)])]
        assert without_halves(found) == without_halves([world.expected[1][0]] * 2)


def test_positions_are_those_of_the_text(tmp_path):
    """A question beyond the model's last position ends its request, and answers end there."""
    text = "The code of the red house is seven; nobody lives there. " * 12
    world = make_world(
        tmp_path,
        build_model("llama", hidden_size=128, head_dim=32, max_position_embeddings=512),
        build_tokenizer(),
        {"red": text},
        ["Which code?"],
        evictor="knorm",
        tokens_per_head=40,
    )
    document = world.documents[0]
    ids = world.prompt(0, 0)
    room = 512 - document.manifest.positions - (len(ids) - document.tokens)
    assert TOKENS < room < 300
    too_long = prompt(document, "Which code?" + "Q" * (room + 1), world.tokenizer)
    with engine(world, max_model_len=512) as llm:
        found = ask(llm, [too_long, ids], max_tokens=room + 50, ignore_eos=True)
        assert [each.finish_reason for each in found] == ["error", "length"]
        assert len(found[1].token_ids) == room
        assert without_halves(answers(llm, [ids])) == without_halves(world.expected[0])


def preemptions(llm) -> float:
    return sum(
        metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
    )


def test_through_vllms_own_server(world):
    with server(world):
        for number in range(0, len(world.documents), 3):
            body = {"model": world.folder, "max_tokens": TOKENS, "temperature": 0}
            asked = chat(world.documents[number], world.questions[1], world.tokenizer)
            told = post("chat/completions", {**body, **asked})["message"]["content"]
            assert told == world.expected[number][1]
            assert post("completions", {**body, "prompt": world.prompt(number, 1)})["text"] == told
        del asked["kv_transfer_params"]["prompt_token_ids"]
        with pytest.raises(urllib.error.HTTPError):  # named, and not in the prompt
            post("chat/completions", {**body, **asked})
