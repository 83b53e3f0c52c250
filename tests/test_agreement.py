"""Ranks that differ: every rank raises, names the difference, keeps its gradients, and the next call works."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

import gradpack
from gradpack.testing import assert_same, run_ranks

pytestmark = pytest.mark.usefixtures("over")


def refused(call: Any, kind: type[Exception]) -> str:
    """The message of the error that ``call`` must raise."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


def check_next_call(rank: int, world: int) -> None:
    grad = torch.full((5,), float(rank))
    gradpack.allreduce([grad], op="sum")
    assert_same(grad, torch.full((5,), float(sum(range(world)))))


def differ(rank: int, world: int, ours: dict[str, Any], theirs: dict[str, Any], odd: int) -> str:
    """Rank ``odd`` calls with ``theirs``, the others with ``ours``; returns the message."""
    mine = dict(theirs if rank == odd else ours)
    shapes, dtypes = mine.pop("shapes", [(4,), (2, 3)]), mine.pop("dtypes", ["float32", "float32"])
    grads = [torch.ones(shape).to(getattr(torch, dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
    before = [grad.clone() for grad in grads]
    call = gradpack.broadcast if mine.pop("broadcast", False) else gradpack.allreduce
    message = refused(lambda: call(grads, **mine), gradpack.LayoutMismatch)
    for grad, was in zip(grads, before, strict=True):
        assert_same(grad, was)
    check_next_call(rank, world)
    return message


BIG = [(70_000,), (2, 3)]
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "shape": (
        {},
        {"shapes": [(4,), (2, 2)]},
        r"grads\[1\].*float32\[2, 2\].*float32\[2, 3\]|grads\[1\].*float32\[2, 3\].*float32\[2, 2\]",
    ),
    "size of a big one": ({"shapes": BIG}, {"shapes": [(70_001,), (2, 3)]}, r"grads\[0\].*7000[01].*7000[01]"),
    "same size, other shape": ({}, {"shapes": [(4,), (3, 2)]}, r"grads\[1\].*\[3, 2\]"),
    "dtype": ({}, {"dtypes": ["float32", "int32"], "op": "sum"}, r"op: 'mean'.*'sum'|op: 'sum'.*'mean'"),
    "fp16 against bf16": ({"dtypes": ["float16"] * 2}, {"dtypes": ["bfloat16"] * 2}, r"grads\[0\].*float16\[4\].*float16\[4\]"),
    "order": ({}, {"shapes": [(2, 3), (4,)]}, r"grads\[0\]"),
    "count": ({}, {"shapes": [(4,)], "dtypes": ["float32"]}, r"grads\[1\].*nothing"),
    "empty against full": ({}, {"shapes": [], "dtypes": []}, r"grads\[0\].*nothing"),
    "splits": ({}, {"splits": 3}, r"splits: [34].*[34]"),
    "bytes_per_pack": ({}, {"bytes_per_pack": 64}, r"splits|bytes_per_pack"),
    "cut": ({}, {"cut": "gradient"}, r"cut: '(even|gradient)'"),
    "compress": ({}, {"compress": "fp16"}, r"compress: (None|'fp16')"),
    "op": ({}, {"op": "sum"}, r"op: '(mean|sum)'"),
    "missing": ({}, {"missing": "zeros"}, r"missing: '(error|zeros)'"),
    "kind of call": ({}, {"broadcast": True}, r"kind of call: '(allreduce|broadcast)'"),
    "root": ({"broadcast": True, "root": 0}, {"broadcast": True, "root": 1}, r"root: [01]"),
}


def all_differences(rank: int, world: int, odd: int) -> dict[str, str]:
    return {name: differ(rank, world, ours, theirs, odd) for name, (ours, theirs, _) in DIFFERENCES.items()}


@pytest.mark.parametrize(("world", "odd"), [(2, 0), (2, 1), (4, 2)])
def test_every_difference_is_named_on_every_rank(world: int, odd: int) -> None:
    messages = run_ranks(all_differences, world, odd)
    import re

    for name, (_, _, pattern) in DIFFERENCES.items():
        for rank in range(world):
            message = messages[rank][name]
            assert re.search(pattern, message), (name, message)
            others = [peer for peer in range(world) if peer != odd] if rank == odd else [odd]
            text = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
            assert message.endswith(text), (name, message)
            assert " here, " in message


def refuse_one(rank: int, world: int) -> None:
    """One rank refuses its own arguments; it raises its own error, the others say which rank and why."""

    def bad(make: Any, kind: type[Exception], facts: str, **options: Any) -> None:
        grads = make() if rank == 1 else [torch.ones(4)]
        mine = options if rank == 1 else {}
        message = refused(lambda: gradpack.allreduce(grads, **mine), kind if rank == 1 else gradpack.LayoutMismatch)
        assert facts in message, message
        assert rank == 1 or message.startswith(f"allreduce: rank 1 refused: {kind.__name__}: "), message
        check_next_call(rank, world)

    def good() -> list[torch.Tensor]:
        return [torch.ones(4)]

    for splits, kind in ((0, ValueError), (-1, ValueError), (True, TypeError), (2.5, TypeError), ("4", TypeError)):
        bad(good, kind, "allreduce: splits: found ", splits=splits)
    for argument in ("op", "compress", "cut", "transport", "missing"):
        bad(good, ValueError, f"allreduce: {argument}: found 'nonsense', wanted one of ", **{argument: "nonsense"})
    bad(good, TypeError, "allreduce: op: found 3", op=3)
    bad(good, TypeError, "allreduce: check_finite: found 1 (int)", check_finite=1)
    bad(good, NotImplementedError, "allreduce: scaling", scaling="auto")
    bad(good, NotImplementedError, "allreduce: max_norm", max_norm=1.0)
    bad(good, ValueError, "allreduce: timeout", timeout=0)
    bad(good, TypeError, "allreduce: timeout", timeout="soon")
    for timeout in (float("nan"), float("inf"), 10**400, 1e15, timedelta.max):
        bad(good, ValueError, "allreduce: timeout", timeout=timeout)
    bad(good, ValueError, "allreduce: missing", missing="mean_present", op="sum")
    bad(good, ValueError, "allreduce: names: found 2 names, wanted 1", names=["a", "b"])
    bad(lambda: 5, TypeError, "allreduce: grads: found int")
    bad(lambda: [None], TypeError, "None")
    bad(lambda: [torch.ones(4, dtype=torch.int32)], TypeError, "int32 with op='mean'")
    bad(lambda: [torch.ones(4, dtype=torch.bool)], TypeError, "bool")
    bad(lambda: [torch.ones(4).to(torch.float8_e4m3fn)], TypeError, "float8_e4m3fn")
    bad(lambda: [torch.ones(4, requires_grad=True)], ValueError, ".grad")
    bad(lambda: [torch.ones(4).expand(3, 4)], BufferError, "grads[0]")
    bad(lambda: [torch.ones(4, device="meta")], TypeError, "meta")
    twice = torch.ones(8)
    bad(lambda: [twice[:4], twice[3:7]], gradpack.LayoutError, "grads[1]")
    bad(lambda: [twice, twice], gradpack.LayoutError, "grads[1]")
    readonly = np.ones(4, np.float32)
    readonly.setflags(write=False)
    bad(lambda: [readonly], BufferError, "grads[0]")

    def raises() -> Any:
        yield torch.ones(4)
        raise RuntimeError("a generator that breaks")

    bad(raises, RuntimeError, "a generator that breaks")


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_refuses_tells_the_others(world: int) -> None:
    run_ranks(refuse_one, world)


def refuse_all(rank: int, world: int) -> None:
    assert "splits: found 0" in refused(lambda: gradpack.allreduce([torch.ones(1)], splits=0), ValueError)
    assert "root: found 7" in refused(lambda: gradpack.broadcast([torch.ones(1)], root=7), ValueError)
    assert "root: found True" in refused(lambda: gradpack.broadcast([torch.ones(1)], root=True), TypeError)
    check_next_call(rank, world)


def test_all_ranks_refuse_each_with_its_own_error() -> None:
    run_ranks(refuse_all, 2)


def parameters_with(present: list[bool], value: float) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.zeros(3, 2)) for _ in present]
    for parameter, held in zip(parameters, present, strict=True):
        if held:
            parameter.grad = torch.full((3, 2), value)
    return parameters


