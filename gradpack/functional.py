"""The calls: ``allreduce``, ``broadcast``, ``plan``, ``explain``. Argument checks and the plan cache, nothing else."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, overload

from gradpack import _C, arrays, groups, settings, transports
from gradpack.layout import Layout, plan_layout
from gradpack.options import Options
from gradpack.packer import Packer
from gradpack.result import Handle, Result
from gradpack.transports.base import Call, Transport

__all__ = ["Explanation", "allreduce", "broadcast", "explain", "plan"]

_MAX_PACKERS = 64


@overload
def allreduce(
    grads: Any,
    splits: int = 4,
    *,
    op: str = "mean",
    compress: str | None = None,
    scaling: None = None,
    bytes_per_pack: int | None = None,
    cut: str = "even",
    max_norm: None = None,
    missing: str = "error",
    check_finite: bool = True,
    group: Any = None,
    transport: str = "auto",
    names: Iterable[str] | None = None,
    timeout: float | timedelta | None = None,
    async_op: Literal[False] = False,
) -> Result: ...
@overload
def allreduce(
    grads: Any,
    splits: int = 4,
    *,
    op: str = "mean",
    compress: str | None = None,
    scaling: None = None,
    bytes_per_pack: int | None = None,
    cut: str = "even",
    max_norm: None = None,
    missing: str = "error",
    check_finite: bool = True,
    group: Any = None,
    transport: str = "auto",
    names: Iterable[str] | None = None,
    timeout: float | timedelta | None = None,
    async_op: Literal[True],
) -> Handle: ...
def allreduce(
    grads: Any,
    splits: int = 4,
    *,
    op: str = "mean",
    compress: str | None = None,
    scaling: None = None,
    bytes_per_pack: int | None = None,
    cut: str = "even",
    max_norm: None = None,
    missing: str = "error",
    check_finite: bool = True,
    group: Any = None,
    transport: str = "auto",
    names: Iterable[str] | None = None,
    timeout: float | timedelta | None = None,
    async_op: bool = False,
) -> Result | Handle:
    """Replaces gradients by their **mean** over the ranks, in place.

    Every rank of the group calls it with equal shapes, dtypes, order and options; ranks that differ all raise
    ``LayoutMismatch`` before anything is written.

    Args:
        grads: An ``nn.Module`` or several, parameters, ``named_parameters()``, or any iterable of arrays: torch, NumPy, or
            anything with DLPack or the buffer protocol; any shapes, dtypes and dense or sliced strides, mixed. A ``Parameter``
            stands for its ``.grad``. An iterator is consumed once; an empty list takes part and changes nothing.
        splits: Packs for the gradients of one dtype: near-equal, the last takes the remainder.
        op: ``"mean"`` or ``"sum"``. Integers take ``"sum"`` only, and wrap.
        compress: ``"fp16"`` or ``"bf16"`` sends float32 and float64 gradients in 16 bits. The sum is still float32.
        scaling: Not in this version.
        bytes_per_pack: Wire bytes of one pack, in place of ``splits``.
        cut: ``"even"``, or ``"gradient"`` to cut between two gradients only.
        max_norm: Not in this version.
        missing: What a gradient that is None on some ranks means: ``"error"``, ``"zeros"``, or ``"mean_present"`` (the mean over
            the ranks that have it). One that is None on all ranks stays None.
        check_finite: Whether to look for inf and NaN in the result, at no extra pass over memory.
        group: A torch process group, an mpi4py communicator, any object with ``rank``, ``size`` and
            ``allgather(data, timeout=seconds)`` of bytes, or None for torch's default process group.
        transport: ``"auto"``, ``"shared_memory"`` (all ranks on one host), ``"hierarchical"`` (on several, some together) or
            ``"process_group"``.
        names: One name for each array, for messages and ``Result.nonfinite``.
        timeout: Seconds or a timedelta to wait for the other ranks; None for the group's own.
        async_op: Whether to run in the background and return a ``Handle`` at once; until it is done the gradients must be left
            alone.

    Returns:
        A ``Result``, or a ``Handle`` with ``async_op=True``.

    Raises:
        TypeError: An argument or a dtype is of a kind that is never taken.
        ValueError: An argument is out of range.
        BufferError: Memory is read-only or overlaps itself.
        LayoutError: Two arrays share memory.
        LayoutMismatch: The ranks do not agree.
        TransportTimeout: The deadline passed before every rank arrived.
        PeerLost: Another rank is gone.
        TransportError: There is no process group, or it is destroyed, broken, or of a parent process.

    Example:
        >>> loss.backward()  # doctest: +SKIP
        >>> gradpack.allreduce(model, splits=4)  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP
    """
    arguments = {
        "splits": splits,
        "op": op,
        "compress": compress,
        "scaling": scaling,
        "bytes_per_pack": bytes_per_pack,
        "cut": cut,
        "max_norm": max_norm,
        "missing": missing,
        "check_finite": check_finite,
        "transport": transport,
        "timeout": timeout,
        "async_op": async_op,
    }
    return _Entry("allreduce", "grads", "grad").run(grads, group, names, None, arguments)


def broadcast(
    tensors: Any,
    root: int = 0,
    *,
    optimizer: Any = None,
    splits: int = 4,
    bytes_per_pack: int | None = None,
    group: Any = None,
    transport: str = "auto",
    names: Iterable[str] | None = None,
    timeout: float | timedelta | None = None,
) -> Result:
    """Replaces arrays by those of rank ``root``, in place: before training, so that all ranks start equal.

    Args:
        tensors: As for ``allreduce``; a ``Parameter`` stands for its value, and a module brings its buffers too. Bytes are
            copied as they are, so bool is taken too.
        root: The rank of the group whose values count.
        optimizer: A ``torch.optim.Optimizer`` whose state is made equal too. Ranks need not have any state yet: the shape of
            the root's is sent first. It is loaded last, once everything has arrived.
        splits: As for ``allreduce``.
        bytes_per_pack: As for ``allreduce``.
        group: As for ``allreduce``.
        transport: As for ``allreduce``.
        names: As for ``allreduce``.
        timeout: As for ``allreduce``.

    Returns:
        A ``Result``; ``finite`` is None.

    Raises:
        ValueError: ``root`` is no rank of the group.
        GradpackError: As for ``allreduce``.

    Example:
        >>> gradpack.broadcast(model, optimizer=optimizer)  # doctest: +SKIP
    """
    arguments = {"splits": splits, "bytes_per_pack": bytes_per_pack, "transport": transport, "timeout": timeout}
    entry = _Entry("broadcast", "tensors", "value")
    if optimizer is None:
        result = entry.run(tensors, group, names, root, arguments)
    else:
        result = groups.together(_with_optimizer, group, entry, tensors, optimizer, names, root, arguments)
    assert isinstance(result, Result)
    return result


def _with_optimizer(
    group: Any, entry: _Entry, values: Any, optimizer: Any, names: Iterable[str] | None, root: int, arguments: dict[str, Any]
) -> Result | Handle:
    """Broadcasts the arrays and the optimizer's state: its structure first, whose shape only the root knows, then all tensors.

    Whatever may fail runs while arrays are collected, so that the other ranks hear of it.
    """
    from gradpack import optimizer_state

    operation = entry.operation
    is_root = groups.resolve(operation, group).rank == root
    length, data = bytearray(8), bytearray()
    state_dict: dict[str, Any] = {}

    def encoded_length() -> Iterator[bytearray]:
        optimizer_state.check(operation, optimizer)
        if is_root:
            state_dict.update(optimizer.state_dict())
            data.extend(optimizer_state.encode(state_dict))
            length[:] = len(data).to_bytes(8, "little")
        yield length

    def everything() -> Iterator[tuple[str, Any]]:
        given = arrays.collect(operation, entry.argument, values, names=names, parameters=entry.parameters)
        yield from ((str(given.label(index)), found) for index, found in enumerate(given.objects))
        if not is_root:
            state_dict.update(optimizer_state.decode(operation, bytes(data), optimizer))
        yield from optimizer_state.tensors(state_dict)

    entry.run(encoded_length(), group, None, root, arguments)
    if not is_root:
        data.extend(bytes(int.from_bytes(length, "little")))
    entry.run([data], group, None, root, arguments)
    result = entry.run(everything(), group, None, root, arguments)
    if not is_root:
        optimizer.load_state_dict(state_dict)
    return result


def plan(
    grads: Any,
    splits: int = 4,
    *,
    compress: str | None = None,
    bytes_per_pack: int | None = None,
    cut: str = "even",
    names: Iterable[str] | None = None,
) -> Layout:
    """Says what ``allreduce`` would put where. Needs no process group, moves nothing.

    Args:
        grads: As for ``allreduce``.
        splits: As for ``allreduce``.
        compress: As for ``allreduce``.
        bytes_per_pack: As for ``allreduce``.
        cut: As for ``allreduce``.
        names: As for ``allreduce``.

    Returns:
        The layout; ``print`` it, or read ``packs`` and their ``spans``.

    Raises:
        TypeError, ValueError, BufferError, LayoutError: As for ``allreduce``.

    Example:
        >>> import numpy as np
        >>> import gradpack
        >>> [pack.numel for pack in gradpack.plan([np.zeros(10, np.float32)], splits=3).packs]
        [3, 3, 4]
    """
    options = Options.make("plan", splits=splits, compress=compress, bytes_per_pack=bytes_per_pack, cut=cut)
    collected = arrays.collect("plan", "grads", grads, names=names, parameters="grad")
    specs = arrays.specs_of(arrays.describe(collected))
    return plan_layout(
        specs,
        splits=options.splits,
        bytes_per_pack=options.bytes_per_pack,
        cut=options.cut,
        compress=options.compress,
        operation="plan",
    )


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found; ``str`` gives it as text.

    Attributes:
        layout: The packs.
        transport: Name of the transport that would carry them, or None in a world of one rank.
        lines: Why, and how.

    Example:
        >>> explanation = gradpack.explain(model)  # doctest: +SKIP
        >>> explanation.transport  # doctest: +SKIP
        'process_group'
    """

    layout: Layout
    transport: str | None
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([str(self.layout), *self.lines])


