"""`rsv serve`: OpenAI's client against the real server, and requests that have something wrong."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what they say while they are imported is not ours
    openai = pytest.importorskip("openai")
    pytest.importorskip("mlx_lm")
pytest.importorskip("tokenizers")

from test_session import default  # noqa: E402
from test_untrusted import base, folder  # noqa: E402, F401

import rsv_format  # noqa: E402
import rsv_mlx  # noqa: E402
from rsv_format import RsvError  # noqa: E402
from rsv_mlx import prompt, serving  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
OPTIONS: dict[str, Any] = {
    "allowed_origins": [], "max_tokens": 4, "temp": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0,
    "chat_template_args": {},
    "decode_concurrency": 4, "prompt_concurrency": 4, "prefill_step_size": 16, "prompt_cache_size": 4,
    "prompt_cache_bytes": None, "kv_bits": None, "kv_group_size": 32, "quantized_kv_start": 0, "num_draft_tokens": 2,
}  # fmt: skip


def with_template(source: Path, path: Path, template: str) -> Path:
    """The same file with a chat template."""
    with rsv_format.open(source) as file:
        layers = [
            rsv_format.LayerData(x.name, x.in_features, x.bits, x.codes, x.scales, x.codebook, x.transform)
            for x in file.layers.values()
        ]
        tensors = {t.name: rsv_format.TensorData(t.dtype, t.array) for t in file.tensors.values()}
        attachments = {n: rsv_format.AttachmentData(a.media_type, bytes(a.data)) for n, a in file.attachments.items()}
        attachments["chat_template.jinja"] = rsv_format.AttachmentData("text/plain", template.encode())
        rsv_format.write(path, layers=layers, tensors=tensors, attachments=attachments)
    return path


@contextlib.contextmanager
def started(path: Path | str) -> Iterator[tuple[subprocess.Popen[bytes], tuple[str, int]]]:
    """The command, and where it listens."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "rsv_cli", "serve", str(path), "--port", "0"], cwd=ROOT,
        stderr=subprocess.PIPE, preexec_fn=lambda: default(signal.SIGTERM, signal.SIGINT),
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            line = process.stderr.readline().decode()
            assert "http://" in line, line
            host, port = line.split("http://")[1].split("/")[0].rsplit(":", 1)
            yield process, (host, int(port))
        finally:
            process.terminate()  # a kill would leave its temporary folder
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


@contextlib.contextmanager
def serving_here(model: Any, tokenizer: Any, encoder: prompt.Encoder) -> Iterator[tuple[str, int]]:
    """The same in a thread of this process."""
    server = serving.Server("m", model, serving.limited(tokenizer, encoder), host="127.0.0.1", port=0, **OPTIONS)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.address
    finally:
        server._http.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def file(base: Path) -> Path:  # noqa: F811
    return with_template(base, base.parent / "chat.rsv", "{{ messages[-1].content }}")


@pytest.fixture(scope="module")
def server(file: Path) -> Iterator[tuple[str, int]]:
    with started(file) as (process, address):
        log = threading.Thread(target=process.stderr.read, daemon=True)  # type: ignore[union-attr]
        log.start()
        yield address
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
        log.join()


@pytest.fixture
def client(server: tuple[str, int]) -> Any:
    with openai.OpenAI(
        base_url=f"http://{server[0]}:{server[1]}/v1", api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made


def post(server: tuple[str, int], body: Any, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(*server, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text.startswith(b"{") else text


SAID = [{"role": "user", "content": "w1 w2"}]


def test_models(client: Any, server: tuple[str, int]) -> None:
    assert server[0] == "127.0.0.1"
    assert [model.id for model in client.models.list()] == ["chat.rsv"]
    assert client.models.retrieve("chat.rsv").id == "chat.rsv"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completions(client: Any, file: Path) -> None:
    import mlx_lm

    model, tokenizer = rsv_mlx.load(file)
    wanted = mlx_lm.generate(model, tokenizer, "w1 w2", max_tokens=6)
    made = client.completions.create(model="chat.rsv", prompt="w1 w2", max_tokens=6)
    assert made.choices[0].text.strip() == wanted.strip() and made.usage.prompt_tokens == 2
    parts = client.completions.create(model="default_model", prompt="w1 w2", max_tokens=6, stream=True)
    assert "".join(part.choices[0].text for part in parts).strip() == wanted.strip()


def test_chat(client: Any) -> None:
    made = client.chat.completions.create(model="chat.rsv", messages=SAID, max_tokens=3)
    plain = client.completions.create(model="chat.rsv", prompt="w1 w2", max_tokens=3)
    assert made.choices[0].message.content == plain.choices[0].text and made.choices[0].finish_reason == "length"
    parts = list(client.chat.completions.create(
        model="chat.rsv", messages=SAID, max_tokens=3, stream=True, stream_options={"include_usage": True},
        temperature=0.5, top_p=0.9, seed=1,
    ))  # fmt: skip
    assert parts[-1].usage.completion_tokens >= 1


def test_several_at_once(client: Any) -> None:
    def ask(i: int) -> str:
        made = client.completions.create(model="chat.rsv", prompt=f"w{i} w2", max_tokens=5)
        return str(made.choices[0].text)

    alone = [ask(i) for i in range(1, 5)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(1, 5))) == alone


BAD: list[Any] = [
    b"{", b"\xff", b"[]", b"[" * 10**5, {"messages": "w1"}, {"messages": []}, {"messages": [3]},
    {"messages": [{"role": 3, "content": "x"}]}, {"messages": [{"role": "user", "content": 3}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]}]},
    {"messages": SAID, "model": "other"}, {"messages": SAID, "model": "/etc/passwd"}, {"messages": SAID, "model": 3},
    {"messages": SAID, "adapters": "/tmp"}, {"messages": SAID, "draft_model": "x"},
    {"messages": SAID, "logit_bias": {"99999": 1}}, {"messages": SAID, "logit_bias": {"x": 1}},
    {"messages": SAID, "top_k": 10**6}, {"messages": SAID, "top_p": 7}, {"messages": SAID, "temperature": "hot"},
    {"messages": SAID, "max_tokens": -1}, {"messages": SAID, "stop": [3]}, {"messages": SAID, "stop": [""]},
    {"messages": SAID, "tools": 3}, {"messages": SAID, "tools": [3]}, {"messages": SAID, "role_mapping": 3},
    {"messages": SAID, "chat_template_kwargs": 3}, {"messages": SAID, "chat_template_kwargs": {"tokenize": False}},
    {"messages": SAID, "stream_options": 3, "stream": True},
]  # fmt: skip


