"""The connector inside the real vLLM, in process and as a server: `make vllm`, in an environment of its own."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

vllm = pytest.importorskip("vllm")

from restorekv import compress, load_model  # noqa: E402
from restorekv.vllm import prompt, transfer_config  # noqa: E402

pytestmark = pytest.mark.slow
NAMES = ("Ada", "Bob", "Eve", "Dan", "Ida", "Kim", "Leo", "Max", "Ned", "Uma")
QUESTIONS = [
    "Who owns the red house?", "What is the code of the red house?", "How many trees are in the garden?",
    "Is there a well?", "What does the owner of the red house do?", "Who owns the blue house?",
    "What is in the garden?",
    "What color is the house?", "Which number is the code?", "What is the text about?",
]  # fmt: skip
TOKENS = 24
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Ten documents of one length, and the answers that restorekv gives from the same portable caches."""
    os.environ.update(ENVIRONMENT)
    model, tokenizer = load_model("smollm2")
    folder = str(tmp_path_factory.mktemp("model"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    store, documents, expected = tmp_path_factory.mktemp("store"), [], []
    for number, name in enumerate(NAMES):
        facts = f"The red house belongs to {name}. Its code is {number * 37 + 112}. The garden has {number + 3} trees. "
        options = {"evictor": "snapkv", "adapter": None, "tokens_per_head": 60, "allocation": "per-head"}
        portable = compress(model, tokenizer, facts * 5, **options).portable()
        portable.save(store / f"{name}.safetensors")
        documents.append(portable)
        expected.append(portable.ask(model, tokenizer, QUESTIONS, TOKENS))
    assert len({document.tokens for document in documents}) == 1
    return store, documents, expected, tokenizer, folder


@pytest.fixture(scope="module", params=[True, False], ids=["prefix caching", "no prefix caching"])
def engine(request, world):
    llm = vllm.LLM(
        world[4], dtype="float32", enforce_eager=True, max_model_len=1024,
        kv_transfer_config=transfer_config(world[0]), enable_prefix_caching=request.param,
    )  # fmt: skip
    yield llm
    llm.llm_engine.engine_core.shutdown()


def texts(engine, prompts, **options):
    params = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, **options)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [(output.outputs[0].text, output.outputs[0].finish_reason) for output in outputs]


def test_answers_equal_those_of_ask_in_mixed_batches_and_alone(world, engine):
    _, documents, expected, tokenizer, _ = world
    rows = [(number, place) for place in range(len(QUESTIONS)) for number in range(len(documents))]
    prompts = [prompt(documents[number], QUESTIONS[place], tokenizer) for number, place in rows]
    answers = [text for text, _ in texts(engine, prompts)]
    assert answers == [expected[number][place] for number, place in rows]  # 100 of 100
    for number, place in rows[::17]:
        alone = texts(engine, [prompt(documents[number], QUESTIONS[place], tokenizer)])
        assert alone[0][0] == expected[number][place]


def test_an_unknown_document_ends_its_request_alone(world, engine):
    _, documents, expected, tokenizer, _ = world
    good, bad = prompt(documents[0], QUESTIONS[1], tokenizer), prompt(documents[1], QUESTIONS[1], tokenizer)
    bad[10] = (bad[10] + 1) % 1000
    named = {"extra_args": {"kv_transfer_params": {"document": NAMES[2]}}}
    answers = texts(engine, [bad, good, bad])
    assert [text for text, _ in answers] == ["", expected[0][1], ""]
    assert (answers[0][1], answers[2][1]) == ("error", "error")
    assert texts(engine, [good], **named)[0] == ("", "error")  # the prompt asks another document than the request names
    plain = tokenizer.encode("The sea is")
    assert texts(engine, [plain])[0][0]


def test_documents_survive_eviction_from_a_small_cache(world):
    """Blocks for three documents at a time: the others are loaded again when they are asked again."""
    store, documents, expected, tokenizer, folder = world
    llm = vllm.LLM(
        folder, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=2,
        kv_transfer_config=transfer_config(store), enable_prefix_caching=True, num_gpu_blocks_override=8,
    )  # fmt: skip
    for _ in range(2):
        answers = texts(llm, [prompt(document, QUESTIONS[1], tokenizer) for document in documents])
        assert [text for text, _ in answers] == [answer[1] for answer in expected]
    llm.llm_engine.engine_core.shutdown()


def test_through_vllms_own_server(world):
    store, documents, expected, tokenizer, folder = world
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port",
        "8765", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--kv-transfer-config",
        json.dumps(transfer_config(store)),
    ]  # fmt: skip
    server = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.DEVNULL)
    try:
        for _ in range(180):
            try:
                urllib.request.urlopen("http://127.0.0.1:8765/health", timeout=2)
                break
            except (urllib.error.URLError, OSError):
                assert server.poll() is None, "the server ended"
                time.sleep(1)
        for number in range(0, len(documents), 3):
            ids = prompt(documents[number], QUESTIONS[1], tokenizer)
            body = {"model": folder, "prompt": ids, "max_tokens": TOKENS, "temperature": 0}
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request("http://127.0.0.1:8765/v1/completions", json.dumps(body).encode(), headers)
            answer = json.load(urllib.request.urlopen(request, timeout=60))
            assert answer["choices"][0]["text"] == expected[number][1]
    finally:
        server.terminate()
        server.wait(30)
