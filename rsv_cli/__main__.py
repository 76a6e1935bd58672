"""`python -m rsv_cli` is `rsv`."""

from rsv_cli import run

run()