@pytest.mark.parametrize("body", BAD, ids=lambda body: str(body)[:60])
def test_an_error_in_a_request_is_an_answer(body: Any, server: tuple[str, int]) -> None:
    status, answer = post(server, body)
    assert 400 <= status < 500 and isinstance(answer["error"], str) and answer["error"], (status, answer)


def test_the_server_goes_on(server: tuple[str, int], client: Any) -> None:
    for body in ({"prompt": 3}, {"prompt": ""}, {"prompt": ["w1"]}, {}, {"prompt": "beyond"}):
        status, answer = post(server, body, "/v1/completions")
        assert 400 <= status < 500 and answer["error"], body
    assert post(server, {"messages": SAID}, **{"Content-Length": "x"})[0] == 400
    assert post(server, b"", **{"Content-Length": str(2**40)})[0] == 413
    assert post(server, {}, "/elsewhere")[0] == 404
    connection = http.client.HTTPConnection(*server, timeout=60)  # somebody who does not wait for the answer
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "w1", "max_tokens": 10**4, "stream": True}))
    connection.getresponse().read(20)
    connection.close()
    made = client.completions.create(model="chat.rsv", prompt="w1 w2", max_tokens=2)
    assert made.choices[0].text
    connection = http.client.HTTPConnection(*server, timeout=60)
    connection.request("GET", "/health", headers={"Origin": "http://evil.example"})
    answer = connection.getresponse()
    assert json.loads(answer.read()) == {"status": "ok"} and answer.getheader("Access-Control-Allow-Origin") is None


def test_what_ends_the_thread_that_generates_does_not_end_the_server(file: Path) -> None:
    model, tokenizer = rsv_mlx.load(file)
    failing = threading.Event()
    call = type(model).__call__

    class Failing(type(model)):  # type: ignore[misc]
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            if failing.is_set():
                raise SystemExit("no more memory")  # no Exception
            return call(self, *arguments, **options)

    model.__class__ = Failing
    with prompt.encoder(file) as encoder, serving_here(model, tokenizer, encoder) as address:
        for _ in range(2):
            assert post(address, {"prompt": "w1"}, "/v1/completions")[0] == 200
            failing.set()
            with ThreadPoolExecutor(2) as pool:
                found = list(pool.map(lambda _: post(address, {"prompt": "w1 w2"}, "/v1/completions"), range(2)))
            assert all(status == 500 and "no more memory" in answer["error"] for status, answer in found), found
            failing.clear()
    with pytest.raises(RsvError, match="io_error"):
        serving.Server("m", model, tokenizer, host="no.such.host.invalid", port=0, **OPTIONS)


def test_a_template_that_never_ends_is_one_requests_error(file: Path, tmp_path: Path) -> None:
    from test_untrusted import LOOP

    template = "{% if messages[0].content == 'w3' %}" + LOOP + "{% endif %}{{ messages[0].content }}"
    path = with_template(file, tmp_path / "m.rsv", template)
    model, tokenizer = rsv_mlx.load(path)
    with prompt.encoder(path, 4) as encoder, serving_here(model, tokenizer, encoder) as address:
        status, answer = post(address, {"messages": [{"role": "user", "content": "w3"}]})
        assert status == 400 and "over_limit" in answer["error"]
        status, answer = post(address, {"messages": SAID, "max_tokens": 2})
        assert status == 200 and answer["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_it_well_while_it_answers(name: str, file: Path) -> None:
    number = getattr(signal, name)
    with started(file) as (process, address):
        connection = http.client.HTTPConnection(*address, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "w1", "max_tokens": 10**6, "stream": True}))
        answer = connection.getresponse()
        answer.read(20)
        process.send_signal(number)
        rest = answer.read()
        connection.close()
        assert process.stderr is not None
        log = process.stderr.read().decode()
        assert process.wait(30) == 128 + number and "Traceback" not in log
    assert b"the server ends" in rest and log.endswith("interrupted\n" if name == "SIGINT" else "stopped\n")


@pytest.mark.parametrize("options", [["--chat-template-args", "3"], ["--chat-template-args", "{"], ["--kv-bits", "7"]])
def test_options_that_are_wrong(options: list[str], file: Path) -> None:
    from typer.testing import CliRunner

    from rsv_cli.app import app

    result = CliRunner().invoke(app, ["serve", str(file), *options])
    assert result.exit_code == 2 and result.stderr.startswith("error[bad_argument]")