def explain(
    grads: Any,
    splits: int = 4,
    *,
    compress: str | None = None,
    bytes_per_pack: int | None = None,
    cut: str = "even",
    group: Any = None,
    transport: str = "auto",
    names: Iterable[str] | None = None,
) -> Explanation:
    """Says what ``allreduce`` would put where, by which transport and why. Moves no gradient.

    The first call on a group makes the group's transport, so every rank must call it then.

    Args:
        grads: As for ``allreduce``.
        splits: As for ``allreduce``.
        compress: As for ``allreduce``.
        bytes_per_pack: As for ``allreduce``.
        cut: As for ``allreduce``.
        group: As for ``allreduce``.
        transport: As for ``allreduce``.
        names: As for ``allreduce``.

    Returns:
        An ``Explanation``; ``print`` it.

    Raises:
        TypeError, ValueError, BufferError, LayoutError, TransportError: As for ``allreduce``.

    Example:
        >>> print(gradpack.explain(model, splits=4))  # doctest: +SKIP
    """
    state = groups.resolve("explain", group)
    with state.call("explain", counts=False):
        options = Options.make(
            "explain", splits=splits, compress=compress, bytes_per_pack=bytes_per_pack, cut=cut, transport=transport
        )
        collected = arrays.collect("explain", "grads", grads, names=names, parameters="grad")
        packer = _packer(state, collected, arrays.describe(collected), options)
        if transports.alone(state):
            return Explanation(packer.layout, None, ("a world of one rank: nothing travels",))
        state.drain()
        chosen = transports.select("explain", state)
        chosen.check_offered("explain", options.transport)
        name = chosen.name if options.transport == "auto" else options.transport
        lines = (f"transport: {name}: the group {chosen.why}; {state.size} ranks", *chosen.explain(packer, name))
        return Explanation(packer.layout, name, lines)


