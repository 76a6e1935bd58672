"""What happens around every command: errors, signals and closed pipes become messages and exit codes.

0 is success, 1 an invalid file or a failed input, 2 bad usage, 128 + n the end by signal n (130 is Ctrl-C).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.text import Text

from rsv_cli import terminal
from rsv_cli.leftovers import tell_leftovers

if TYPE_CHECKING:
    from rsv_format import RsvError
    from rsv_format.scratch import Folder

FAILED, USAGE, PIPE_CLOSED = 1, 2, 141
_TRACEBACK = "RSV_TRACEBACK"
_LONGEST = 2000  # characters of a place or a detail on a terminal: both can come from a file
_STOPPING = ("SIGINT", "SIGTERM", "SIGHUP")
_MOMENT = 0.01  # seconds, in which a finalizer ends
_SHOW_CURSOR = "\x1b[?25h"

_folders: list[Folder] = []  # temporary ones


class _Stopped(KeyboardInterrupt):
    """A signal that ends the process, raised so that temporary files are removed on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def is_interrupt(e: KeyboardInterrupt) -> bool:
    """Whether it was Ctrl-C that stopped the work, and not another signal."""
    return not isinstance(e, _Stopped) or e.number == signal.SIGINT


@contextlib.contextmanager
def session(as_json: bool = False) -> Iterator[None]:
    """Around the body of a command; `as_json` puts an error on standard output as an object."""
    with _ending_well(), _stoppable():
        from rsv_format.errors import RsvError, is_out_of_memory  # brings numpy: not before a command runs
        from rsv_format.panics import own_process

        try:
            try:
                with own_process():
                    yield
                sys.stdout.flush()
            except BrokenPipeError:
                raise
            except (RsvError, typer.Exit, typer.Abort, typer.BadParameter):
                raise
            except Exception as e:
                if is_out_of_memory(e):
                    said = str(e).strip().splitlines() or ["there is not enough for this"]
                    raise RsvError("out_of_memory", "system", said[-1]) from e
                if isinstance(e, OSError):
                    raise RsvError("io_error", str(e.filename or "system"), e.strerror or str(e)) from e
                if os.environ.get(_TRACEBACK):
                    raise
                detail = f"{e} (a fault of rsv; {_TRACEBACK}=1 in the environment shows where)"
                raise RsvError("internal_error", type(e).__name__, detail) from e
        except RsvError as e:
            report(e, as_json)
            raise typer.Exit(USAGE if e.code == "bad_argument" else FAILED) from None


def report(error: RsvError, as_json: bool = False) -> None:
    """One error, for people on standard error or for programs on standard output."""
    if as_json:
        terminal.write_json(error_object(error))
    else:
        where, detail = (terminal.plain(terminal.short(text, _LONGEST)) for text in (error.where, error.detail))
        line = Text.assemble((f"error[{error.code}]", "bold red"), " ", (where, "bold"))
        line.append(f": {detail}")
        terminal.stderr().print(line, soft_wrap=True)


def error_object(error: RsvError) -> dict[str, Any]:
    """An error for programs."""
    return {"error": error.code, "phase": error.phase, "where": error.where, "detail": error.detail}


def mlx_module(name: str) -> Any:
    """A module that comes with MLX, or needs it.

    Raises
    ------
    RsvError
        missing_dependency.
    """
    from rsv_format.errors import RsvError

    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise RsvError.of_import(e, name, "pip install 'rsv-format[mlx]'") from e


@contextlib.contextmanager
def scratch(quiet: bool = False) -> Iterator[None]:
    """While the body runs, temporary files, whoever makes them, lie in one folder, which goes with it.

    Those that killed runs have left are named.

    Raises
    ------
    RsvError
        io_error.
    """
    from rsv_format.errors import RsvError
    from rsv_format.scratch import Folder, abandoned

    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    try:
        if not quiet:
            tell_leftovers(abandoned(tempfile.gettempdir()))
        folder = Folder(tempfile.gettempdir())
        _folders.append(folder)  # first, so that no signal comes between
        folder.make()
    except OSError as e:
        raise RsvError("io_error", "TMPDIR", e.strerror or str(e)) from e
    try:
        tempfile.tempdir = os.environ["TMPDIR"] = folder.path
        yield
    finally:
        tempfile.tempdir = before
        if variable is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = variable
        _remove_folders()


@contextlib.contextmanager
def _ending_well() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        hush(sys.stdout, sys.stderr)
        raise typer.Exit(PIPE_CLOSED) from None
    except _Stopped as e:
        _leave(e.number)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            terminal.stderr().print("interrupted", style="yellow")
        raise typer.Exit(128 + signal.SIGINT) from None


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """The first signal unwinds the stack; a second one, while that is under way, ends the process at once.

    One that comes when the output is in its place finds nothing to stop: the command ends as it would. One that falls
    into a finalizer, where Python forgets what is raised, is raised again.
    """
    first: list[int] = []
    forgotten: list[int] = []
    commits_before, late = _commits(), False
    hook_before = sys.unraisablehook

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal late
        if forgotten:
            forgotten.clear()
        elif first:
            _leave(None if late else first[0])
        else:
            first.append(number)
        late = _commits() > commits_before
        if not late:
            raise _Stopped(number)

    def raise_again(lost: sys.UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, _Stopped):
            hook_before(lost)
            return
        forgotten.append(lost.exc_value.number)
        again = threading.Timer(_MOMENT, signal.pthread_kill, (threading.main_thread().ident, *forgotten))
        again.daemon = True
        again.start()

    before: dict[int, Any] = {}
    try:
        sys.unraisablehook = raise_again
        for number in (getattr(signal, name) for name in _STOPPING if hasattr(signal, name)):
            # a signal that is ignored stays so, as SIGHUP under nohup
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                with contextlib.suppress(ValueError):  # not the main thread
                    before[number] = signal.signal(number, stop)
        yield
    finally:
        sys.unraisablehook = hook_before
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if first else handler)


def _outputs() -> Any:
    """The module, if it is there: a signal may have come during an import, and so nothing is imported here."""
    return sys.modules.get("rsv_format.outputs")


def _commits() -> int:
    return int(getattr(_outputs(), "commits", int)())


def _leave(number: int | None) -> NoReturn:
    """End the process by a signal's exit code, or with 0 where none came in time, and leave no temporary file.

    It waits for nothing: not for threads, nor for somebody to read what standard output has not taken.
    """
    for other in (getattr(signal, name) for name in _STOPPING if hasattr(signal, name)):
        signal.signal(other, signal.SIG_IGN)
    getattr(_outputs(), "discard_all", int)()
    _remove_folders()
    if number is None:
        os._exit(0)
    word = "interrupted" if number == signal.SIGINT else "stopped"
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty():
            word = f"{_SHOW_CURSOR}\r{word}"  # a bar has hidden it
        os.write(sys.stderr.fileno(), f"{word}\n".encode())
    os._exit(128 + number)


def _remove_folders() -> None:
    while _folders:
        _folders.pop().remove()


def hush(*streams: Any) -> None:
    """Nobody reads, or can: keep Python from complaining of it when it flushes at exit."""
    for stream in streams:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
