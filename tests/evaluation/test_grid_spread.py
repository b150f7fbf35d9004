"""The grid over Ray: the files of a run in this process, whatever happens to a worker."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.evaluation import results
from restorekv.evaluation.grid import group_jobs
from restorekv.evaluation.ray_pool import TRIES, RayPool, RayWorker
from restorekv.evaluation.run import run_grid
from tests.helpers.grid_world import contents, grid, save_world
from tests.helpers.workers import children, running

BENCHMARK = "tiny:count=6,low=100,high=160"


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_tokenizer):
    """A tiny model and an adapter, under relative names."""
    return save_world(tmp_path_factory.mktemp("spread"), tiny_tokenizer, "free")


@pytest.fixture(autouse=True)
def relative(world, monkeypatch):
    monkeypatch.chdir(world)


CELLS = grid("model", BENCHMARK, ("kvzip", "knorm"), ("0.5", "0.3"), (None, "adapter"))


@pytest.fixture(scope="module")
def here(world):
    """The files of the run in this process, with the warnings."""
    before = os.getcwd()
    os.chdir(world)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RestoreKVWarning)
        run_grid(CELLS, world / "here")
    os.chdir(before)
    return contents(world / "here"), sorted({str(each.message) for each in caught})


@pytest.fixture(scope="module")
def pool(world):
    """Two local workers, and a count of those that were hired since."""
    pytest.importorskip("ray", reason="ray is not installed; the extra 'ray' is part of 'dev'")
    before = os.getcwd()
    os.chdir(world)
    with RayPool(2) as opened:
        os.chdir(before)
        hire, opened.hired = opened._start_worker, 0

        def counted():
            opened.hired += 1
            hire()

        opened._start_worker = counted
        yield opened
    assert not opened.ray.is_initialized()


@pytest.fixture
def hired(pool):
    """How many workers had to be replaced in this test."""
    pool.hired = 0
    return lambda: pool.hired


@pytest.mark.slow
def test_a_worker_killed_in_the_middle(pool, hired, here, tmp_path, monkeypatch):
    """SIGKILL while it answers: that is done again by another, and the files are those of this
    process.
    """
    answers, killed = pool.answer_contexts, []

    def killing(job, missing):
        process = pool.ray.get(pool.idle[0].report_ready.remote())
        for turn, lines in enumerate(answers(job, missing)):
            if turn == 1 and not killed:
                os.kill(process, signal.SIGKILL)
                killed.append(process)
            yield lines

    monkeypatch.setattr(pool, "answer_contexts", killing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RestoreKVWarning)
        run_grid(CELLS, tmp_path, pool)
    assert len(killed) == hired() == 1
    assert (contents(tmp_path), sorted({str(each.message) for each in caught})) == here
    assert here[1], "the adapter is for the prefix policy free"


def test_a_node_with_another_model_under_the_same_name_is_refused(world):
    """Else its answers would be recorded as those of the model that opened the job."""
    (job,) = group_jobs(CELLS[-1:])
    (cell,) = job.cells
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opener, worker = (RayWorker("cpu", 1, os.getcwd()) for _ in range(2))
        identities, digests = opener.open_job(job)
        sample = next(iter(digests))
        other = {cell: {**identities[cell], "fingerprint": "0123"}}
        with pytest.raises(RestoreKVError, match=r"differs .*: fingerprint 0123 \(now \w+\)"):
            worker.answer_context(job, sample, [cell], other)
        # Nor does it answer when it is asked again.
        with pytest.raises(RestoreKVError, match="Give every node of the Ray cluster"):
            worker.answer_context(job, sample, [cell], other)
        ((_, line, _),) = worker.answer_context(job, sample, [cell], identities)
    assert line["sample"] == sample


@pytest.mark.slow
def test_what_was_begun_here_is_ended_there(pool, here, tmp_path):
    done = run_grid(CELLS[:3], tmp_path)
    answers = done[2].folder / results.ANSWERS
    answers.write_bytes(
        b"".join(answers.read_bytes().splitlines(keepends=True)[:4]) + b'{"sample": "4", "tok'
    )
    (done[2].folder / results.SUMMARY).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_grid(CELLS, tmp_path, pool)
    assert contents(tmp_path) == here[0]


@pytest.mark.slow
def test_a_mistake_is_one_sentence_and_costs_no_worker(pool, hired, tmp_path):
    for cells, said in [
        (grid("model", BENCHMARK, adapters=("nowhere",)), "nowhere"),
        (grid("no/such/model", BENCHMARK), "no/such/model"),
        (grid("model", BENCHMARK, max_context=3), "no room for a text"),
    ]:
        with pytest.raises(RestoreKVError, match=said) as raised:
            run_grid(cells, tmp_path, pool)
        assert "\n" not in str(raised.value) and "Traceback" not in str(raised.value)
    assert hired() == 0 and not list(tmp_path.rglob(results.ANSWERS))


@pytest.mark.slow
def test_a_call_that_kills_every_worker_ends_the_run(pool, hired):
    with pytest.raises(
        RestoreKVError, match=f"{TRIES} workers died over the same context; give .*[.]$"
    ) as raised:
        list(
            pool.run_calls([("report_ready", ()), ("__ray_terminate__", ()), ("report_ready", ())])
        )
    assert "\n" not in str(raised.value) and hired() == TRIES
    assert len(list(pool.run_calls([("report_ready", ())] * 9))) == 9, "the pool goes on"


@pytest.mark.slow
def test_a_bug_keeps_its_kind(pool, hired):
    job = group_jobs(CELLS)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool.open_job(job)
    with pytest.raises(KeyError, match="no such sample"):
        list(pool.answer_contexts(job, [("no such sample", CELLS[:1])]))
    assert hired() == 0 and len(list(pool.run_calls([("report_ready", ())] * 9))) == 9, (
        "the pool goes on"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"workers": 0}, "at least 1 worker"),
        ({"threads": 0}, "1 thread"),
    ],
)
def test_numbers_that_make_no_sense(given, said):
    with pytest.raises(RestoreKVError, match=said):
        RayPool(**given)


def test_ray_missing_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        RestoreKVError, match=r"needs the package ray; run pip install 'restorekv\[ray\]'\.$"
    ):
        RayPool(1)


PROGRAM = """
import sys
from pathlib import Path
from tests.helpers.grid_world import grid
from restorekv.evaluation.run import run_grid
from restorekv.evaluation.ray_pool import RayPool
folder, address, device, count = sys.argv[1:]
try:
    with RayPool(2, address, device) as pool:
        cells = grid("model", f"tiny:count={count},low=100,high=160", ("kvzip",), ("0.5",))
        run_grid(cells, Path(folder), pool, lambda progress: print(progress.done, flush=True))
