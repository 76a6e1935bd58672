"""How a command ends: by signals, full devices, files that shrink under it; and what it leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from safetensors.numpy import save_file
from typer.testing import CliRunner

import rsv_format
from rsv_cli.app import app
from rsv_cli.session import scratch, session
from rsv_format import RsvError
from rsv_format.scratch import abandoned
from rsv_format.sources.imatrix import save_imatrix

RSV = [sys.executable, "-m", "rsv_cli"]
ROOT = Path(__file__).resolve().parents[1]

# a command that is slow to clean up: the first signal finds it in its body, the second in what comes after
CHILD = """
import os, sys, tempfile, time
from rsv_cli.session import scratch, session
from rsv_format import outputs
if hasattr(os, "O_TMPFILE"):
    del os.O_TMPFILE  # with a hidden name, as on most systems
out, slow = sys.argv[1], sys.argv[2] == "slow"
with session(), scratch():
    try:
        tempfile.mkdtemp()
        with outputs.Output(out) as output:
            output.open(10**6)
            print("body", flush=True)
            time.sleep(60)
    except BaseException:
        print("after", flush=True)
        while slow:
            time.sleep(1)
        raise
"""


def default(*numbers: int) -> None:
    """A job in the background ignores some signals."""
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("pace", ["quick", "slow"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_leave_nothing(tmp_path: Path, name: str, pace: str) -> None:
    number = getattr(signal, name)
    out, temporary = tmp_path / "out", tmp_path / "tmp"
    out.mkdir()
    temporary.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, out / "a", pace], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        preexec_fn=lambda: default(number, signal.SIGINT),
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == b"body\n"
    assert len(os.listdir(out)) == len(os.listdir(temporary)) == 1
    child.send_signal(number)
    assert child.stdout.readline() == b"after\n"
    if pace == "slow":
        child.send_signal(signal.SIGINT)
    output, complaint = child.communicate(timeout=30)
    assert (child.returncode, output) == (128 + number, b"")
    assert complaint == (b"interrupted\n" if name == "SIGINT" else b"stopped\n")
    assert os.listdir(out) == os.listdir(temporary) == []


def test_temporary_files_of_a_command_lie_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(ZeroDivisionError), scratch():
        first, second = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
        assert first.parent == second.parent != tmp_path and first.parent.parent == tmp_path
        assert os.environ["TMPDIR"] == str(first.parent)  # for other processes
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == [] and os.environ["TMPDIR"] == str(tmp_path)


def test_a_folder_whose_process_was_killed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rsv-mine").mkdir()
    (tmp_path / "rsv-0123456789ab").write_text("no folder")
    (tmp_path / "rsv-ba9876543210").symlink_to(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, tmp_path / "a", "quick"], stdout=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as child:  # fmt: skip
        assert child.stdout is not None and child.stdout.readline() == b"body\n"
        assert abandoned(str(tmp_path)) == []
        child.kill()
    (left,) = abandoned(str(tmp_path))
    assert left.is_dir() and list(left.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch(quiet=True):
        assert capsys.readouterr().err == ""
    with scratch():
        said = capsys.readouterr().err
    assert "left behind" in said and str(left) in said and "seconds old" in said and said.count("\n") == 1
    assert left.is_dir()  # named, not removed


LATE = """
import signal, sys
from rsv_cli.session import session
from rsv_format import outputs
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
with session():
    with outputs.Output(sys.argv[1]) as output:
        outputs.write_all(output.open(), b"whole")
        if sys.argv[2] == "early":
            signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    print("the report", flush=True)
    signal.raise_signal(signal.SIGINT)
    print("never")
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_signal_that_comes_after_the_work_does_not_undo_it(tmp_path: Path, when: str) -> None:
    command = [sys.executable, "-c", LATE, tmp_path / "out", when]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if when == "late":
        assert (done.returncode, done.stdout, done.stderr) == (0, "the report\n", "")
        assert (tmp_path / "out").read_bytes() == b"whole"
    else:
        assert (done.returncode, done.stdout, done.stderr) == (143, "", "stopped\n")
        assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="a pipe's content is told as on Linux")
