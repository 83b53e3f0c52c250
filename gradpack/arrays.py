"""From what a caller passes to the arrays that are packed. The one file that knows NumPy, CuPy and torch arrays by name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradpack import _C, settings
from gradpack.dtypes import DTYPES
from gradpack.errors import BuildError, LayoutError
from gradpack.layout import ArraySpec

__all__ = [
    "Collected",
    "check_arithmetic",
    "collect",
    "describe",
    "flatten",
    "follow_threads",
    "mark_written",
    "materialise",
    "specs_of",
]

_ARRAY_ATTRIBUTES = ("__dlpack__", "__cuda_array_interface__")


@dataclass(frozen=True)
class Collected:
    """The arrays of one call, in order.

    Attributes:
        operation: Name of the call, for messages.
        argument: Name of the argument that held the arrays, for messages.
        objects: The arrays; a ``Parameter`` stands for its ``.grad`` or its value, as ``parameters`` says.
        names: One name for each, or None.
        parameters: ``"grad"`` or ``"value"``.
    """

    operation: str
    argument: str
    objects: Sequence[Any]
    names: Sequence[str] | None
    parameters: str

    def label(self, index: int) -> str | int:
        """Name of an array, or its index where it has none."""
        return self.names[index] if self.names is not None else index

    def where(self, index: int) -> str:
        """The place that messages give: ``allreduce: grads[17] 'layer3.weight'``."""
        name = f" {self.names[index]!r}" if self.names is not None else ""
        return f"{self.operation}: {self.argument}[{index}]{name}"


def _torch() -> Any:
    """The torch module if the program has imported it: only then can the program hold a tensor."""
    return sys.modules.get("torch")


def _is_array(value: object) -> bool:
    if any(hasattr(value, attribute) for attribute in _ARRAY_ATTRIBUTES):
        return True
    try:
        memoryview(value)  # type: ignore[arg-type]
    except (TypeError, BufferError):
        return False
    return not isinstance(value, bytes)


def _of_module(module: Any, parameters: str) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters()
    if parameters == "value":
        yield from module.named_buffers()


def flatten(operation: str, argument: str, values: object, parameters: str) -> Iterator[tuple[str | None, Any]]:
    """Yields (name or None, array); modules are expanded, an array that two modules share comes once."""
    torch = _torch()
    module_type: Any = torch.nn.Module if torch is not None else ()
    if isinstance(values, module_type):
        yield from _of_module(values, parameters)
        return
    if _is_array(values):
        yield None, values
        return
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(
            f"{operation}: {argument}: found {type(values).__name__}, wanted a module, parameters, named_parameters() or arrays"
        )
    seen: set[int] = set()
    for index, value in enumerate(values.items() if isinstance(values, Mapping) else values):
        if isinstance(value, module_type):
            for name, array in _of_module(value, parameters):
                if id(array) not in seen:
                    seen.add(id(array))
                    yield f"{index}.{name}", array
        elif isinstance(value, tuple) and len(value) == 2 and (value[0] is None or isinstance(value[0], str)):
            yield value
        else:
            yield None, value


def _are_arrays_alone(values: Any) -> bool:
    """Whether nothing in a list has to be taken apart; looks at each type once, since long lists come with every call."""
    torch = _torch()
    wrappers: Any = (tuple,) if torch is None else (tuple, torch.nn.Module)
    return not any(issubclass(kind, wrappers) for kind in set(map(type, values)))


def collect(operation: str, argument: str, values: object, *, names: Iterable[str] | None, parameters: str) -> Collected:
    """Makes one flat list of what the caller passed; an iterator is consumed once.

    Args:
        operation: Name of the call, for messages.
        argument: Name of the argument, for messages.
        values: An ``nn.Module``, an array, or an iterable of modules, arrays, parameters or ``(name, array)`` pairs.
        names: One name for each array, in place of those that modules and pairs bring.
        parameters: ``"grad"`` or ``"value"``; with ``"value"`` a module brings its buffers too.

    Raises:
        TypeError: ``values`` holds no arrays, or ``names`` no strings.
        ValueError: ``names`` has another length.
    """
    if type(values) in (list, tuple) and _are_arrays_alone(values):
        found: list[tuple[str | None, Any]] = []
        objects = list(values)  # type: ignore[call-overload]
    else:
        found = list(flatten(operation, argument, values, parameters))
        objects = [array for _, array in found]
    labels: list[str] | None
    if names is not None:
        if isinstance(names, str):
            raise TypeError(f"{operation}: names: found a str, wanted one name for each array")
        labels = list(names)
        for label in labels:
            if not isinstance(label, str):
                raise TypeError(f"{operation}: names: found {label!r} ({type(label).__name__}), wanted strings")
        if len(labels) != len(objects):
            raise ValueError(f"{operation}: names: found {len(labels)} names, wanted {len(objects)}, one for each array")
    elif any(name is not None for name, _ in found):
        labels = [str(index) if name is None else name for index, (name, _) in enumerate(found)]
    else:
        labels = None
    return Collected(operation, argument, objects, labels, parameters)


def describe(collected: Collected) -> _C.Arrays:
    """Reads addresses, shapes and dtypes in one call into the extension.

    Raises:
        TypeError: Something is no array, or has a dtype or layout that gradpack does not take.
        BufferError: Memory is read-only, overlaps itself, or is a lazy view.
        LayoutError: Two arrays share memory.
        BuildError: The arrays are on a device that this build cannot reach.
    """
    follow_threads()
    try:
        described = _described(collected)
    except BufferError:
        # Looked for only once refused: asking every gradient of every call would cost more than the description.
        if not _resolve_lazy_gradients(collected):
            raise
        described = _described(collected)
    if described.num_absent and len({id(found) for found in collected.objects}) < len(collected.objects):
        # Two that are there share memory, which is refused already; two that are absent would once they are materialised.
        raise LayoutError(f"{collected.operation}: {collected.argument}: found a Parameter twice, wanted each once")
    device, index = described.device
    if device != "cpu":
        raise BuildError(
            f"{collected.operation}: {collected.argument}: found arrays on {device}:{index}, wanted cpu: built without CUDA"
        )
    return described


def _described(collected: Collected) -> _C.Arrays:
    protocol = str(settings.get("GRADPACK_ARRAY_PROTOCOL"))
    return _C.describe(
        collected.objects, collected.operation, collected.argument, collected.names, collected.parameters, protocol
    )


def _resolve_lazy_gradients(collected: Collected) -> bool:
    """Gives Parameters whose gradient autograd left as a lazy conjugate or negative one that holds its values; whether any had.

    A new one, not the memory underneath: whoever else holds a view of that would see other values.
    """
    torch = _torch()
    if torch is None or collected.parameters != "grad":
        return False
    found = False
    for parameter in collected.objects:
        grad = parameter.grad if isinstance(parameter, torch.nn.Parameter) else None
        if grad is not None and (grad.is_conj() or grad.is_neg()):
            parameter.grad = grad.detach().resolve_conj().resolve_neg()
            found = True
    return found


def follow_threads() -> None:
    """Lets the kernels use as many threads as the setting says, or torch uses."""
    threads = settings.get("GRADPACK_NUM_THREADS")
    torch = _torch()
    if threads:
        _C.set_num_threads(threads)  # type: ignore[arg-type]
    elif torch is not None:
        _C.set_num_threads(min(torch.get_num_threads(), settings.MAX_THREADS))


def specs_of(described: _C.Arrays) -> tuple[ArraySpec, ...]:
    """The description that layouts are planned from."""
    return tuple(
        ArraySpec(described.shape(index), described.dtype(index), described.order(index)) for index in range(len(described))
    )


def check_arithmetic(collected: Collected, described: _C.Arrays, op: str) -> None:
    """Refuses dtypes that ``op`` is not defined for.

    Raises:
        TypeError: A bool array, or an integer array with ``op="mean"``.
    """
    for index in range(len(described)):
        dtype = described.dtype(index)
        kind = DTYPES[dtype].kind
        if kind == "bool":
            raise TypeError(f"{collected.where(index)}: found bool, wanted a dtype that can be summed")
        if kind == "int" and op == "mean":
            raise TypeError(f"{collected.where(index)}: found {dtype} with op='mean', wanted op='sum' or a floating dtype")


def materialise(collected: Collected, described: _C.Arrays, indices: Iterable[int]) -> _C.Arrays:
    """Gives the Parameters at ``indices`` a gradient of zeros in the memory order described, and describes all arrays again."""
    torch = _torch()
    for index in indices:
        parameter = collected.objects[index]
        order = described.order(index) or tuple(range(parameter.ndim))
        empty = torch.empty_permuted(parameter.shape, order, dtype=parameter.dtype, device=parameter.device)
        parameter.grad = empty.zero_()
    return describe(collected)


def mark_written(described: _C.Arrays) -> None:
    """Moves the version counters of the torch tensors, so that autograd refuses values saved before they were overwritten."""
    tensors = described.torch_tensors()
    if not tensors:
        return
    increment: Any = _torch().autograd.graph.increment_version
    try:
        increment(tensors)
    except RuntimeError:
        # Inference tensors have no version counter, and the call above says so for the whole list.
        increment([tensor for tensor in tensors if not tensor.is_inference()])
