"""A model hub on a loopback port: the requests that ``huggingface_hub`` makes for files of a repository."""

from __future__ import annotations

import hashlib
import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class Repository:
    """Files of one commit; ``error`` is an HTTP status for every request, with the hub's own code."""

    def __init__(self, files: dict[str, bytes], *, error: tuple[int, str] | None = None) -> None:
        self.files = files
        self.error = error
        self.commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.sizes: dict[str, int] = {}
        """Announced sizes that are not the real ones."""
        self.truncated: dict[str, int] = {}
        """How many bytes of a file come before the connection closes."""

    def tree(self, folder: str) -> list[dict[str, Any]]:
        """The entries of a folder, folders included."""
        entries: dict[str, dict[str, Any]] = {}
        prefix = f"{folder}/" if folder else ""
        for name, data in self.files.items():
            if name.startswith(prefix):
                first, _, below = name.removeprefix(prefix).partition("/")
                path = prefix + first
                kind = (
                    {"type": "directory", "oid": "0" * 40} if below else {"type": "file", "oid": _etag(data)}
                )
                entries[path] = {
                    **kind,
                    "path": path,
                    "size": 0 if below else self.sizes.get(name, len(data)),
                }
        return list(entries.values())


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


class StandInHub:
    """``repositories`` by name; ``requests`` are the lines that came, ``hold`` lets files wait while set."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.tokens: list[str | None] = []
        self.hold = threading.Event()
        self.hold.set()
        self.url = ""
        self.unpacks_to = 0
        """Bytes to which a repository's description unpacks; 0: it is sent as it is."""

    def fetched(self) -> set[str]:
        """The names of all files that were sent."""
        sent = [line for line in self.requests if line.startswith("GET ") and "/resolve/" in line]
        return {line.rpartition("/")[2] for line in sent}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: StandInHub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        hub.tokens.append(self.headers.get("authorization"))
        org, name, what, *rest = path.removeprefix("/api/models").removeprefix("/").split("/")
        repository = hub.repositories.get(f"{org}/{name}")
        if repository is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif repository.error is not None:
            status, code = repository.error
            self._send(status, b"{}", {"X-Error-Code": code} if code else {})
        elif what == "revision":
            self._revision(f"{org}/{name}", repository, "/".join(rest))
        elif what == "tree":
            self._send(200, json.dumps(repository.tree("/".join(rest[1:]))).encode(), {})
        else:
            self._file(repository, "/".join(rest[1:]))

    def _revision(self, name: str, repository: Repository, revision: str) -> None:
        if revision not in {"main", repository.commit}:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        card = {"_id": "0", "id": name, "sha": repository.commit, "siblings": []}
        data = json.dumps(card).encode()
        if (size := self.server.hub.unpacks_to) > 0:
            packer = zlib.compressobj(9, zlib.DEFLATED, -15)
            # Blocks that refer to nothing before them: the same bytes unpack to the same again.
            blank = packer.compress(b" " * (1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
            packed = blank * (size >> 20) + packer.compress(data) + packer.flush(zlib.Z_FINISH)
            self._send(200, packed, {"Content-Encoding": "deflate"})
            return
        self._send(200, data, {})

    def _file(self, repository: Repository, name: str) -> None:
        data = repository.files[name]
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            self._send(200, b"", headers, len(data))
            return
        self.server.hub.hold.wait()
        self._send(200, data[: repository.truncated.get(name, len(data))], headers, len(data))
        self.close_connection = name in repository.truncated

    def _send(self, status: int, data: bytes, headers: dict[str, str], length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def stand_in_hub() -> Iterator[StandInHub]:
    """Serve on a free port."""
    hub = StandInHub()
    server = _Server(hub)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


def repository_of(folder: Path, **more: bytes) -> Repository:
    """Files of a directory, with weights and code beside them that must not be fetched."""
    files = {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}
    others = {"model.safetensors": b"weights", "README.md": b"text", "modeling.py": b"1/0"}
    return Repository({**files, **others, **more})