def test_a_signal_is_heard_while_nobody_reads_the_output() -> None:
    import fcntl
    import struct
    import termios

    code = "import sys\nfrom rsv_cli.session import session\nwith session(): sys.stdout.write('x' * 10**6)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert child.stdout is not None and child.stderr is not None
    waiting = 0
    while not waiting:
        assert child.poll() is None
        (waiting,) = struct.unpack("i", fcntl.ioctl(child.stdout, termios.FIONREAD, bytes(4)))
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=30) == 143
    assert child.stderr.read() == b"stopped\n"
    child.stdout.close()
    child.stderr.close()


@pytest.mark.parametrize("name, code, said", [("SIGINT", 130, "interrupted\n"), ("SIGTERM", 143, "stopped\n")])
def test_a_signal_that_falls_into_a_finalizer_is_heard(name: str, code: int, said: str) -> None:
    child = f"""
import signal, time, typer
from rsv_cli.session import session

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.{name})

app = typer.Typer()

@app.command()
def command():
    with session():
        Finalized()
        time.sleep(60)

app()
"""
    command = [sys.executable, "-c", child]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


def test_no_place_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    with pytest.raises(RsvError) as e, scratch():
        pass
    assert e.value.code == "io_error" and e.value.where == "TMPDIR"
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(RsvError) as e, scratch():
        pass
    assert e.value.code == "io_error" and e.value.where == "TMPDIR"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["quantize", "--help"], ["info"], ["info", "--json"]])
def test_a_full_device(tmp_path: Path, arguments: list[str]) -> None:
    rsv_format.write(tmp_path / "a.rsv")
    command = [*RSV, *arguments, *([str(tmp_path / "a.rsv")] if arguments[0] == "info" else [])]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, cwd=ROOT)
        assert done.returncode == 1
        assert done.stderr.startswith(b"error[io_error] ") and done.stderr.count(b"\n") == 1, done.stderr
        done = subprocess.run(command, stdout=full, stderr=full, check=False, cwd=ROOT)
        assert done.returncode == 1


# ---- files that become shorter, or are written to, while a command reads them


@pytest.fixture
def file(tmp_path: Path) -> Path:
    layer = rsv_format.quantize_matrix(np.random.default_rng(0).standard_normal((300, 300)), name="a")
    attachments = {"b.txt": rsv_format.AttachmentData("text/plain", bytes(10**5))}
    tensors = {"t": rsv_format.TensorData("f32", np.zeros(10**5, np.float32))}
    rsv_format.write(tmp_path / "a.rsv", layers=[layer], tensors=tensors, attachments=attachments)
    return tmp_path / "a.rsv"


@contextlib.contextmanager
def after_opening(monkeypatch: pytest.MonkeyPatch, action: Callable[[], Any]) -> Iterator[None]:
    """Something happens to a file once it has been opened."""
    opened, once = rsv_format.open, [action]

    def opening(*arguments: Any, **options: Any) -> rsv_format.File:
        file = opened(*arguments, **options)
        while once:
            once.pop()()
        return file

    with monkeypatch.context() as patch:
        patch.setattr(rsv_format, "open", opening)
        yield
    assert not once