def _packer(state: groups.GroupState, collected: arrays.Collected, described: _C.Arrays, options: Options) -> Packer:
    """The group's packer for arrays and options like these; the least recently used one makes room.

    A packer that exists vouches for what depends on dtypes and options alone, so that is checked only where one is made.
    """
    key = described.key, collected.parameters, options.packing
    packer: Packer | None = state.packers.pop(key, None)
    if packer is None:
        if collected.parameters == "grad":
            arrays.check_arithmetic(collected, described, options.op)
        packer = Packer(described.key, arrays.specs_of(described), options, collected.operation)
    state.packers[key] = packer
    if len(state.packers) > _MAX_PACKERS:
        del state.packers[next(iter(state.packers))]
    return packer


@dataclass(frozen=True)
class _Entry:
    """One entry point: how it is called in messages and what a Parameter stands for."""

    operation: str
    argument: str
    parameters: str

    def run(
        self, values: Any, group: Any, names: Iterable[str] | None, root: int | None, arguments: dict[str, Any]
    ) -> Result | Handle:
        """Checks everything, then carries the call out; a refusal reaches the other ranks before it is raised."""
        return groups.together(self._run, group, values, names, root, arguments)

    def _run(
        self, group: Any, values: Any, names: Iterable[str] | None, root: int | None, arguments: dict[str, Any]
    ) -> Result | Handle:
        state = groups.resolve(self.operation, group)
        with state.call(self.operation):
            try:
                if arguments.get("async_op") is not True:
                    state.raise_unreported()
                call = self._check(state, values, names, root, arguments)
            except Exception as refusal:
                transports.refuse(self.operation, state, refusal)
                raise
            if transports.alone(state):
                return self._run_alone(state, call)
            chosen = transports.select(self.operation, state, call.options.timeout)
            try:
                chosen.check_offered(self.operation, call.options.transport)
            except Exception as refusal:
                transports.refuse(self.operation, state, refusal)
                raise
            if call.options.async_op:
                return state.submit(lambda: self._in_background(state, chosen, call))
            return chosen.run(call)

    def _check(
        self, state: groups.GroupState, values: Any, names: Iterable[str] | None, root: Any, arguments: dict[str, Any]
    ) -> Call:
        options = Options.make(self.operation, **arguments)
        if not state.met:
            for name in ("GRADPACK_SLOT_BYTES", "GRADPACK_HOST_TIMEOUT", "GRADPACK_TRANSPORT"):
                settings.get(name)
            _C.simd_name()
        if self.parameters == "value":
            if isinstance(root, bool) or not hasattr(root, "__index__"):
                raise TypeError(f"{self.operation}: root: found {root!r} ({type(root).__name__}), wanted a rank of the group")
            root = operator.index(root)
            if not 0 <= root < state.size:
                raise ValueError(f"{self.operation}: root: found {root}, wanted a rank from 0 to {state.size - 1}")
        collected = arrays.collect(self.operation, self.argument, values, names=names, parameters=self.parameters)
        described = arrays.describe(collected)
        packer = _packer(state, collected, described, options)
        kind = "allreduce" if root is None else "broadcast"
        return Call(state.calls, kind, root, collected, described, packer, options)

    def _run_alone(self, state: groups.GroupState, call: Call) -> Result | Handle:
        nonfinite = None
        if call.options.check_finite and call.kind == "allreduce":
            nonfinite = _C.Nonfinite(len(call.arrays))
            call.packer.planned(frozenset()).plan.check_finite(call.arrays, nonfinite)
        result = call.result(nonfinite, 0)
        return state.submit(lambda: result) if call.options.async_op else result

    def _in_background(self, state: groups.GroupState, chosen: Transport, call: Call) -> Result:
        state.check_working(self.operation)
        return chosen.run(call)
