"""Small tables of the functions that a reader is made of: to test them before there is a reader."""

from __future__ import annotations

from typing import Any

from builder.kernel import (
    Rng,
    f32_hex,
    f64_hex,
    haar,
    hadamard_apply,
    hartley_apply,
    hartley_element,
    normal_pair,
    pack_row,
    splitmix64,
    windows,
    witness,
)


def tables() -> dict[str, dict[str, Any]]:
    """File name -> table."""
    rng = Rng("kernels")
    packing = []
    for bits in range(1, 9):
        for n in (1, 7, 8, 31, 32, 33, 50, 64, 65):
            codes = [rng.below(2**bits) for _ in range(n)]
            packing.append({"bits": bits, "codes": codes, "row": pack_row(codes, bits).hex()})
        packing.append({"bits": bits, "codes": [2**bits - 1] * 33, "row": pack_row([2**bits - 1] * 33, bits).hex()})

    indices = []
    for bits in range(1, 9):
        for window in sorted({bits, bits + 1, 8, 11, 12, 16}):
            for n in (1, 2, 5, 33):
                if window >= bits:
                    codes = [rng.below(2**bits) for _ in range(n)]
                    case = {"bits": bits, "window": window, "codes": codes, "indices": windows(codes, bits, window)}
                    indices.append(case)

    def vector(n: int) -> list[float]:
        return [rng.real(-1, 1) for _ in range(n)]

    hadamard = []
    for n in (1, 2, 4, 8, 64, 256):
        v = vector(n)
        hadamard.append({"n": n, "v": [f32_hex(a) for a in v], "out": [f32_hex(a) for a in hadamard_apply(v)]})
    hartley, elements = [], []
    for m in (2, 3, 5, 7, 8, 19, 107, 256):
        v = vector(m)
        hartley.append({"m": m, "v": [f32_hex(a) for a in v], "out": [f32_hex(a) for a in hartley_apply(v)]})
        if m <= 8:
            elements.append({"m": m, "F": [[f32_hex(hartley_element(m, j, k)) for k in range(m)] for j in range(m)]})
    seeds = (0, 1, 42, 2**32, 2**53 - 1)
    split = [{"seed": seed, "z": [f"{splitmix64(seed, k):016x}" for k in range(6)]} for seed in seeds]
    normal = [{"seed": seed, "g": [f64_hex(g) for k in range(8) for g in normal_pair(seed, k)]} for seed in seeds]
    derived = []
    for m, seed in ((1, 5), (2, 0), (3, 42), (4, 1), (5, 2**53 - 1), (8, 7), (16, 1)):
        F = haar(m, seed)
        derived.append({
            "m": m, "seed": seed, "F": [[f32_hex(v) for v in row] for row in F],
            "witness": [f32_hex(v) for v in witness(F)],
        })  # fmt: skip
    return {
        "packing": {
            "rules": ["RSV-510", "RSV-511"], "tolerance": 0,
            "about": "codes of a row, and the bytes of its words, in hexadecimal",
            "cases": packing,
        },
        "windows": {
            "rules": ["RSV-512"], "tolerance": 0, "about": "codes of a row, and its indices", "cases": indices,
        },
        "hadamard": {
            "rules": ["RSV-703"], "tolerance": 1e-5,
            "about": "v @ H_n; f32 in hexadecimal; norm(difference) <= tolerance * norm(v)",
            "cases": hadamard,
        },
        "hartley": {
            "rules": ["RSV-705"], "tolerance": 1e-5,
            "about": "F @ v, and F itself for small orders (each element within 1e-7); f32 in hexadecimal",
            "cases": hartley, "elements": elements,
        },
        "splitmix64": {
            "rules": ["RSV-710"], "tolerance": 0, "about": "z_0, z_1, ... of a seed, in hexadecimal", "cases": split,
        },
        "box-muller": {
            "rules": ["RSV-711"], "tolerance": 1e-12,
            "about": "g_0, g_1, ... of a seed; f64 in hexadecimal; absolute difference <= tolerance", "cases": normal,
        },
        "haar": {
            "rules": ["RSV-712", "RSV-713"], "tolerance": 1e-6,
            "about": "F and its witness; f32 in hexadecimal; absolute difference of an element <= tolerance",
            "cases": derived,
        },
    }  # fmt: skip