COMMANDS = {
    "verify": ["verify"], "info": ["info", "--json"], "export": ["export", "-o", "out"],
    "extract": ["extract", "-o", "out"], "compare": ["compare", "source.safetensors"],
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_that_shrinks_under_a_command(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    save_file({"a.weight": np.ones((300, 300), np.float32)}, tmp_path / "source.safetensors")
    monkeypatch.chdir(tmp_path)
    command = [*COMMANDS[name], str(file)]
    with rsv_format.open(file) as opened:
        start = opened.blobs[0].offset
    with after_opening(monkeypatch, lambda: os.truncate(file, start)):
        result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and "io_error" in result.output and "shorter" in result.output, result.output
    assert sorted(os.listdir(tmp_path)) == ["a.rsv", "source.safetensors"]


@pytest.mark.parametrize("name", ["export", "compare"])
def test_a_file_that_is_written_to_under_a_command(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tensors = {"a.weight": np.ones((300, 300), np.float32), "t": np.zeros(10**5, np.float32)}
    save_file(tensors, tmp_path / "source.safetensors")
    monkeypatch.chdir(tmp_path)
    os.utime(file, ns=(0, 0))
    command = [*COMMANDS[name], str(file)]
    with after_opening(monkeypatch, lambda: file.write_bytes(file.read_bytes())):
        result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and "was changed" in result.stderr
    assert sorted(os.listdir(tmp_path)) == ["a.rsv", "source.safetensors"]

    with after_opening(monkeypatch, lambda: os.replace(_copy(file), file)):
        result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output  # another file took its name; the one that was opened is as it was


def _copy(path: Path) -> Path:
    other = path.with_name("other")
    other.write_bytes(b"another file")
    return other


# ---- what is noticed before a model is loaded


def test_calibrate_looks_before_it_loads(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("rsv_cli.calibrate.mlx_module", load)
    text = tmp_path / "t.txt"
    text.write_text("Some text. " * 100)
    weights = tmp_path / "model.safetensors"
    save_file({"a.weight": np.ones((4, 4), np.float32)}, weights)
    save_imatrix(tmp_path / "i.gguf", {"a": (np.ones(4), 1)})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for model, output, words in (
        (file, tmp_path / "none" / "i.gguf", "No such file"),
        (file, text, "input"),
        (file, file, "input"),
        (tmp_path, weights, "input"),
        (file, weights, "a model that is not RSV"),
        (file, tmp_path / "t.txt", "input"),
        (file, os.devnull, "not a regular file"),
    ):
        for force in ([], ["--force"]):
            result = CliRunner().invoke(app, ["calibrate", str(model), "-t", str(text), "-o", str(output), *force])
            assert result.exit_code in (1, 2) and words in result.stderr, (output, result.output)
    result = CliRunner().invoke(
        app, ["calibrate", str(file), "-t", str(tmp_path / "no.txt"), "-o", str(tmp_path / "i")]
    )
    assert result.exit_code == 1 and "no.txt" in result.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    result = CliRunner().invoke(app, ["calibrate", str(file), "-t", str(text), "-o", str(tmp_path / "i.gguf")])
    assert "the model was loaded" in str(result.exception) + result.output  # a new matrix may replace an old one


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_inputs_that_cannot_be_read(file: Path) -> None:
    file.chmod(0)
    result = CliRunner().invoke(app, ["info", str(file)])
    assert result.exit_code == 1 and "Permission denied" in result.stderr


def test_texts_that_never_end(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rsv_cli.texts.LONGEST", 10)
    (tmp_path / "t.txt").write_bytes(b"x" * 11)
    command = ["calibrate", str(file), "-t", str(tmp_path / "t.txt"), "-o", str(tmp_path / "i.gguf")]
    assert CliRunner().invoke(app, command).stderr.startswith("error[over_limit] ")
    said = CliRunner().invoke(app, ["generate", str(file), "-p", "-"], input=b"x" * 11).stderr
    assert said.startswith("error[over_limit] --prompt")


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs /dev/zero")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_devices_in_a_models_folder(tmp_path: Path, name: str) -> None:
    save_file({"a.weight": np.ones((32, 32), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/dev/zero")
    with contextlib.suppress(RsvError), rsv_format.open_source(tmp_path) as source:
        assert set(source.attachments) == {"config.json"}
    with pytest.raises(RsvError, match="no regular file"):
        rsv_format.quantize(tmp_path, tmp_path / "q.rsv", importance="/dev/zero")


@pytest.mark.parametrize(
    "words", ["[malloc] Unable to allocate", "Traceback\n  a\nRuntimeError: can't start new thread"]
)
def test_no_room_for_threads_is_out_of_memory(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, session():
        raise RuntimeError(words)
    said = capsys.readouterr().err
    assert caught.value.exit_code == 1 and said.startswith("error[out_of_memory]") and said.count("\n") == 1
