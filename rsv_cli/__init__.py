"""The command line `rsv`.

Modules, bottom up:

- terminal: consoles, JSON, progress;  session: errors, signals and closed pipes to exit codes
- options: arguments that commands share;  files: output put into place whole;  texts: files of text
- describe: sizes, names and transforms in words
- quantize, calibrate, inspect, compare, evaluate, export, generate, doctor (with adoption): one command or pair each
- app: the commands under one name
"""

from __future__ import annotations

import os
import sys


def run() -> None:
    """The console script."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with it closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
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
    except KeyboardInterrupt:
        sys.exit(130)
    app(prog_name="rsv")
