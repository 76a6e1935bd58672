"""The coverage-guided target of rsv_format; needs atheris.

    python -m fuzz.fuzz_python [libFuzzer's options] CORPUS SEEDS...

Inputs are files without the zeros at their end (fuzz/corpus.py makes seeds). RsvError is an answer; anything else
that comes out of the package is a find.
"""

from __future__ import annotations

import random
import sys

import atheris
import numpy as np

with atheris.instrument_imports(include=["rsv_format"]):
    import rsv_format  # noqa: F401  before what uses it

from fuzz.corpus import pad, trim
from fuzz.exercise import exercise
from fuzz.mutate import mutate


def test_one_input(data: bytes) -> None:
    exercise(pad(data))


def mutator(data: bytes, max_size: int, seed: int) -> bytes:
    """Mostly with structure; as libFuzzer does it where there is none."""
    rng = random.Random(seed)
    if len(data) >= 64 and rng.random() < 0.8:
        try:
            changed = trim(mutate(pad(data), rng))
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
            changed = b""  # no header to change
        if 0 < len(changed) <= max_size:
            return changed
    return bytes(atheris.Mutate(data, max_size))


def main() -> None:
    np.seterr(all="ignore")  # numbers that are not finite are to be expected
    atheris.Setup([*sys.argv, "-max_len=4096", "-rss_limit_mb=1024"], test_one_input, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
