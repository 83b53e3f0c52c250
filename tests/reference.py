"""The kernels' arithmetic once more, in NumPy: slow, and plain enough to be believed.

A stream is an array of *bits*: unsigned integers of the size of its scalars.
"""

import numpy as np

from gradpack.dtypes import DTYPES

_FORMATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}  # exponent bits, fraction bits


def is_float(scalar):
    return DTYPES[scalar].kind == "float"


def bits_dtype(scalar):
    return np.dtype(f"u{DTYPES[scalar].itemsize}")


def exponent_mask(scalar):
    exponent, fraction = _FORMATS[scalar]
    return bits_dtype(scalar).type(((1 << exponent) - 1) << fraction)


def nonfinite(bits, scalar):
    """Which of them are inf or NaN."""
    if not is_float(scalar):
        return np.zeros(bits.shape, bool)
    return bits & exponent_mask(scalar) == exponent_mask(scalar)


def nan(bits, scalar):
    """Which of them are NaN."""
    if not is_float(scalar):
        return np.zeros(bits.shape, bool)
    fraction = bits_dtype(scalar).type((1 << _FORMATS[scalar][1]) - 1)
    return nonfinite(bits, scalar) & (bits & fraction != 0)


def rounded(values, wire):
    """float64 values rounded once to a 16-bit dtype, by scaling to an integer and rounding that: as float64."""
    digits, smallest, largest = {"float16": (11, -24, 65504.0), "bfloat16": (8, -133, float.fromhex("0x1.fep127"))}[wire]
    with np.errstate(all="ignore"):
        _, exponents = np.frexp(values)
        unit = np.maximum(exponents - digits, smallest)
        result = np.ldexp(np.rint(np.ldexp(values, -unit)), unit)
        result = np.where(np.abs(result) > largest, np.copysign(np.inf, result), result)
    return np.where(np.isfinite(values), result, values)


def widened(bits, scalar):
    """As numbers of the dtype that sums are kept in."""
    if not is_float(scalar):
        return bits
    if scalar == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        values = bits.view(scalar)
        return values.astype(np.float32) if scalar == "float16" else values


def narrowed(values, scalar):
    """Numbers, rounded once, as bits."""
    with np.errstate(all="ignore"):
        if scalar == "float16":
            return rounded(values.astype(np.float64), scalar).astype(np.float16).view(np.uint16)
        if scalar == "bfloat16":
            return (rounded(values.astype(np.float64), scalar).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return (values.astype(scalar) if is_float(scalar) else values).view(bits_dtype(scalar))


def divided(values, divisor):
    """By one divisor, or by one for each element; 0 and 1 leave a value as it is."""
    divisors = np.broadcast_to(divisor, values.shape)
    with np.errstate(all="ignore"):
        return np.where(divisors > 1, values / np.maximum(divisors, 1).astype(values.dtype), values)


def summed(rows, scalar):
    """Rows of bits summed in order."""
    total = widened(rows[0], scalar)
    with np.errstate(all="ignore"):
        for row in rows[1:]:
            total = total + widened(row, scalar)
    return total


def assert_same(got, want, scalar):
    """The same bits, any NaN being the same as any other."""
    wrong = np.flatnonzero((got != want) & ~(nan(got, scalar) & nan(want, scalar)))
    if wrong.size:
        at = wrong[0]
        places = f"{wrong.size} of {got.size} elements of {scalar} are wrong, the first at {at}"
        raise AssertionError(f"{places}: found {got[at]:#x}, wanted {want[at]:#x}")
