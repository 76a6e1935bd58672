"""`rsv chat`, and what `rsv generate` and it are told of sampling."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers says while it is imported is not ours
    pytest.importorskip("mlx_lm")
pytest.importorskip("tokenizers")

from test_serve import with_template  # noqa: E402
from test_session import default  # noqa: E402
from test_untrusted import base, folder  # noqa: E402, F401
from typer.testing import CliRunner  # noqa: E402

import rsv_cli.chat  # noqa: E402
import rsv_cli.texts  # noqa: E402
import rsv_format  # noqa: E402
from rsv_cli import ahead  # noqa: E402
from rsv_cli.app import app  # noqa: E402
from rsv_mlx import prompt  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


@pytest.fixture(scope="module")
def file(base: Path) -> Path:  # noqa: F811
    return with_template(base, base.parent / "told.rsv", TEMPLATE)


def run(*arguments: str, said: str = "", code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*arguments], input=said)
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result


def generated(file: Path, *options: str, code: int = 0) -> str:
    result = run("generate", str(file), "-p", "w1 w2", "-m", "6", "-q", *options, code=code)
    return str(result.stderr if code else result.stdout)


def answers(file: Path, *lines: str, options: tuple[str, ...] = ()) -> list[str]:
    """What is said to these lines, one after the other."""
    result = run("chat", str(file), "-q", "-m", "5", *options, said="".join(f"{line}\n" for line in lines))
    return str(result.stdout).splitlines()


# generate


def test_options_reach_mlx_lm(file: Path) -> None:
    plain = generated(file)
    assert generated(file, "--top-k", "1", "--temp", "5") == plain  # the likeliest alone
    assert generated(file, "--min-p", "1", "--temp", "5") == plain
    assert generated(file, "--top-p", "0.000001", "--temp", "5") == plain
    hot = [generated(file, "--temp", "1000", "--seed", seed) for seed in "122"]
    assert len({plain, *hot}) == 3 and hot[1] == hot[2]
    words = generated(file, "--repetition-penalty", "1000", "--repetition-context-size", "50").split()
    assert len(words) == len(set(words)) and not {"w1", "w2"} & set(words)
    assert (
        generated(file, "--system-prompt", "w9")
        == run("generate", str(file), "-p", "w9 w1 w2 ", "--raw", "-m", "6", "-q").stdout
    )
    assert generated(file, "--kv-bits", "8", "--quantized-kv-start", "0", code=1).startswith("error[")  # heads of 16


def test_a_draft_model_changes_nothing_but_time(file: Path) -> None:
    assert generated(file, "--draft-model", str(file), "--num-draft-tokens", "2") == generated(file)


@pytest.mark.parametrize("options, part", [
    (("--kv-bits", "7"), "--kv-bits"), (("--kv-group-size", "5"), "--kv-group-size"), (("--top-k", "99999"), "--top-k"),
    (("--kv-bits", "4", "--max-kv-size", "16"), "--kv-bits"),
    (("--max-kv-size", "16", "--draft-model", "FILE"), "--max-kv-size"),
])  # fmt: skip
def test_options_that_do_not_go_together(options: tuple[str, ...], part: str, file: Path) -> None:
    said = generated(file, *(str(file) if option == "FILE" else option for option in options), code=2)
    assert said.startswith(f"error[bad_argument] {part}: ")


# chat


def test_a_conversation_is_what_a_prompt_of_all_of_it_is(file: Path) -> None:
    first, second, third = answers(file, "w1 w2", "w3", "w4 w5")
    so_far = f"w1 w2 {first} "
    assert first == run("generate", str(file), "-p", "w1 w2 ", "--raw", "-m", "5", "-q").stdout.strip()
    for question, answer in (("w3", second), ("w4 w5", third)):
        prompt = f"{so_far}{question} "
        assert answer == run("generate", str(file), "-p", prompt, "--raw", "-m", "5", "-q").stdout.strip()
        so_far = f"{prompt}{answer} "


def test_what_was_said_is_not_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    ask = rsv_cli.chat._Conversation._cache_for

    def cache_for(self: Any, tokens: list[int]) -> Any:
        cache, known = ask(self, tokens)
        sizes.append((len(tokens), known))
        return cache, known

    monkeypatch.setattr(rsv_cli.chat._Conversation, "_cache_for", cache_for)
    answers(file, "w1 w2", "w3", "/reset", "w3")
    (a, none), (b, known), (c, again) = sizes
    assert (a, none, c, again) == (2, 0, 1, 0) and b - known <= 3 < b


def test_commands(file: Path) -> None:
    once, again, reset, other = answers(file, "w1", "/again", "/reset", "w1", "/system w9", "w1", "/quit", "w2")
    assert once == again == reset
    assert other == run("generate", str(file), "-p", "w9 w1 ", "--raw", "-m", "5", "-q").stdout.strip()
    result = run("chat", str(file), "-q", said="/help\n\n/nothing\n")
    assert result.stdout == "" and result.stderr.count("/reset") == 2
    assert answers(file, "w1", options=("--system-prompt", "w9")) == [other]
    assert run("chat", str(file), said="w1\n", code=0).stderr.startswith("prompt 1 tokens")


def test_an_error_is_of_one_answer(file: Path) -> None:
    template = "{% if messages[-1].content == 'w3' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    path = with_template(file, file.parent / "odd.rsv", template)
    result = run("chat", str(path), "-q", "-m", "3", said="w1\nw3\nw1\n", code=1)
    assert len(result.stdout.splitlines()) == 2 and result.stderr.count("error[unsupported_model]") == 1


def test_ctrl_c_stops_the_answer_and_not_the_program(file: Path) -> None:
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "rsv_cli", "chat", str(file), "-m", "1000000", "-q"],
        cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, preexec_fn=lambda: default(signal.SIGINT, signal.SIGTERM),
    ) as process:  # fmt: skip
        os.close(slave)
        seen = b""

        def is_seen(text: bytes, seconds: float) -> bool:
            nonlocal seen
            end = time.monotonic() + seconds
            while text not in seen and select.select([master], [], [], max(0, end - time.monotonic()))[0]:
                seen += os.read(master, 4096)
            found = text in seen
            seen = seen.partition(text)[2] if found else seen
            return found

        def until(text: bytes) -> None:
            assert is_seen(text, 60), seen[-300:]

        try:
            until(b"> ")
            for _ in range(2):  # twice: it is not the first alone that is caught
                os.write(master, b"w1 w2\n")
                until(b"w1 w2\r\n")
                until(b"w")
                process.send_signal(signal.SIGINT)
                until(b"\r\n> ")
            for _ in range(60):  # while nothing is said; Python does not hear what comes just before it waits
                process.send_signal(signal.SIGINT)
                if is_seen(b"\r\n> ", 1):
                    break
            else:
                raise AssertionError(seen[-300:])
            os.write(master, b"\x04")
            assert process.wait(30) == 0
        finally:
            process.kill()
            os.close(master)


def test_lines_are_utf8_of_some_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rsv_cli.texts, "LONGEST", 8)
    said = io.BytesIO("äö\nto\n\xff".encode() + b"\xff\n123456789")
    assert [rsv_cli.texts.read_line(said, "in") for _ in range(2)] == ["äö\n", "to\n"]
    for code in ("bad_argument", "over_limit"):
        with pytest.raises(rsv_format.RsvError) as caught:
            rsv_cli.texts.read_line(said, "in")
        assert caught.value.code == code


def test_the_process_that_is_begun_ahead_is_the_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    popen = subprocess.Popen

    def noted(*command: Any, **options: Any) -> Any:
        begun.append((command, options))
        return popen(*command, **options)

    monkeypatch.setattr(subprocess, "Popen", noted)
    with ahead.encoder_process() as process:
        assert process is not None and process.poll() is None
    assert process.poll() is not None
    with prompt.begun() as other:
        assert other.communicate(b"") == (b"", None)  # there is nothing to encode
    assert begun[0] == begun[1] and other.returncode == 0


def test_no_process_can_be_begun_ahead(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, popen = iter([True]), subprocess.Popen

    def refused(*command: Any, **options: Any) -> Any:
        if next(first, False):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return popen(*command, **options)

    expected = generated(file)
    monkeypatch.setattr(subprocess, "Popen", refused)
    assert generated(file) == expected
