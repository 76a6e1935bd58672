"""Train the tables of trellis codes that rsv_format ships, and print how far each is from the rate-distortion bound.

Lloyd's iteration: encode samples of N(0, 1), make each centroid the mean of the samples whose windows select it,
repeat. Samples are new each time, and a table is antisymmetric, its second half the first one's reversed and negated,
so that a sample speaks for two centroids. From random tables it gets better results than from ordered ones, and they
differ little; of several starts the best is kept. One machine gives the same tables for any number of threads.

    python tools/train_codebooks.py                          # all of them: a quarter of an hour on two quiet cores
    python tools/train_codebooks.py --window 8 --bits 4
    python tools/train_codebooks.py --print
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np
from numpy.typing import NDArray

from rsv_format.quantizer.codebooks import DISTORTIONS, FOLDER, TRELLIS_BITS, WINDOWS, distortions, table_path
from rsv_format.quantizer.trellis import encode

Table = NDArray[np.float32]

STARTS = {8: 4, 12: 1}  # by window
ITERATIONS, SAMPLES = 200, (64, 2048)
POLISHING, MANY_SAMPLES = 10, (256, 2048)
TEST_SEED, TEST_SAMPLES = 2**32, (256, 4096)


def statistics(table: Table, bits: int, samples: Table) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """How many samples select each centroid, their sums, and the mean squared error."""
    indices = encode(samples, table, bits).reshape(-1).astype(np.intp)
    wide = samples.reshape(-1).astype(np.float64)
    counts = np.bincount(indices, minlength=table.size).astype(np.float64)
    sums = np.bincount(indices, wide, minlength=table.size)
    return counts, sums, float(np.mean(np.square(wide - table[indices])))


def antisymmetric(half: NDArray[np.float64]) -> Table:
    """The table of which this is the first half."""
    return np.concatenate([half, -half[::-1]]).astype(np.float32)


def improved(table: Table, bits: int, samples: Table) -> Table:
    """One of Lloyd's steps; centroids that no sample selects stay."""
    counts, sums, _ = statistics(table, bits, samples)
    counts, sums = counts + counts[::-1], sums - sums[::-1]
    means = np.where(counts > 0, sums / np.maximum(counts, 1), table)
    return antisymmetric(means[: table.size // 2])


def trained(bits: int, window: int) -> tuple[Table, float]:
    """The best table of several starts, and its mean squared error on samples that it has not seen."""
    test = np.random.default_rng(TEST_SEED).standard_normal(TEST_SAMPLES, np.float32)
    found: list[tuple[float, Table]] = []
    for start in range(STARTS[window]):
        rng = np.random.default_rng(start)
        table = antisymmetric(rng.standard_normal(2 ** (window - 1)))
        for shape in [SAMPLES] * ITERATIONS + [MANY_SAMPLES] * POLISHING:
            table = improved(table, bits, rng.standard_normal(shape, np.float32))
        found.append((statistics(table, bits, test)[2], table))
        print(f"bits {bits}, window {window}, start {start}: {found[-1][0]:.6f}", file=sys.stderr, flush=True)
    error, table = min(found, key=lambda pair: pair[0])
    return table, error


def show() -> None:
    """The mean squared errors, and in brackets the distance to the bound 2^(-2 bits) in bits."""
    known = distortions()
    print("bits", *(f"window {window:2}      " for window in WINDOWS), "bound", sep="  ")
    for bits in TRELLIS_BITS:
        cells = [
            f"{known[bits, window]:.6f} ({0.5 * np.log2(known[bits, window] * 4**bits):.3f})"
            if (bits, window) in known else " " * 16
            for window in WINDOWS
        ]  # fmt: skip
        print(f"{bits:4}", *cells, f"{4.0**-bits:.6f}", sep="  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", default=TRELLIS_BITS, choices=TRELLIS_BITS)
    parser.add_argument("--window", type=int, nargs="+", default=WINDOWS, choices=WINDOWS)
    parser.add_argument("--print", action="store_true", help="train none, show what there is")
    arguments = parser.parse_args()
    if not arguments.print:
        FOLDER.mkdir(exist_ok=True)
        for window in arguments.window:
            for bits in arguments.bits:
                table, error = trained(bits, window)
                np.save(table_path(bits, window), table[: table.size // 2])
                known = json.loads(DISTORTIONS.read_text()) if DISTORTIONS.exists() else {}
                known[f"{bits}-{window}"] = round(error, 8)
                DISTORTIONS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    show()


if __name__ == "__main__":
    main()