except ValueError as error:
    sys.exit(str(error))
"""


def program(*given: object, **environment: str) -> subprocess.Popen:
    place = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, given)],
        env=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.slow
def test_ctrl_c_leaves_no_process(world, tmp_path):
    with program(tmp_path, "local", "cpu", 400) as process:
        while process.stdout.readline().strip() != b"2":
            assert process.poll() is None, process.stderr.read()
        started = children(process.pid)
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode in (1, 130, -signal.SIGINT) and started
    time.sleep(3)
    assert not [child for child in started if running(child)]
    assert all(result.lines for result in results.load_results(tmp_path))


@contextmanager
def cluster(own: dict[str, str]):
    """The address of a running cluster of two CPUs, which ends with the block; `own` is in its
    environment.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        Path(sys.executable).with_name("ray"),
        "start",
        "--head",
        "--block",
        f"--port={port}",
        "--num-cpus=2",
    ]
    command += ["--include-dashboard=false", "--disable-usage-stats"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env={**os.environ, **own}, start_new_session=True, **quiet)
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None, "the cluster does not start"
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        started = children(process.pid)
        process.terminate()
        process.wait(60)
        for child in filter(running, started):
            os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_cluster_that_runs(world, tmp_path):
    """Connected to by its address; without GPUs, and where none is, there is one sentence."""
    # Of this cluster alone.
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with cluster(own) as address:
        for device, said in (
            ("cpu", ""),
            ("cuda", "No node of the Ray cluster has the 1 CPUs and 1 GPUs of a worker."),
        ):
            with program(tmp_path / device, address, device, 3, **own) as process:
                error = process.communicate(timeout=300)[1].decode().strip()
            assert error.endswith(said) and (process.returncode == 0) is not bool(said), error
        assert all(result.done for result in results.load_results(tmp_path / "cpu"))


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "nowhere:port"])
def test_no_cluster_is_one_sentence(address):
    with pytest.raises(
        RestoreKVError, match=f"^There is no Ray cluster at {address} .*, or use local[.]$"
    ) as raised:
        RayPool(1, address)
    assert "\n" not in str(raised.value)
