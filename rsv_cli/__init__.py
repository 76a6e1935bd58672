"""The command line `rsv`.

Modules, bottom up:

- terminal: consoles, JSON, progress
- options: arguments that commands share;  texts: files of text
- describe: sizes, names and transforms in words;  files: how one is read;  leftovers: of runs that were killed
- session: errors, signals and closed pipes to exit codes;  complete: names for a shell
- sampling: how tokens are chosen, for generate and chat;  ahead: the process that encodes, begun before all else
- quantize, calibrate, convert, inspect, ls, cat, diff, compare, report, evaluate, export, generate, chat, serve,
  doctor (with adoption, kernels): one command or pair each
- app: the commands under one name
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys


def run() -> None:
    """The console script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a command has its own; until then there is nothing to undo
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # started with it closed
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # help and names may lie beyond the terminal's encoding
    columns = os.environ.get("COLUMNS", "1")
    if not columns.isdecimal() or not int(columns):
        del os.environ["COLUMNS"]  # rich would print nothing in 0 columns
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its remarks repeat a file's names as they are
    try:
        from rsv_cli.app import app
    except ModuleNotFoundError as e:
        package = (e.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        sys.exit(f"rsv needs {package}: pip install 'rsv-format[cli]'")
    code: object = 0
    try:
        try:
            app(prog_name="rsv")
        except SystemExit as e:
            code = e.code
        sys.stdout.flush()
    except OSError as e:
        from rsv_cli.session import PIPE_CLOSED

        if e.errno == errno.EPIPE:
            code = PIPE_CLOSED
        elif not code:
            code = f"error[io_error] standard output: {e.strerror or e}"  # and 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code or 0)  # type: ignore[arg-type]  # Python's own ending takes a while, in which a signal says nothing true
