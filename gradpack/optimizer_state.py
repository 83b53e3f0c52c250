"""The state of a torch optimizer as a structure, which travels as bytes, and tensors, which travel packed.

A receiver's optimizer is left alone until everything has arrived: tensors are received into new memory, and it loads them last.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["check", "decode", "encode", "tensors"]

_MARK = "gradpack: a tensor"


def _replace(value: Any, replaces: Callable[[Any], bool], replacement: Callable[[Any], Any]) -> Any:
    if replaces(value):
        return replacement(value)
    if isinstance(value, dict):
        return {key: _replace(inner, replaces, replacement) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replace(inner, replaces, replacement) for inner in value)
    return value


def check(operation: str, optimizer: Any) -> None:
    """Refuses what is no optimizer.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{operation}: optimizer: found {type(optimizer).__name__}, wanted a torch.optim.Optimizer")


def encode(state_dict: dict[str, Any]) -> bytes:
    """An optimizer's ``state_dict`` as bytes, shapes and dtypes in the place of tensors."""
    found = _replace(
        state_dict,
        lambda value: isinstance(value, torch.Tensor),
        lambda tensor: (_MARK, tuple(tensor.shape), tensor.dtype),
    )
    file = io.BytesIO()
    torch.save(found, file)
    return file.getvalue()


def decode(operation: str, data: bytes, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The ``state_dict`` that was encoded, its tensors new and zero, for ``optimizer`` to load.

    Raises:
        ValueError: The optimizer has other parameter groups.
    """
    found = torch.load(io.BytesIO(data), weights_only=True)
    theirs, ours = ([len(group["params"]) for group in groups] for groups in (found["param_groups"], optimizer.param_groups))
    if theirs != ours:
        raise ValueError(f"{operation}: optimizer: found groups of {ours} parameters, wanted {theirs} as on the root")
    made: dict[str, Any] = _replace(
        found,
        lambda value: isinstance(value, tuple) and len(value) == 3 and value[0] == _MARK,
        lambda mark: torch.zeros(mark[1], dtype=mark[2]),
    )
    return made


def tensors(state_dict: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a ``state_dict``, in an order that is equal on all ranks."""

    def walk(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(f"{name}.{key}", inner)
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                yield from walk(f"{name}.{index}", inner)

    return walk("optimizer", state_dict)
