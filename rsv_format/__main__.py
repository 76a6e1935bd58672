"""`python -m rsv_format`: the command line `rsv`."""

import runpy

runpy.run_module("rsv_cli", run_name="__main__")
