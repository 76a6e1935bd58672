"""Elementary functions by integer arithmetic: the last bit does not depend on a platform's math library."""

from __future__ import annotations

import decimal
from functools import cache

_BITS = 160
_ONE = 1 << _BITS


def _arctan_inverse(x: int) -> int:
    """arctan(1 / x) in units of 2^-_BITS."""
    term = total = _ONE // x
    k, sign = 3, -1
    while term:
        term //= x * x
        total += sign * (term // k)
        k, sign = k + 2, -sign
    return total


_PI = 4 * (4 * _arctan_inverse(5) - _arctan_inverse(239))


@cache
def turn(numerator: int, denominator: int) -> tuple[float, float]:
    """(cos, sin) of 2 pi numerator / denominator, each rounded once."""
    numerator %= denominator
    quarter = (4 * numerator + denominator // 2) // denominator
    x = _PI * (4 * numerator - quarter * denominator) // (2 * denominator)
    square = x * x >> _BITS
    cos = term = _ONE
    k = 1
    while term:
        term = -(term * square >> _BITS) // (k * (k + 1))
        cos += term
        k += 2
        if -4 < term < 4:
            break
    sin = term = x
    k = 2
    while term:
        term = -(term * square >> _BITS) // (k * (k + 1))
        sin += term
        k += 2
        if -4 < term < 4:
            break
    for _ in range(quarter % 4):
        cos, sin = -sin, cos
    # a value that is zero or one but for the last units of the fixed point is so exactly
    cos, sin = (0 if abs(v) < 1 << 20 else v for v in (cos, sin))
    return cos / _ONE, sin / _ONE


def ln(numerator: int, denominator: int) -> float:
    """The natural logarithm of a fraction, rounded once."""
    context = decimal.Context(prec=60)
    return float(context.ln(context.divide(decimal.Decimal(numerator), decimal.Decimal(denominator))))
