"""A stand-in of the hub's HTTP API on this machine, as huggingface_hub uses it: models to fetch, and uploads.

It keeps to what the hub's own answers look like: a commit for each model, ETags, weights on another host behind a
redirect, ranges, errors by `X-Error-Code`. It has no Xet, so weights go by LFS; and no limits of rates.
"""

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import huggingface_hub.constants
import huggingface_hub.file_download
import huggingface_hub.utils._http
import pytest

COMMIT = "c0ffee" * 6 + "c0de"
TOKEN = "hf_secret"


class Hub(ThreadingHTTPServer):
    """Gives what it has, and keeps what is uploaded: small files in the commit, weights by LFS's basic transfer.

    models   name -> folder, for everybody; ``gated`` are names of them that need `TOKEN`
    refuse   the status that answers every call
    made     names of repositories that were made for uploads; their ``files`` by name
    breaks   how many more answers with weights end after half of their bytes
    sent     (path, first byte) of every answer with a file; ``leaked`` whether another host was given a token
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.elsewhere = f"http://localhost:{self.server_port}"  # another host, as far as a client knows
        self.models: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.refuse = 0
        self.breaks = 0
        self.sent: list[tuple[str, int]] = []
        self.leaked = False
        self.blobs: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}
        self.made: set[str] = set()
        self.calls: list[str] = []


class Requests(BaseHTTPRequestHandler):
    server: Hub

    def _answer(self, content: Any, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        raw = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        if hub.refuse:
            self._answer({"error": "refused"}, hub.refuse)
        elif path.startswith("/weights/"):
            hub.leaked |= self.headers.get("Authorization") is not None
            self._file(hub.models, path.removeprefix("/weights/"))
        elif found := re.fullmatch(r"/api/models/(.+)/(revision|tree)/([^/]+)", path):
            self._model(*found.groups())
        elif found := re.fullmatch(rf"/(.+)/resolve/{COMMIT}/(.+)", path):
            name, file = found.groups()
            if not self._refused(name):
                self._resolve(name, file)
        else:
            self._error(404, "RepoNotFound")

    def _refused(self, name: str) -> bool:
        """Answers for a model that is not there, or not for this caller."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if name not in self.server.models:
            self._error(404 if token else 401, "RepoNotFound")
        elif name in self.server.gated and token != TOKEN:
            self._error(403 if token else 401, "GatedRepo")
        else:
            return False
        return True

    def _error(self, status: int, code: str) -> None:
        self._answer({"error": code}, status, {"X-Error-Code": code})

    def _model(self, name: str, what: str, revision: str) -> None:
        if what == "tree" and name in self.server.made:
            self._answer([{"type": "file", "path": path, "size": 1, "oid": "0"} for path in self.server.files])
            return
        if self._refused(name):
            return
        if revision not in ("main", COMMIT):
            self._error(404, "RevisionNotFound")
            return
        files = sorted(path for path in self.server.models[name].iterdir() if path.is_file())
        if what == "revision":
            siblings = [{"rfilename": file.name} for file in files]
            self._answer({"id": name, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings})
        else:
            self._answer([_entry(file) for file in files])

    def _resolve(self, name: str, file: str) -> None:
        """Small files as they are; weights by a redirect to another host, of which the client learns size and ETag."""
        path = self.server.models[name] / file
        if not path.is_file():
            self._error(404, "EntryNotFound")
        elif not _is_weights(path):
            self._file(self.server.models, f"{name}/{file}")
        else:
            linked = {"X-Linked-Size": str(path.stat().st_size), "X-Linked-Etag": f'"{_sha256(path)}"'}
            more = {**linked, "Location": f"{self.server.elsewhere}/weights/{name}/{file}", "X-Repo-Commit": COMMIT}
            self._answer("", 302, more)

    def _file(self, models: dict[str, Path], place: str) -> None:
        name, _, file = place.rpartition("/")
        raw = (models[name] / file).read_bytes()
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(found[1]) if found else 0
        self.send_response(206 if found else 200)
        self.send_header("ETag", f'"{_sha256(models[name] / file)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(raw) - first))
        if found:
            self.send_header("Content-Range", f"bytes {first}-{len(raw) - 1}/{len(raw)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        hub, stop = self.server, len(raw)
        hub.sent.append((place, first))
        if hub.breaks and _is_weights(models[name] / file):
            hub.breaks -= 1
            stop = first + (len(raw) - first) // 2
            self.close_connection = True
        self.wfile.write(raw[first:stop])

    def do_PUT(self) -> None:
        self.server.blobs[self.path.removeprefix("/blobs/")] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        body, hub = self._body(), self.server
        hub.calls.append(f"{self.path} {self.headers.get('Authorization')}")
        if hub.refuse:
            self._answer({"error": "refused"}, hub.refuse)
        elif self.path == "/api/repos/create":
            given = json.loads(body)
            hub.made.add(f"{given['organization']}/{given['name']}")
            self._answer({"url": f"{hub.address}/{given['organization']}/{given['name']}"})
        elif self.path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            self._answer({"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            ways = [{**o, "actions": {"upload": {"href": f"{hub.address}/blobs/{o['oid']}"}}} for o in objects]
            self._answer({"transfer": "basic", "objects": ways})
        elif self.path.endswith("/commit/main"):
            self._commit([json.loads(line) for line in body.splitlines()])
            self._answer({"commitUrl": f"{hub.address}/owner/tiny/commit/1", "commitOid": "1", "success": True})
        else:
            self._answer({})

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.blobs[value["oid"]]

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


def _is_weights(file: Path) -> bool:
    return file.suffix == ".safetensors"


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _entry(file: Path) -> dict[str, Any]:
    size, digest = file.stat().st_size, _sha256(file)
    lfs = {"lfs": {"oid": digest, "size": size, "pointerSize": 134}} if _is_weights(file) else {}
    return {"type": "file", "path": file.name, "size": size, "oid": digest[:40], **lfs}


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub goes on at once where it waits between tries.

    Its own modules alone: with `time.sleep` replaced everywhere, a thread that any test has left and that looks at
    something now and then would turn without end, and the others would wait for it at every step.
    """
    at_once = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    for module in (huggingface_hub.file_download, huggingface_hub.utils._http):
        monkeypatch.setattr(module, "time", at_once)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The stand-in, as this process's hub, with an empty cache."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    constants = huggingface_hub.constants
    for name, value in (("ENDPOINT", server.address), ("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True)):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    template = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + template)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
