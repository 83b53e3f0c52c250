"""The state of a torch optimizer as a structure, which travels as bytes, and tensors, which travel packed."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["adopt", "structure", "tensors"]

_MARK = "gradpack: a tensor"


def _replace(value: Any, replaces: Callable[[Any], bool], replacement: Callable[[Any], Any]) -> Any:
    if replaces(value):
        return replacement(value)
    if isinstance(value, dict):
        return {key: _replace(inner, replaces, replacement) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replace(inner, replaces, replacement) for inner in value)
    return value


def structure(optimizer: torch.optim.Optimizer) -> bytes:
    """The optimizer's ``state_dict`` as bytes, shapes and dtypes in the place of tensors."""
    found = _replace(
        optimizer.state_dict(),
        lambda value: isinstance(value, torch.Tensor),
        lambda tensor: (_MARK, tuple(tensor.shape), tensor.dtype),
    )
    file = io.BytesIO()
    torch.save(found, file)
    return file.getvalue()


def adopt(optimizer: torch.optim.Optimizer, data: bytes) -> None:
    """Gives the optimizer a state of that structure, its tensors zero until they are received.

    Raises:
        ValueError: The optimizer has other parameter groups.
    """
    found = torch.load(io.BytesIO(data), weights_only=True)
    optimizer.load_state_dict(
        _replace(
            found,
            lambda value: isinstance(value, tuple) and len(value) == 3 and value[0] == _MARK,
            lambda mark: torch.zeros(mark[1], dtype=mark[2]),
        )
    )


def tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of the state and of the parameter groups' settings, in an order that is equal on all ranks."""

    def walk(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                yield from walk(f"{name}.{key}", value[key])
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                yield from walk(f"{name}.{index}", inner)

    for place, group in enumerate(optimizer.param_groups):
        yield from walk(f"optimizer.{place}", {key: value for key, value in group.items() if key != "params"})
        for index, parameter in enumerate(group["params"]):
            yield from walk(f"optimizer.{place}.{index}", optimizer.state.get(parameter, {}))
