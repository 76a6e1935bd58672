"""Files by URL: only what is asked for is fetched, from a local server; what goes wrong is an error with a code."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import rsv_format
from rsv_cli.app import app
from rsv_format import AttachmentData, RsvError, TensorData, remote

pytest.importorskip("aiohttp")


class Server(ThreadingHTTPServer):
    """One file, and others; what it sent, and how it fails."""

    def __init__(self, data: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.data, self.sent, self.ranges, self.failures = data, 0, True, 0
        self.version: dict[str, str] = {"ETag": '"1"'}  # headers that tell one from another
        self.heeds_matches = True
        self.unmatched = 0  # answers to what was asked for by another version
        self.others: dict[str, bytes] = {}
        self.place = f"http://127.0.0.1:{self.server_port}"
        self.url = f"{self.place}/model.rsv"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, body: bool) -> None:
        server, status = self.server, 200
        whole = data = server.others.get(self.path, server.data)
        if server.failures:
            server.failures -= 1
            self.send_error(503)
            return
        if self.path not in {"/model.rsv", *server.others}:
            self.send_error(404)
            return
        if server.heeds_matches and self.headers.get("If-Match", server.version.get("ETag")) != server.version.get(
            "ETag"
        ):
            server.unmatched += 1
            self.send_error(412)
            return
        if server.ranges and "Range" in self.headers:
            start, stop = self.headers["Range"].removeprefix("bytes=").split("-")
            data, status = data[int(start) : int(stop) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in server.version.items():
            self.send_header(name, value)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop}/{len(whole)}")
        self.end_headers()
        for at in range(0, len(data) if body else 0, 2**14):
            server.sent += len(data[at : at + 2**14])  # before who asked can look
            try:
                self.wfile.write(data[at : at + 2**14])
            except OSError:
                return


@contextlib.contextmanager
def serving(data: bytes) -> Iterator[Server]:
    with Server(data) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(remote, "_PAUSE", 0.001)
    big = np.arange(2**24, dtype="u1")
    rsv_format.write(
        tmp_path / "a.rsv",
        tensors={"big": TensorData("u8", big), "small": TensorData("u8", np.arange(9, dtype="u1"))},
        attachments={"config.json": AttachmentData("application/json", b"{}"), "x" * 30: AttachmentData("a/b", b"12")},
    )
    with serving((tmp_path / "a.rsv").read_bytes()) as made:
        yield made


def test_only_what_is_asked_for_is_fetched(server: Server, tmp_path: Path) -> None:
    with rsv_format.open(server.url) as file:
        assert file.nbytes == len(server.data) and list(file.tensors) == ["big", "small"]
        header = 64 + file.header_nbytes
        padding = -header % 64
        header += padding
        assert server.sent == header
        before = server.sent
        assert file.tensors["small"].array.tolist() == list(range(9)) and server.sent == before + 9
        file.check_unchanged()
    for arguments in (["info", server.url], ["ls", server.url], ["cat", server.url, "small", "-o", tmp_path / "s.npy"]):
        server.sent = 0
        result = CliRunner().invoke(app, [str(x) for x in arguments])
        assert result.exit_code == 0 and server.sent < 4096, result.output
    assert np.load(tmp_path / "s.npy").tolist() == list(range(9))
    server.sent = 0
    invoke("extract", server.url, "config.json", "-o", tmp_path / "taken")
    assert (tmp_path / "taken" / "config.json").read_bytes() == b"{}" and server.sent == header + 2
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
        server.version = {"ETag": '"2"'}
        with pytest.raises(RsvError, match="changed while it was read"):
            file.check_unchanged()
        server.data = server.data[:20000]
        with pytest.raises(RsvError, match="io_error"):
            _ = file.tensors["small"].array
    server.url = server.url.replace("model", "none")
    failing(server, "no such file")
    with pytest.raises(RsvError, match="io_error|missing_dependency"):
        rsv_format.open("nothing://a/b.rsv")


def invoke(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(x) for x in arguments])
    assert result.exit_code == code, result.output
    return str(result.output)


@pytest.mark.parametrize(
    ("before", "after", "heeds"),
    [
        ({"ETag": '"1"'}, {"ETag": '"2"'}, True),
        ({"ETag": '"1"'}, {"ETag": '"2"'}, False),
        ({"ETag": 'W/"1"'}, {"ETag": 'W/"2"'}, True),
        ({"Last-Modified": "Tue, 01 Jan 2030 00:00:00 GMT"}, {"Last-Modified": "Tue, 01 Jan 2030 00:00:01 GMT"}, False),
        ({}, {}, False),
    ],
)
def test_no_range_of_another_version_is_taken(
    server: Server, before: dict[str, str], after: dict[str, str], heeds: bool, tmp_path: Path
) -> None:
    """A server that heeds If-Match, one that does not, and ones without strong tags: by what their answers say."""
    server.version, server.heeds_matches = before, heeds
    with rsv_format.open(server.url) as file:
        assert file.tensors["small"].array[1] == 1
        server.version = after
        server.data = server.data[:-1] if not after else bytes(len(server.data))
        for _ in range(2):
            with pytest.raises(RsvError, match="it was changed while it was read") as e:
                _ = file.tensors["small"].array
            assert e.value.code == "io_error" and e.value.where == server.url
    assert server.unmatched == (2 if heeds and before["ETag"].startswith('"') else 0)


def test_an_export_of_what_changes_meanwhile_leaves_nothing(server: Server, tmp_path: Path) -> None:
    pieces = rsv_format.File.pieces

    def changing(*arguments: Any) -> Any:
        for piece in pieces(*arguments):
            yield piece
            server.version = {"ETag": '"2"'}

    out = tmp_path / "out"
    out.mkdir()
    for arguments in (("export", server.url, "-o", out / "d.safetensors"), ("extract", server.url, "-o", out / "x")):
        server.version = {"ETag": '"1"'}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rsv_format.File, "pieces", changing)
            assert "it was changed while it was read" in invoke(*arguments, code=1)
        assert not list(out.iterdir())


def test_an_answer_that_is_not_what_was_asked_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole files, however short, and other ranges are not taken for the bytes that were asked for."""
    server.others = {"/model.rsv": b"RSV!" * 8}
    server.ranges = False
    failing(server, "no ranges")
    server.others, server.ranges = {}, True
    send = Handler.send_header
    monkeypatch.setattr(
        Handler,
        "send_header",
        lambda self, name, value: send(self, name, value.replace(" 0-", " 1-") if name == "Content-Range" else value),
    )
    failing(server, "no ranges")


