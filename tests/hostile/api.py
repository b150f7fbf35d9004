"""The campaign of Schemathesis against the server's own description: `python -m tests.hostile.api
--minutes 30 --seed 0`.

A real process serves the tiny model and holds a few documents. Schemathesis (the extra `dev`) makes
valid and invalid requests from `/openapi.json`, alone and in sequence. It is a failure if an answer
has a status of 500 or more, or a status, header, content type or schema that the description does
not have, or if there is no answer for 60 seconds. That every request that the schema allows is
accepted is not checked, because the order of messages is described in sentences, not in the schema.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.hostile.serve import Server, asked, upload

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,unsupported_method,allow_header_conformance,use_after_free,nothing_is_ignored"
)
HOOKS = Path(__file__).with_name("api_hooks.py")
SILENCE = 60  # seconds


def run(folder: Path, seconds: int, seed: int) -> int:
    """Run the campaign and return the number of failures."""
    server = Server(folder / "store", "--memory", "4M")
    try:
        server.wait()
        client = server.client()
        names = [upload(client, number) for number in range(3)]
        broken = client.files.create(file=("broken.rkv", b"no cache"), purpose="user_data").id
        for name in (*names, broken):
            client.files.wait_for_processing(name, poll_interval=0.1)
        before = client.chat.completions.create(**asked(names[0], 0)).choices[0].message.content
        report, output = folder / "report.json", folder / "output.txt"
        command = [
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"http://127.0.0.1:{server.port}/openapi.json",
            "--max-time",
            str(seconds),
            "--seed",
            str(seed),
            "--checks",
            CHECKS,
            "--request-timeout",
            str(SILENCE),
            "--continue-on-failure",
            "--no-color",
            "--report",
            "json",
            "--report-json-path",
            str(report),
        ]
        environment = {
            **os.environ,
            "SCHEMATHESIS_HOOKS": str(HOOKS),
            "RESTOREKV_FILES": " ".join([*names, broken]),
        }
        with output.open("w") as written:
            subprocess.run(
                command,
                stdout=written,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                check=False,
            )
        after = client.chat.completions.create(**asked(names[0], 0)).choices[0].message.content
        figures = client.get("/../metrics", cast_to=str).splitlines()
        answered = next(
            line.split()[1] for line in figures if line.startswith("restorekv_questions_total ")
        )
        pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    finally:
        server.stop()
    if not report.exists():
        sys.exit(output.read_text()[-2000:])
    found = json.loads(report.read_text())
    cases, operations = found["test_cases"], found["operations"]
    wrong = cases["unique_failures"] + cases["errored"] + (before != after)
    if wrong:
        print(output.read_text())
    same = "as" if before == after else "NOT as"
    print(
        f"{operations['tested']} of {operations['total']} operations, {cases['generated']:,} "
        f"cases, {wrong} failures"
    )
    print(
        f"seed {seed}, {found['running_time']:.0f} s; {float(answered):.0f} questions answered, "
        f"the last {same} the "
        f"first; process {pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.0f} MB",
        flush=True,
    )
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="restorekv-api-") as folder:
        wrong = run(Path(folder), round(60 * given.minutes), given.seed)
    sys.exit(f"{wrong} failures" if wrong else 0)


if __name__ == "__main__":
    main()
