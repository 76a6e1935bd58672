"""Files by URL: only what is asked for is fetched, from a local server; what goes wrong is an error with a code."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import rsv_format
from rsv_cli.app import app
from rsv_format import RsvError, TensorData, remote

pytest.importorskip("aiohttp")


class Server(ThreadingHTTPServer):
    """One file; what it sent, and how it fails."""

    def __init__(self, data: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.data, self.sent, self.ranges, self.failures, self.etag = data, 0, True, 0, '"1"'
        self.url = f"http://127.0.0.1:{self.server_port}/model.rsv"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, body: bool) -> None:
        server, data, status = self.server, self.server.data, 200
        if server.failures:
            server.failures -= 1
            self.send_error(503)
            return
        if self.path != "/model.rsv":
            self.send_error(404)
            return
        if server.ranges and "Range" in self.headers:
            start, stop = self.headers["Range"].removeprefix("bytes=").split("-")
            data, status = data[int(start) : int(stop) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", server.etag)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop}/{len(server.data)}")
        self.end_headers()
        for at in range(0, len(data) if body else 0, 2**14):
            server.sent += len(data[at : at + 2**14])  # before who asked can look
            try:
                self.wfile.write(data[at : at + 2**14])
            except OSError:
                return


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(remote, "_PAUSE", 0.001)
    big = np.arange(2**24, dtype="u1")
    rsv_format.write(
        tmp_path / "a.rsv", tensors={"big": TensorData("u8", big), "small": TensorData("u8", np.arange(9, dtype="u1"))}
    )
    with Server((tmp_path / "a.rsv").read_bytes()) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_only_what_is_asked_for_is_fetched(server: Server, tmp_path: Path) -> None:
    with rsv_format.open(server.url) as file:
        assert file.nbytes == len(server.data) and list(file.tensors) == ["big", "small"]
        header = 64 + file.header_nbytes
        assert header <= server.sent < header + 64
        before = server.sent
        assert file.tensors["small"].array.tolist() == list(range(9)) and server.sent == before + 9
        file.check_unchanged()
    for arguments in (["info", server.url], ["ls", server.url], ["cat", server.url, "small", "-o", tmp_path / "s.npy"]):
        server.sent = 0
        result = CliRunner().invoke(app, [str(x) for x in arguments])
        assert result.exit_code == 0 and server.sent < 4096, result.output
    assert np.load(tmp_path / "s.npy").tolist() == list(range(9))
    for arguments in (["verify", server.url], ["export", server.url, "-o", tmp_path / "d.safetensors"]):
        result = CliRunner().invoke(app, [str(x) for x in arguments])
        assert result.exit_code == 0, result.output
    assert (tmp_path / "d.safetensors").stat().st_size > 2**24


def failing(server: Server, word: str) -> None:
    with pytest.raises(RsvError) as e, rsv_format.open(server.url) as file:
        _ = file.tensors["small"].array
    assert e.value.code == "io_error" and word in e.value.detail, e.value


def test_a_server_without_ranges_is_refused(server: Server) -> None:
    server.ranges = False
    failing(server, "no ranges")
    assert server.sent < len(server.data)


def test_failures_of_a_moment_are_tried_again(server: Server) -> None:
    server.failures = 2
    with rsv_format.open(server.url) as file:
        server.failures = 2
        assert file.tensors["small"].array[3] == 3
    server.failures = 100
    failing(server, "")
    assert server.failures > 80


def test_what_changes_meanwhile_and_what_is_not_there(server: Server) -> None:
    with rsv_format.open(server.url) as file:
        server.etag = '"2"'
        with pytest.raises(RsvError, match="changed while it was read"):
            file.check_unchanged()
        server.data = server.data[:20000]
        with pytest.raises(RsvError, match="io_error"):
            _ = file.tensors["small"].array
    server.url = server.url.replace("model", "none")
    failing(server, "no such file")
    with pytest.raises(RsvError, match="io_error|missing_dependency"):
        rsv_format.open("nothing://a/b.rsv")
