"""Settings from the environment, one table: name, default, meaning. Each is read when it is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["MAX_THREADS", "MIN_SLOT_BYTES", "SETTINGS", "Setting", "get"]

MAX_THREADS = 1024
"""The most that ``GRADPACK_NUM_THREADS`` may be, and the extension takes."""

MIN_SLOT_BYTES = 64 << 10
"""The least that ``GRADPACK_SLOT_BYTES`` may be."""


@dataclass(frozen=True)
class Setting:
    """One environment variable."""

    default: str
    parse: Callable[[str], object]
    meaning: str


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("wanted 0 or 1")
    return text == "1"


def _whole(text: str) -> int:
    # int() also takes signs, blanks, underscores and the digits of other scripts.
    if not (text.isascii() and text.isdigit()):
        raise ValueError("wanted a whole number")
    return int(text)


def _threads(text: str) -> int:
    threads = _whole(text)
    if threads > MAX_THREADS:
        raise ValueError(f"wanted a number from 0 to {MAX_THREADS}")
    return threads


def _slot_bytes(text: str) -> int:
    size = _whole(text)
    if size < MIN_SLOT_BYTES or size % MIN_SLOT_BYTES:
        raise ValueError(f"wanted a positive multiple of {MIN_SLOT_BYTES}")
    return size


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 86400:
        raise ValueError("wanted seconds from 0.1 to 86400")
    return seconds


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"wanted one of {', '.join(repr(choice) for choice in choices)}")
        return text

    return parse


SETTINGS: dict[str, Setting] = {
    "GRADPACK_ARRAY_PROTOCOL": Setting(
        "auto",
        _one_of("auto", "exchange", "dlpack", "cuda_array_interface", "buffer"),
        "the one protocol to read arrays by; auto takes the fastest that each array offers",
    ),
    "GRADPACK_FULL_PATH": Setting("0", _flag, "1: a world of one rank packs, reduces and unpacks too (tests, timing)"),
    "GRADPACK_HOST": Setting("", str, "name of this host; ranks of different names share no memory. Empty: the kernel's boot id"),
    "GRADPACK_HOST_TIMEOUT": Setting(
        "1.5", _seconds, "seconds after which another host that acknowledges nothing counts as gone"
    ),
    "GRADPACK_NUM_THREADS": Setting("0", _threads, "threads that pack; 0 follows torch.get_num_threads()"),
    "GRADPACK_SIMD": Setting(
        "", _one_of("", "avx512", "avx2", "scalar"), "instruction set of the CPU kernels; empty: the best there is"
    ),
    "GRADPACK_SLOT_BYTES": Setting(
        str(8 << 20), _slot_bytes, "bytes of one of the six staging slots; equal on all ranks, read at a group's first call"
    ),
    "GRADPACK_TRANSPORT": Setting(
        "auto", _one_of("auto", "process_group"), "process_group: no shared memory, for groups whose first call is still to come"
    ),
}


def get(name: str) -> object:
    """The value of a setting.

    Raises:
        ValueError: The variable holds what the setting does not accept; the message names the variable.
    """
    return _parsed(name, os.environ.get(name, SETTINGS[name].default))


@lru_cache(maxsize=64)
def _parsed(name: str, text: str) -> object:
    try:
        return SETTINGS[name].parse(text)
    except ValueError as error:
        raise ValueError(f"environment: {name}: found {text!r}, {error}") from None
