"""A prompt to tokens, in a process of its own: `python -m rsv_mlx.prompt` reads what is asked, and prints JSON.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rsv_format import RsvError
from rsv_mlx.loading import load_tokenizer
from rsv_mlx.untrusted import library, mlx_lm_utils

SECONDS = 20.0  # of processor time; the largest tokenizers take two, templates milliseconds
_MEMORY = 4 * 2**30  # bytes of address space beyond what is taken before; the largest tokenizers take one


class Encoding:
    """A prompt that is being encoded."""

    def __init__(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        self._process = process
        self._seconds = seconds

    def tokens(self) -> list[int]:
        """The tokens, when they are there.

        Raises
        ------
        RsvError
            What `load_tokenizer` raises; unsupported_model: the template or the tokenizer cannot encode it;
            over_limit: it took longer than it may; out_of_memory.
        """
        said, _ = self._process.communicate()
        if self._process.returncode == -signal.SIGXCPU:
            detail = f"the chat template or the tokenizer took more than {self._seconds:g} s of processor time"
            raise RsvError("over_limit", "prompt", detail)
        try:
            found = json.loads(said.splitlines()[-1])
        except (IndexError, ValueError):
            detail = f"the process that encodes it ended with {self._process.returncode}"
            raise RsvError("unsupported_model", "prompt", detail) from None
        if "error" in found:
            raise RsvError(*found["error"])
        return [int(token) for token in found["tokens"]]


@contextlib.contextmanager
def encoding(
    path: str | os.PathLike[str], prompt: str, *, chat: bool = True, seconds: float = SECONDS
) -> Iterator[Encoding]:
    """Encode a prompt with the tokenizer of a file, while the body does something else.

    Parameters
    ----------
    path : path
        An RSV file with config and tokenizer.
    prompt : str
    chat : bool
        Wrap it in the tokenizer's chat template, if there is one, as what a user says.
    seconds : float
        Of processor time that tokenizer and template may take.

    Yields
    ------
    Encoding
    """
    asked = {"path": os.fspath(Path(path).absolute()), "prompt": prompt, "chat": chat, "seconds": seconds}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "rsv_mlx.prompt"],  # -P: no module of the working folder, which may be a model's
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for us, who end it then
    )
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asked).encode())
            process.stdin.close()
        process.stdin = None
        yield Encoding(process, seconds)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _main() -> None:
    asked = json.load(sys.stdin.buffer)  # bytes: PYTHONIOENCODING may be any
    result, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever a library prints
    try:
        answer: dict[str, Any] = {"tokens": _encode(**asked)}
    except RsvError as e:
        answer = {"error": [e.code, e.where, e.detail]}
    except MemoryError:
        answer = {"error": ["out_of_memory", "prompt", "the chat template or the tokenizer took too much memory"]}
    result.write(b"\n%s\n" % json.dumps(answer).encode())
    result.flush()
    os._exit(0)


def _encode(path: str, prompt: str, chat: bool, seconds: float) -> list[int]:
    mlx_lm_utils()  # before the limits
    _limit(seconds)
    tokenizer = load_tokenizer(path)
    with library("unsupported_model", "chat template" if chat else "tokenizer"):
        if chat and getattr(tokenizer, "has_chat_template", False):
            messages = [{"role": "user", "content": prompt}]
            return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        begun = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        return list(tokenizer.encode(prompt, add_special_tokens=not begun))


def _limit(seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + seconds) + 1)
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere the limit counts what is reserved and never used, or nothing
        _lower(resource.RLIMIT_AS, int(statm.read_text().split()[0]) * resource.getpagesize() + _MEMORY)


def _lower(what: int, wanted: int) -> None:
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (wanted if soft == resource.RLIM_INFINITY else min(wanted, soft), hard))


if __name__ == "__main__":
    _main()
