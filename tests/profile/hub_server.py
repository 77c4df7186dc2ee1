"""A server on the loopback that speaks as much of the Hub's HTTP as reading and downloading a model needs."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RESOLVE = re.compile(r"^/([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")
_TREE = re.compile(r"^/api/models/([^/]+/[^/]+)/tree/([^/]+)$")
_MODEL = re.compile(r"^/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?$")


class HubServer(ThreadingHTTPServer):
    """Serves each subfolder ``owner/name`` of `root` as a repository, and counts what it sent.

    Attributes:
        sent: bytes of content handed to the socket, by file name.
        requests: "METHOD file" of every request for a file, in order.
        ignore_ranges: answer range requests with the whole file, as simple servers do.
        gated: repositories whose files are refused without a token.
        no_listing: know no listing of a repository's files with their sizes.
        refuse: file name -> how many of the next requests for it fail with status 500.
    """

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.sent: dict[str, int] = {}
        self.requests: list[str] = []
        self.ignore_ranges = False
        self.gated: set[str] = set()
        self.no_listing = False
        self.refuse: dict[str, int] = {}
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if found := _MODEL.match(self.path.partition("?")[0]):
            self._model(found[1], found[2])
        elif found := _TREE.match(self.path.partition("?")[0]):
            self._tree(found[1])
        elif found := _RESOLVE.match(self.path):
            self._file(*found.groups(), send=True)
        else:
            self._refuse(404, "EntryNotFound")

    def do_HEAD(self) -> None:
        found = _RESOLVE.match(self.path)
        assert found is not None
        self._file(*found.groups(), send=False)

    def _model(self, repo: str, revision: str | None) -> None:
        folder = self.server.root / repo
        if not folder.is_dir():
            return self._refuse(404, "RepoNotFound")
        if revision not in (None, "main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in self._names(folder)]}
        return self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _tree(self, repo: str) -> None:
        folder = self.server.root / repo
        if self.server.no_listing:
            return self._refuse(404, "EntryNotFound")
        tree = [
            {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": _etag(folder / name)}
            for name in self._names(folder)
        ]
        return self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})

    @staticmethod
    def _names(folder: Path) -> list[str]:
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def _file(self, repo: str, revision: str, name: str, *, send: bool) -> None:
        path = self.server.root / repo / name
        self.server.requests.append(f"{self.command} {name}")
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        if repo in self.server.gated and "Authorization" not in self.headers:
            return self._refuse(401, "GatedRepo")
        if self.server.refuse.get(name, 0) > 0:
            self.server.refuse[name] -= 1
            return self._refuse(500, "")
        size = path.stat().st_size
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        begin, end, status = 0, size, 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and not self.server.ignore_ranges:
            begin, end, status = int(wanted[1]), min(int(wanted[2] or size) + 1, size), 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        if not send:
            return self._send(status, b"", headers, length=end - begin)
        return self._stream(path, name, begin, end, status, headers)

    def _stream(self, path: Path, name: str, begin: int, end: int, status: int, headers: dict[str, str]) -> None:
        self._send(status, b"", headers, length=end - begin)
        with path.open("rb") as file:
            file.seek(begin)
            while begin < end:
                content = file.read(min(64 * 1024, end - begin))
                # Counted first: the client may have it, and the test look at the count, before write() returns.
                self.server.sent[name] = self.server.sent.get(name, 0) + len(content)
                try:
                    self.wfile.write(content)
                except OSError:  # the client had enough
                    self.close_connection = True
                    return
                begin += len(content)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, content: bytes, headers: dict[str, str], length: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Stay silent."""


def _etag(path: Path) -> str:
    return hashlib.sha1(f"{path.name}{path.stat().st_size}".encode()).hexdigest()
