"""A package index on the loopback interface that can misbehave in the ways that real ones do."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

JSON_TYPE = "application/vnd.pypi.simple.v1+json"


@dataclass(frozen=True)
class Answer:
    """How one request for a file is answered. The default is a correct answer."""

    status: int = 200
    #: Sent instead of the file.
    body: bytes | None = None
    #: The connection is cut after that many bytes of the answer.
    cut: int | None = None
    framing: Literal["length", "chunked", "close"] = "length"
    ranges: bool = True
    etag: str | None = '"v1"'
    content_type: str = "application/octet-stream"
    #: Sent instead of the Content-Range that fits.
    content_range: str | None = None
    #: Bytes per write.
    chunk: int = 1 << 16
    #: Waited for before the body is sent.
    gate: threading.Event | None = None


@dataclass
class IndexServer:
    """What the server has, how it answers, and what it was asked."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    #: Files of other projects, by project; these have plain pages.
    other: dict[str, dict[str, bytes]] = field(default_factory=dict)
    #: What pages say of a file's hash; the truth where a file is not named, nothing where it is None.
    advertised: dict[str, str | None] = field(default_factory=dict)
    style: Literal["html", "json"] = "html"
    #: Why files are yanked, by name.
    yanked: dict[str, str] = field(default_factory=dict)
    #: Whether a JSON page says how large files are, and whether a request for headers alone is answered.
    sizes: bool = False
    heads: bool = True
    #: Prefix of the links on pages.
    links: str = "../../files/"
    #: Answers to the next requests for pages (statuses) and files; afterwards all is well.
    page_statuses: list[int] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    #: Path and headers of each request.
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    @property
    def index(self) -> str:
        """The URL of the index."""
        return f"{self.url}/simple"

    @property
    def file_requests(self) -> list[dict[str, str]]:
        """The headers of the requests for files."""
        return [headers for path, headers in self.requests if path.startswith("/files/")]

    def page(self) -> tuple[str, bytes]:
        """Return type and text of the project's page."""
        digests = {
            name: self.advertised.get(name, hashlib.sha256(data).hexdigest())
            for name, data in self.files.items()
        }
        if self.style == "json":
            files = [
                {
                    "filename": name,
                    "url": self.links + name,
                    "hashes": {"sha256": digest} if digest else {},
                    "yanked": self.yanked.get(name, False),
                    **({"size": len(self.files[name])} if self.sizes else {}),
                }
                for name, digest in digests.items()
            ]
            page = {"meta": {"api-version": "1.0"}, "name": "demo", "files": files}
            return JSON_TYPE, json.dumps(page).encode()
        anchors = [
            f'<a href="{self.links}{name}{f"#sha256={digest}" if digest else ""}"{yanked}>{name}</a>'
            for (name, digest), yanked in zip(digests.items(), map(self._yank, digests), strict=True)
        ]
        return "text/html", f"<!DOCTYPE html><html><body>{''.join(anchors)}</body></html>".encode()

    def _yank(self, name: str) -> str:
        return f' data-yanked="{self.yanked[name]}"' if name in self.yanked else ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: IndexServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the signature of http.server
        """Keep the output of the tests clean."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.state.requests.append((path, {key.lower(): value for key, value in self.headers.items()}))
        if path == "/simple/demo/":
            self._page()
        elif path.startswith("/simple/") and path.split("/")[2] in self.state.other:
            names = self.state.other[path.split("/")[2]]
            self._send_page(
                "text/html", "".join(f'<a href="../{name}">{name}</a>' for name in names).encode()
            )
        elif path.startswith("/files/") and path[7:] in self.state.files:
            self._file(
                self.state.files[path[7:]], self.state.answers.pop(0) if self.state.answers else Answer()
            )
        else:
            self.send_error(404)

    def do_HEAD(self) -> None:
        path = urlsplit(self.path).path
        self.state.requests.append((path, {key.lower(): value for key, value in self.headers.items()}))
        data = self.state.files.get(path.removeprefix("/files/"))
        if not self.state.heads or data is None:
            self.send_error(405 if data is not None else 404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()

    def _page(self) -> None:
        status = self.state.page_statuses.pop(0) if self.state.page_statuses else 200
        if status != 200:
            self.send_error(status)
            return
        self._send_page(*self.state.page())

    def _send_page(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, data: bytes, answer: Answer) -> None:
        body = data if answer.body is None else answer.body
        start = self._start(answer)
        if start is not None and start >= len(body):
            self.send_error(416)
            return
        self.send_response(answer.status if start is None else 206)
        self.send_header("Content-Type", answer.content_type)
        if answer.etag:
            self.send_header("ETag", answer.etag)
        if start is not None:
            fits = f"bytes {start}-{len(body) - 1}/{len(body)}"
            self.send_header("Content-Range", answer.content_range or fits)
        self._send(body[start or 0 :], answer)

    def _start(self, answer: Answer) -> int | None:
        wanted = self.headers.get("Range", "")
        condition = self.headers.get("If-Range")
        if not wanted or not answer.ranges or answer.status != 200 or condition not in (None, answer.etag):
            return None
        return int(wanted.removeprefix("bytes=").removesuffix("-"))

    def _send(self, body: bytes, answer: Answer) -> None:
        if answer.framing == "length":
            self.send_header("Content-Length", str(len(body)))
        elif answer.framing == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        if answer.framing == "close" or answer.cut is not None:
            self.send_header("Connection", "close")
        self.end_headers()
        if answer.gate:
            answer.gate.wait(30)
        sent = body if answer.cut is None else body[: answer.cut]
        for offset in range(0, len(sent), answer.chunk):
            block = sent[offset : offset + answer.chunk]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(block), block) if answer.framing == "chunked" else block)
        if answer.framing == "chunked" and answer.cut is None:
            self.wfile.write(b"0\r\n\r\n")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up in the middle is part of the tests."""


@contextmanager
def serve() -> Iterator[IndexServer]:
    """Run a server while the block runs."""
    state = IndexServer()
    handler = type("Handler", (_Handler,), {"state": state})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def only_source(monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexServer]:
    """Run a server that is the only package source that pip's configuration names."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with serve() as running:
        running.style, running.sizes = "json", True
        monkeypatch.setenv("PIP_INDEX_URL", running.index)
        yield running