def test_sets_and_commands_by_url(server: Server, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    weights = {f"a.{i}.weight": np.random.default_rng(i).normal(size=(96, 64)).astype("f4") for i in range(6)}
    save_file(weights, tmp_path / "m.safetensors")
    invoke("quantize", tmp_path / "m.safetensors", "-o", tmp_path / "m.rsv", "-q")
    shards = rsv_format.split(tmp_path / "m.rsv", tmp_path / "s.rsv", 40_000)
    server.others = {f"/{Path(name).name}": Path(name).read_bytes() for name in shards}
    server.others["/a//m.rsv"] = (tmp_path / "m.rsv").read_bytes()
    whole, of_set = f"{server.place}/a//m.rsv", f"{server.place}/{Path(shards[1]).name}"
    assert len(shards) > 1
    for url in (whole, of_set):
        invoke("verify", url)
        assert "6 layers" in invoke("info", url) and "a.5" in invoke("ls", url)
        assert json.loads(invoke("diff", url, tmp_path / "m.rsv", "--json"))["equal"]
        invoke("compare", tmp_path / "m.safetensors", url)
        invoke("compare", url, tmp_path / "m.rsv")
        invoke("report", url, "-o", tmp_path / "r.html")
        invoke("split", url, "-o", tmp_path / "again.rsv", "--shard-size", "1MB")
        invoke("merge", tmp_path / "again-*.rsv", "-o", tmp_path / "again.rsv")
        assert (tmp_path / "again.rsv").read_bytes() == (tmp_path / "m.rsv").read_bytes()
    del server.others[f"/{Path(shards[0]).name}"]
    assert "error[missing_shard]" in invoke("info", of_set, code=1)


def test_layers_of_a_set_by_url_in_a_model(server: Server, tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    import mlx.nn as nn

    import rsv_mlx

    layers = [
        rsv_format.quantize_matrix(np.random.default_rng(i).normal(size=(32, 64)), name=f"layers.{i}") for i in range(2)
    ]
    rsv_format.write(tmp_path / "m.rsv", layers=layers)
    shards = rsv_format.split(tmp_path / "m.rsv", tmp_path / "s.rsv", 1)
    server.others = {f"/{Path(name).name}": Path(name).read_bytes() for name in shards}
    of_file, x = nn.Sequential(*(nn.Linear(64, 32, bias=False) for _ in range(2))), mx.arange(64).astype(mx.float32)
    rsv_mlx.graft(of_file, tmp_path / "m.rsv")
    for lazy in (False, True):
        of_set = nn.Sequential(*(nn.Linear(64, 32, bias=False) for _ in range(2)))
        assert rsv_mlx.graft(of_set, f"{server.place}/{Path(shards[1]).name}", lazy=lazy).layers == 2
        for a, b in zip(of_file.layers, of_set.layers, strict=True):
            assert mx.array_equal(a(x), b(x))
