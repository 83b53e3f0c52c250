"""The options that every entry point shares, checked once."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from numbers import Real
from typing import Any

from gradpack.dtypes import COMPRESS

__all__ = ["MAX_SECONDS", "Options"]

MAX_SECONDS = 10**9
"""The longest timeout, 31 years: longer ones overflow in what waits."""

_TRANSPORTS = ("auto", "process_group", "shared_memory", "hierarchical")


def _name(operation: str, argument: str, value: object, choices: tuple[str | None, ...]) -> str | None:
    if value is not None and not isinstance(value, str):
        kind = type(value).__name__
        raise TypeError(f"{operation}: {argument}: found {value!r} ({kind}), wanted one of {', '.join(map(repr, choices))}")
    if value not in choices:
        raise ValueError(f"{operation}: {argument}: found {value!r}, wanted one of {', '.join(map(repr, choices))}")
    return value


def _positive(operation: str, argument: str, value: object) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{operation}: {argument}: found {value!r} (bool), wanted a positive integer")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{operation}: {argument}: found {value!r} ({kind}), wanted a positive integer") from None
    if number < 1:
        raise ValueError(f"{operation}: {argument}: found {number}, wanted a positive integer")
    return number


def _flag(operation: str, argument: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{operation}: {argument}: found {value!r} ({type(value).__name__}), wanted True or False")
    return value


def _seconds(operation: str, argument: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, timedelta):
        value = value.total_seconds()
    # A Real is what NumPy's scalars are too.
    if isinstance(value, bool) or not isinstance(value, Real):
        kind = type(value).__name__
        raise TypeError(f"{operation}: {argument}: found {value!r} ({kind}), wanted seconds, a timedelta or None")
    number: Any = value
    if not 0 < number <= MAX_SECONDS:
        raise ValueError(f"{operation}: {argument}: found {value!r}, wanted a positive number of seconds, {MAX_SECONDS} at most")
    return float(value)


@dataclass(frozen=True)
class Options:
    """What one call was asked to do. ``make`` checks; the fields of a made instance are right.

    Attributes:
        splits: Packs per dtype group, unless ``bytes_per_pack`` is given.
        bytes_per_pack: Wire bytes of one pack, or None.
        cut: ``"even"`` cuts anywhere, ``"gradient"`` at the nearest boundary between two gradients.
        op: ``"mean"`` or ``"sum"``.
        compress: ``None``, ``"fp16"`` or ``"bf16"``.
        missing: ``"error"``, ``"zeros"`` or ``"mean_present"``.
        check_finite: Whether to look for inf and NaN.
        transport: ``"auto"``, ``"shared_memory"``, ``"hierarchical"`` or ``"process_group"``.
        timeout: Seconds, or None for the group's own.
        async_op: Whether to return a ``Handle`` at once.
    """

    splits: int = 4
    bytes_per_pack: int | None = None
    cut: str = "even"
    op: str = "mean"
    compress: str | None = None
    missing: str = "error"
    check_finite: bool = True
    transport: str = "auto"
    timeout: float | None = None
    async_op: bool = False

    @property
    def packing(self) -> tuple[object, ...]:
        """What a packer depends on."""
        return self.splits, self.bytes_per_pack, self.cut, self.op, self.compress, self.missing

    @staticmethod
    def make(operation: str, **arguments: object) -> Options:
        """Checks every argument of ``operation``; messages read *operation: argument: found, wanted*.

        Args:
            operation: Name of the call.
            **arguments: Those of ``allreduce`` that shape it, by name; absent ones have its defaults.

        Raises:
            TypeError: An argument has a type that it never takes.
            ValueError: An argument has a value that it does not take.
            NotImplementedError: ``scaling`` or ``max_norm`` is asked for; this version has neither.
        """
        try:
            hash(tuple(arguments.values()))
        except TypeError:
            return _check(operation, **arguments)
        return _check_once(operation, **arguments)


def _check(
    operation: str,
    *,
    splits: object = 4,
    bytes_per_pack: object = None,
    cut: object = "even",
    op: object = "mean",
    compress: object = None,
    scaling: object = None,
    max_norm: object = None,
    missing: object = "error",
    check_finite: object = True,
    transport: object = "auto",
    timeout: object = None,
    async_op: object = False,
) -> Options:
    for argument, value in (("scaling", scaling), ("max_norm", max_norm)):
        if value is not None:
            raise NotImplementedError(f"{operation}: {argument}: found {value!r}, wanted None: this version does not have it")
    made = Options(
        splits=_positive(operation, "splits", splits),
        bytes_per_pack=None if bytes_per_pack is None else _positive(operation, "bytes_per_pack", bytes_per_pack),
        cut=str(_name(operation, "cut", cut, ("even", "gradient"))),
        op=str(_name(operation, "op", op, ("mean", "sum"))),
        compress=_name(operation, "compress", compress, tuple(COMPRESS)),
        missing=str(_name(operation, "missing", missing, ("error", "zeros", "mean_present"))),
        check_finite=_flag(operation, "check_finite", check_finite),
        transport=str(_name(operation, "transport", transport, _TRANSPORTS)),
        timeout=_seconds(operation, "timeout", timeout),
        async_op=_flag(operation, "async_op", async_op),
    )
    if made.missing == "mean_present" and made.op != "mean":
        raise ValueError(f"{operation}: missing: found 'mean_present' with op={made.op!r}, wanted op='mean'")
    return made


# A training loop asks for the same again and again; typed, since 1 is not True.
_check_once = lru_cache(maxsize=256, typed=True)(_check)
