"""A server on this machine with enough of the Hugging Face hub's HTTP interface for the real client
to publish and fetch.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants as constants
import yaml

TOKEN = "good"
LICENSES = set(  # huggingface.co/docs/hub/repositories-licenses
    """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m
    bigscience-bloom-rail-1.0 bigcode-openrail-m afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause
    bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0
    cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0
    cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0
    cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0
    etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc
    h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
    openmdw-1.0 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr
    deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2
    llama3.3 llama4 grok2-community gemma unknown other
    """.split()
)


class Hub:
    """Repositories by name: whether each is private, and the commits, a list of {path: bytes}."""

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        self.commits: dict[str, list[dict[str, bytes]]] = {}
        self.messages: list[str] = []

    def files(self, repo: str) -> dict[str, bytes]:
        return self.commits[repo][-1]

    def at(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]]:
        """Return the commit's hash and its files.

        Raises KeyError if there is no such repository, and IndexError if it has no such commit.
        """
        number = len(self.commits[repo]) - 1 if revision == "main" else int(revision, 16)
        return f"{number:040x}", self.commits[repo][number]


def front_matter_errors(content: str) -> list[str]:
    """Return what the hub would find wrong with a model card."""
    front = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
    data = yaml.safe_load(front[1]) if front else {}
    errors = (
        []
        if data.get("license") in LICENSES
        else [f'"license" must be one of the list, not {data.get("license")}']
    )
    if "base_model" in data and not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", data["base_model"]):
        errors.append(
            '"base_model" with value is not valid. Use a model id from https://hf.co/models.'
        )
    if not isinstance(data.get("tags", []), list) or not all(
        isinstance(tag, str) for tag in data.get("tags", [])
    ):
        errors.append('"tags" must be an array of strings')
    return errors


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def reply(self, body: object, status: int = 200, **headers: str) -> None:
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(payload)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def refuse(self, status: int, message: str, code: str = "") -> None:
        headers = {"X_Error_Code": code, "X_Error_Message": message} if code else {}
        self.reply({"error": message}, status, **headers)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/validate-yaml":
            errors = [
                {"message": message} for message in front_matter_errors(json.loads(body)["content"])
            ]
            return self.reply({"errors": errors, "warnings": []}, 400 if errors else 200)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(401, "Invalid username or password.")
        if self.path == "/api/repos/create":
            return self.create(json.loads(body))
        repo, action = re.fullmatch(
            r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", self.path
        ).groups()
        if action == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.reply({"files": files})
        lines = [json.loads(line) for line in body.splitlines()]
        added = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        self.hub.messages.append(
            next(line["value"]["summary"] for line in lines if line["key"] == "header")
        )
        commits = self.hub.commits[repo]
        commits.append({**commits[-1], **added})
        oid = f"{len(commits) - 1:040x}"
        return self.reply(
            {
                "success": True,
                "commitOid": oid,
                "commitUrl": f"{constants.ENDPOINT}/{repo}/commit/{oid}",
            }
        )

    def create(self, asked: dict) -> None:
        repo = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] == "others":
            return self.refuse(
                403,
                "You don't have the rights to create a model under this namespace. Ask for them.",
            )
        if repo in self.hub.commits:
            return self.reply(
                {
                    "error": "You already created this model repo",
                    "url": f"{constants.ENDPOINT}/{repo}",
                },
                409,
            )
        self.hub.private[repo] = asked.get("private", asked.get("visibility") == "private")
        self.hub.commits[repo] = [{}]
        return self.reply({"url": f"{constants.ENDPOINT}/{repo}"})

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        wanted = re.fullmatch(
            r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?/?", path
        ) or re.fullmatch(r"/([^/]+/[^/]+)/(resolve)/([^/]+)/(.+)", path)
        if wanted is None:
            return self.refuse(404, f"No such page: {path}")
        repo, what, revision = wanted.groups()[:3]
        if repo not in self.hub.commits:
            return self.refuse(404, "Repository not found", "RepoNotFound")
        try:
            oid, files = self.hub.at(repo, revision or "main")
        except (IndexError, ValueError):
            return self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        if what == "resolve":
            if wanted[4] not in files:
                return self.refuse(404, "Entry not found", "EntryNotFound")
            content = files[wanted[4]]
            return self.reply(
                content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=oid
            )
        if what == "tree":
            listed = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(content),
                    "oid": hashlib.sha1(content).hexdigest(),
                }
                for name, content in files.items()
            ]
            return self.reply(listed)
        siblings = [{"rfilename": name} for name in files]
        return self.reply(
            {
                "id": repo,
                "sha": oid,
                "private": self.hub.private[repo],
                "siblings": siblings,
                "tags": [],
            }
        )

    do_HEAD = do_GET  # noqa: N815


@contextmanager
def local_hub(monkeypatch, cache) -> Iterator[Hub]:
    """Redirect the client to a server in this process for the block, with the client's cache in the
    folder `cache`.
    """
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    point_client_at(monkeypatch, f"http://127.0.0.1:{server.server_port}", cache)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def point_client_at(monkeypatch, endpoint: str, cache) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # transformers keeps a client for the endpoint of its first call, which may be that of an
    # earlier test; asking that one takes 47 seconds of retries.
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