def missing_modes(rank: int, world: int, extra: int) -> None:
    """Gradient 0: on all ranks; 1: on rank 0; 2: on all but rank 0; 3: on none; then ``extra`` present ones."""
    present = [True, rank == 0, rank != 0, False, *[True] * extra]
    value = float(12 * (rank + 1))
    total = float(12 * world * (world + 1) // 2)

    parameters = parameters_with(present, value)
    names = [f"layer{index}" for index in range(len(present))]
    message = refused(lambda: gradpack.allreduce(parameters, names=names), gradpack.LayoutMismatch)
    assert "grads[1] 'layer1': None on rank" in message and "(and 1 more gradients)" in message, message
    for parameter, held in zip(parameters, present, strict=True):
        assert (parameter.grad is not None) == held
        if held:
            assert_same(parameter.grad, torch.full((3, 2), value))

    for mode, wanted in {
        "zeros": [total / world, 12.0 / world, (total - 12) / world],
        "mean_present": [total / world, 12.0, (total - 12) / (world - 1)],
    }.items():
        for compress in (None, "bf16"):
            parameters = parameters_with(present, value)
            result = gradpack.allreduce(parameters, missing=mode, compress=compress)
            assert result.finite is True
            for place, mean in enumerate(wanted):
                found = parameters[place].grad
                rounded = torch.full((3, 2), mean)
                assert found is not None and torch.equal(found, rounded if compress is None else found)
                assert torch.allclose(found, rounded, rtol=2**-8, atol=0)
            assert parameters[3].grad is None
            for parameter in parameters[4:]:
                assert parameter.grad is not None and torch.allclose(parameter.grad, torch.tensor(total / world), rtol=2**-8)
    check_next_call(rank, world)


@pytest.mark.parametrize(("world", "extra"), [(2, 0), (3, 0), (4, 2), (2, 3000), (3, 5000)])
def test_gradients_that_are_none_on_some_ranks(world: int, extra: int) -> None:
    run_ranks(missing_modes, world, extra)


def none_everywhere(rank: int, world: int) -> None:
    opening = 70_000
    for mode in ("error", "zeros", "mean_present"):
        parameters = parameters_with([False, True, False], float(rank))
        result = gradpack.allreduce(parameters, missing=mode)
        assert [parameter.grad is None for parameter in parameters] == [True, False, True]
        assert result.wire_bytes < opening
    frozen = parameters_with([False] * 2, 0.0)
    gradpack.allreduce(frozen)
    assert all(parameter.grad is None for parameter in frozen)
    # A gradient that is None everywhere must not travel: 4 MB of it would show in the bytes.
    big = torch.nn.Parameter(torch.zeros(1_000_000))
    assert gradpack.allreduce([big, *parameters_with([True], 1.0)]).wire_bytes < opening
    differing = [big, *parameters_with([True, rank == 0], 1.0)]
    assert gradpack.allreduce(differing, missing="zeros").wire_bytes < 2 * opening


def test_gradients_that_are_none_everywhere_stay_none_and_cost_nothing() -> None:
    run_ranks(none_everywhere, 2)


def memory_orders(rank: int, world: int, count: int) -> None:
    def grad(place: int) -> torch.Tensor:
        values = torch.arange(2 * 3 * 4 * count, dtype=torch.float32).reshape(2, 3, 4, count) * (rank + 1) + place
        return values.to(memory_format=torch.channels_last) if (rank + place) % 2 else values

    for _ in range(3):
        grads = [grad(0), grad(1), torch.ones(5)]
        strides = [tensor.stride() for tensor in grads]
        gradpack.allreduce(grads, op="sum")
        base = torch.arange(2 * 3 * 4 * count, dtype=torch.float32).reshape(2, 3, 4, count)
        for place in range(2):
            assert_same(grads[place], base * sum(range(1, world + 1)) + place * world)
        assert [tensor.stride() for tensor in grads] == strides
    # The same list with one memory order on all ranks is another layout and needs no agreement.
    same = [torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    gradpack.allreduce(same, op="sum")
    assert_same(same[0], torch.full((2, 3, 4, 4), float(world)))


@pytest.mark.parametrize(("world", "count"), [(2, 4), (3, 2000)])
def test_memory_orders_that_differ_are_agreed(world: int, count: int) -> None:
    run_ranks(memory_orders, world, count)


def slot_bytes(rank: int, world: int) -> str:
    os.environ |= {"GRADPACK_SLOT_BYTES": str(65536 * (1 + rank)), "GRADPACK_TRANSPORT": "process_group"}
    # Enough gradients that the details take several rounds, whose size must not depend on the setting.
    return refused(
        lambda: gradpack.allreduce([torch.ones(2, 3)] + [torch.ones(1) for _ in range(20_000)]), gradpack.LayoutMismatch
    )


def unusable_setting(rank: int, world: int) -> None:
    if rank == 1:
        os.environ["GRADPACK_SLOT_BYTES"] = "banana"
    kind = ValueError if rank == 1 else gradpack.LayoutMismatch
    assert "GRADPACK_SLOT_BYTES: found 'banana'" in refused(lambda: gradpack.allreduce([torch.ones(1)]), kind)
    os.environ.pop("GRADPACK_SLOT_BYTES", None)
    check_next_call(rank, world)


def test_a_setting_that_one_rank_cannot_use_reaches_all() -> None:
    run_ranks(unusable_setting, 2)


def interrupted(rank: int, world: int) -> None:
    gradpack.allreduce([torch.ones(1)])

    def grads() -> Any:
        yield torch.ones(4)
        raise KeyboardInterrupt

    if rank == 1:
        with pytest.raises(KeyboardInterrupt):
            gradpack.allreduce(grads())
        # Its next call must not meet the one that rank 0 is in.
        with pytest.raises(gradpack.TransportError, match="KeyboardInterrupt"):
            gradpack.allreduce([torch.full((4,), 101.0)])
        return
    grad = torch.ones(4)
    with pytest.raises(gradpack.TransportError):
        gradpack.allreduce([grad], timeout=2)
    assert_same(grad, torch.ones(4))


def test_an_interruption_breaks_the_group_instead_of_shifting_calls() -> None:
    run_ranks(interrupted, 2)


def materialised(rank: int, world: int) -> None:
    for make in (
        lambda: torch.ones(4, 6).t()[::2],
        lambda: torch.ones(2, 3, 4, 5)[:, ::2].transpose(0, 3),
        lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.empty_strided((3, 4, 5), (1, 0, 3)),
        lambda: torch.ones(()),
    ):
        parameter = torch.nn.Parameter(make())
        if rank == 0:
            parameter.grad = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
        gradpack.allreduce([parameter], op="sum", missing="zeros")
        assert torch.equal(parameter.grad, torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape))
    twice = torch.nn.Parameter(torch.ones(3))
    pair = [torch.nn.Parameter(torch.ones(3)), twice] if rank == 0 else [twice, twice]
    if rank == 0:
        for parameter in pair:
            parameter.grad = torch.ones(3)
    kind = gradpack.LayoutMismatch if rank == 0 else gradpack.LayoutError
    assert "a Parameter twice" in refused(lambda: gradpack.allreduce(pair, missing="zeros"), kind)
    assert rank == 0 or twice.grad is None
    check_next_call(rank, world)


def test_missing_gradients_are_made_in_the_order_that_was_planned() -> None:
    run_ranks(materialised, 2)


def test_settings_that_shape_traffic_must_be_equal() -> None:
    messages = run_ranks(slot_bytes, 2)
    assert messages[0] == "allreduce: GRADPACK_SLOT_BYTES: 65536 here, 131072 on rank 1"


def named(rank: int, world: int, listed: list[list[str] | None]) -> str:
    grads = [torch.full((3,), float(rank)), torch.full((3,), 10.0 * rank)]
    try:
        gradpack.allreduce(grads, names=listed[rank], op="sum")
    except gradpack.LayoutMismatch as error:
        assert_same(grads[0], torch.full((3,), float(rank)))
        gradpack.allreduce(grads, names=["a", "b"] if listed[rank] else None)
        return str(error)
    assert_same(grads[1], torch.full((3,), 10.0 * sum(range(world))))
    return ""


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        ([["a", "b"], ["b", "a"]], ["'a' here, 'b' on rank 1", "'b' here, 'a' on rank 0"]),
        ([["a", "b"], None, ["a", "c"]], ["'b' here, no name on rank 1, 'c' on rank 2"]),
        ([None, ["a", "b"], ["a", "b"]], None),
        ([["a", "b"], ["a", "b"]], None),
    ],
)
def test_names_that_differ_are_no_sum(listed: list[list[str] | None], found: list[str] | None) -> None:
    """Layers of one shape in another order would be added up without a word."""
    messages = run_ranks(named, len(listed), listed)
    if found is None:
        assert set(messages) == {""}
    else:
        assert all(message.endswith(text) for message, text in zip(messages, found, strict=False)), messages
        assert all(message.startswith("allreduce: grads[") for message in messages)
