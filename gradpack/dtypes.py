"""Dtypes by the names that NumPy and torch print, and the wire dtype that each travels as."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COMPRESS", "DTYPES", "DType", "scalar_of", "wire_dtype"]


@dataclass(frozen=True)
class DType:
    """One dtype.

    Attributes:
        name: As NumPy and torch print it, without ``torch.``.
        itemsize: Bytes of one element.
        scalar: Name of the dtype whose arithmetic applies; a complex number is two of its scalars.
        kind: ``"bool"``, ``"int"``, ``"float"`` or ``"complex"``.
    """

    name: str
    itemsize: int
    scalar: str
    kind: str


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("bool", 1, "bool", "bool"),
        *(DType(f"{sign}int{8 * size}", size, f"{sign}int{8 * size}", "int") for sign in ("", "u") for size in (1, 2, 4, 8)),
        DType("float16", 2, "float16", "float"),
        DType("bfloat16", 2, "bfloat16", "float"),
        DType("float32", 4, "float32", "float"),
        DType("float64", 8, "float64", "float"),
        DType("complex32", 4, "float16", "complex"),
        DType("complex64", 8, "float32", "complex"),
        DType("complex128", 16, "float64", "complex"),
    )
}

COMPRESS: dict[str | None, str | None] = {None: None, "fp16": "float16", "bf16": "bfloat16"}
"""What ``compress=`` may be, and the wire dtype that it gives to float32 and float64 gradients."""


def scalar_of(dtype: str) -> DType:
    """The dtype of one scalar of ``dtype``: ``float32`` for ``complex64``, the dtype itself where it is not complex."""
    return DTYPES[DTYPES[dtype].scalar]


def wire_dtype(dtype: str, compress: str | None) -> str:
    """The dtype of the scalars in a pack of ``dtype`` gradients: only float32 and float64 are ever compressed."""
    compressed = COMPRESS[compress]
    return compressed if compressed and dtype in ("float32", "float64") else DTYPES[dtype].scalar
