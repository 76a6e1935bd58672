"""Prompts to tokens, in a process of its own: `python -m rsv_mlx.prompt` reads what is asked, and prints JSON.

A chat template is a program, and a tokenizer's patterns nearly are: the sandbox that runs them keeps them from the
machine, not from using it up, and some of it no Ctrl-C can enter. A process has a limit of time and of memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rsv_format import RsvError, is_url
from rsv_mlx.loading import load_tokenizer
from rsv_mlx.untrusted import library, mlx_lm_utils, temporary_folder

SECONDS = 20.0  # of processor time; the largest tokenizers take two, templates milliseconds
_LONGEST = 2.0**31  # which is as good as no limit
_MEMORY = 4 * 2**30  # bytes of address space beyond what is taken before; the largest tokenizers take one


class Encoder:
    """The tokenizer and chat template of a file, in a process that is started again after it was ended by a limit.

    Threads may share it. `close` ends the process.

    Parameters
    ----------
    path : path or URL
        An RSV file with config and tokenizer.
    seconds : float
        Of processor time that each prompt may take.
    process : Popen, optional
        What `begun` gave, to begin with.
    """

    def __init__(
        self, path: str | os.PathLike[str], seconds: float = SECONDS, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        name = os.fspath(path)
        self._told = {"path": name if is_url(name) else os.path.abspath(name), "seconds": seconds}
        self._seconds = seconds
        self._lock = threading.RLock()
        self._process = process
        self._is_told = False  # whether the process knows its file
        self._room = contextlib.ExitStack()  # what the process has left when it is ended

    def text(self, text: str, **options: Any) -> list[int]:
        """Tokens of a text; options as a tokenizer's `encode`. Errors as `chat`."""
        return self.tokens({"text": text, "options": options})

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Tokens of a conversation, in the chat template; options are what the template is given.

        Raises
        ------
        RsvError
            What `load_tokenizer` raises; bad_argument: what is asked is no JSON; unsupported_model: the template or
            the tokenizer cannot encode it; over_limit: it took longer than it may; out_of_memory.
        """
        return self.tokens({"messages": messages, "options": options})

    def tokens(self, asked: dict[str, Any]) -> list[int]:
        """Tokens of what is asked, as `_Worker.tokens` takes it."""
        with self._lock:
            try:
                self.send(asked)
                return self.receive()
            except BaseException as e:
                if not isinstance(e, RsvError):
                    self.close()  # or the next answer would be this one's
                raise

    def send(self, asked: dict[str, Any]) -> None:
        """Ask, before something else is done; `receive` has the answer."""
        try:
            line = json.dumps(asked)
        except (TypeError, ValueError, RecursionError) as e:
            raise RsvError("bad_argument", "prompt", f"it is no JSON: {e}") from None
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = begun()
        if not self._is_told:
            room = self._room.enter_context(temporary_folder({}))
            line = f"{json.dumps({**self._told, 'temporary': str(room)})}\n{line}"
            self._is_told = True
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer tells
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def receive(self) -> list[int]:
        """The answer to what was sent. Errors as `chat`."""
        assert self._process is not None and self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said.endswith(b"\n"):
            code = self._process.wait()
            self.close()
            if code == -signal.SIGXCPU:
                detail = f"the chat template or the tokenizer took more than {self._seconds:g} s of processor time"
                raise RsvError("over_limit", "prompt", detail)
            raise RsvError("unsupported_model", "prompt", f"the process that encodes it ended with {code}")
        found = json.loads(said)
        if "error" in found:
            raise RsvError(*found["error"])
        return [int(token) for token in found["tokens"]]

    def close(self) -> None:
        """End the process."""
        process, self._process, self._is_told = self._process, None, False
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._room.close()


def begun() -> subprocess.Popen[bytes]:
    """A process for an `Encoder`, whose imports are under way."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "rsv_mlx.prompt"],  # -P: no module of the working folder, maybe a model's
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for us, who end it then
    )


@contextlib.contextmanager
def encoder(
    path: str | os.PathLike[str], seconds: float = SECONDS, process: subprocess.Popen[bytes] | None = None
) -> Iterator[Encoder]:
    """An `Encoder` that is closed at the end."""
    made = Encoder(path, seconds, process)
    try:
        yield made
    finally:
        made.close()


class _Worker:
    """What runs in the process."""

    def __init__(self, path: str, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._tokenizer: Any = None

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Tokens, or an error."""
        _limit(self._seconds)
        try:
            return {"tokens": self.tokens(**asked)}
        except RsvError as e:
            return {"error": [e.code, e.where, e.detail]}
        except MemoryError:
            return {"error": ["out_of_memory", "prompt", "the chat template or the tokenizer took too much memory"]}

    def tokens(
        self,
        messages: list[dict[str, Any]] | None = None,
        text: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> list[int]:
        """Of a conversation; of a text, if there is none or no template for it."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._path)
        options = options or {}
        with library("unsupported_model", "tokenizer" if messages is None else "chat template"):
            if messages is not None and (text is None or getattr(self._tokenizer, "has_chat_template", False)):
                return list(self._tokenizer.apply_chat_template(messages, **options))
            assert text is not None
            if messages is not None or "add_special_tokens" not in options:
                bos = self._tokenizer.bos_token
                options = {"add_special_tokens": bos is None or not text.startswith(bos)}
            return list(self._tokenizer.encode(text, **options))


def _main() -> None:
    result, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever a library prints; bytes: PYTHONIOENCODING may be any
    mlx_lm_utils()  # before the limits
    told = sys.stdin.buffer.readline()
    if not told:  # there is nothing to encode
        os._exit(0)
    about = json.loads(told)
    os.environ["TMPDIR"], tempfile.tempdir = about.pop("temporary"), None
    worker = _Worker(**about)
    for line in sys.stdin.buffer:
        result.write(b"%s\n" % json.dumps(worker.answer(json.loads(line))).encode())
        result.flush()
    os._exit(0)


def _limit(seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = used.ru_utime + used.ru_stime + min(seconds, _LONGEST)  # from now on, each time
    _lower(resource.RLIMIT_CPU, int(until) + 1)
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere the limit counts what is reserved and never used, or nothing
        _lower(resource.RLIMIT_AS, int(statm.read_text().split()[0]) * resource.getpagesize() + _MEMORY)


def _lower(what: int, wanted: int) -> None:
    """Set a limit, not above the one that the process was given."""
    soft, hard = _GIVEN.setdefault(what, resource.getrlimit(what))
    resource.setrlimit(what, (wanted if soft == resource.RLIM_INFINITY else min(wanted, soft), hard))


_GIVEN: dict[int, tuple[int, int]] = {}


if __name__ == "__main__":
    _main()
