"""allreduce as programs use it: against torch's own collectives and DDP, from everything that holds gradients."""

from __future__ import annotations

import array
import ctypes
import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradpack
from gradpack.testing import assert_same, run_ranks


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 300), nn.ReLU(), nn.Linear(300, 10)
    )


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 1, 8, 8, generator=generator), torch.randint(0, 10, (6,), generator=generator)


def train(model: nn.Module, rank: int, reduce: Any, steps: int = 20) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        images, labels = batch_of(step, rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        reduce(model)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def against_ddp(rank: int, world: int, splits: int) -> None:
    made = 0

    def reduce(model: nn.Module) -> None:
        nonlocal made
        result = gradpack.allreduce(model, splits=splits)
        assert result.finite is True
        made += 1

    ours = train(make_model(), rank, reduce)
    theirs = train(DistributedDataParallel(make_model()), rank, lambda model: None)
    assert made == 20
    for found, wanted in zip(ours, theirs, strict=True):
        if world <= 2:
            # DDP divides before the sum, gradpack after: with two ranks both are exact steps, so not a bit may differ.
            assert_same(found, wanted)
        # More ranks: each step rounds (world + 1) times at most, and SGD carries that on.
        assert torch.allclose(found, wanted, rtol=0, atol=20 * (world + 1) * 2**-24 * 50)
    digest = torch.cat([parameter.flatten() for parameter in ours])
    everyone = [torch.empty_like(digest) for _ in range(world)]
    dist.all_gather(everyone, digest)
    for other in everyone:
        assert_same(other, digest)


@pytest.mark.parametrize(("world", "splits"), [(1, 4), (2, 4), (3, 1), (4, 7)])
def test_trains_as_distributed_data_parallel_does(world: int, splits: int) -> None:
    run_ranks(against_ddp, world, splits)


def against_all_reduce(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    for dtype in (torch.float32, torch.float64):
        grads = [torch.randn(shape, dtype=dtype) for shape in ((300, 70), (41,), (), (9, 8, 7), (50_000,))]
        wanted = [grad.clone() for grad in grads]
        for tensor in wanted:
            dist.all_reduce(tensor)
            tensor /= world
        gradpack.allreduce(grads)
        for place, (found, other) in enumerate(zip(grads, wanted, strict=True)):
            # Both sum the same numbers in some order: world - 1 roundings each, relative to the sum of magnitudes.
            bound = world * torch.finfo(dtype).eps * 8
            assert (found - other).abs().max() <= bound, place


@pytest.mark.parametrize("world", [2, 3, 4])
def test_equals_all_reduce(world: int) -> None:
    run_ranks(against_all_reduce, world)


ANCESTORS_SHAPES = [[(4,), (4,), (3, 3), (3, 3)], [(8,), (3, 3), (12,), (5, 5, 5)], [(8,), (3, 3), (12,), (5, 5, 5), (3,), (4,)]]


def whole_numbers(rank: int, world: int) -> None:
    """Packed and unpacked sums are equal on whole numbers; shapes and values are those of its ancestors' tests."""
    for shapes in ANCESTORS_SHAPES:
        grads, at = [], 10 * rank
        for shape in shapes:
            count = int(np.prod(shape))
            grads.append(torch.arange(at, at + count, dtype=torch.float32).reshape(shape))
            at += count
        wanted = [grad.clone() for grad in grads]
        for tensor in wanted:
            dist.all_reduce(tensor)
        for options in ({"splits": 1}, {"splits": 3}, {"splits": 8}, {"bytes_per_pack": 40}, {"cut": "gradient"}):
            packed = [grad.clone() for grad in grads]
            gradpack.allreduce(packed, op="sum", **options)
            for found, other in zip(packed, wanted, strict=True):
                assert_same(found, other)


@pytest.mark.parametrize("world", [2, 3])
def test_whole_numbers_sum_as_unpacked_ones(world: int) -> None:
    run_ranks(whole_numbers, world)


def sixteen_bits(rank: int, world: int) -> None:
    """The same bits on all ranks and for every splits; no finite mean becomes inf through the sum."""
    torch.manual_seed(rank)
    # Long enough that most of it travels after the opening; the greatest finite value where either way must carry it.
    source = torch.randn(80_000) * 1000
    source[5] = source[-5] = 65504.0
    for compress, wire in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        seen = []
        for splits in (1, 3, 8):
            grad = source.clone()
            assert gradpack.allreduce([grad], splits, compress=compress).finite is True
            seen.append(grad)
        everyone = [torch.empty_like(grad) for _ in range(world)]
        dist.all_gather(everyone, seen[0])
        for other in [*seen, *everyone]:
            assert_same(other, seen[0])
        inputs = [torch.empty_like(source) for _ in range(world)]
        dist.all_gather(inputs, source)
        total = torch.zeros_like(source)
        for tensor in inputs:
            total += tensor.to(wire).float()
        mean = torch.from_numpy(total.numpy() / np.float32(world))
        assert_same(seen[0].to(wire), mean.to(wire))
    half = torch.full((80_000,), 60_000.0, dtype=torch.float16)
    assert gradpack.allreduce([half]).finite is True
    assert_same(half, torch.full((80_000,), 60_000.0, dtype=torch.float16))


@pytest.mark.parametrize("world", [2, 3])
def test_sixteen_bit_wires(world: int) -> None:
    run_ranks(sixteen_bits, world)


def nonfinite(rank: int, world: int) -> None:
    grads = [torch.ones(10), torch.ones(50_000), torch.ones(7, dtype=torch.float64), torch.ones(3, dtype=torch.int32)]
    if rank == world - 1:
        grads[1][40_000] = float("inf")
        grads[2][3] = float("nan")
    result = gradpack.allreduce(grads, op="sum", names=["a", "b", "c", "d"])
    assert (result.finite, result.nonfinite) == (False, ("b", "c"))
    assert torch.isinf(grads[1][40_000]) and torch.isnan(grads[2][3])
    result = gradpack.allreduce([torch.full((4,), 1e6)], compress="fp16")
    # 1e6 overflows float16 as it is cast; a world of one rank casts nothing.
    assert (result.finite, result.nonfinite) == ((False, (0,)) if world > 1 else (True, ()))
    result = gradpack.allreduce([torch.full((4,), float("nan"))], check_finite=False)
    assert result.finite is None and result.nonfinite == ()
    assert result.seconds > 0
    with pytest.raises(NotImplementedError, match="grad_norm"):
        _ = result.grad_norm


@pytest.mark.parametrize("world", [1, 3])
def test_nonfinite_gradients_are_named_on_every_rank(world: int) -> None:
    run_ranks(nonfinite, world)


def kinds_of_input(rank: int, world: int) -> None:
    model = make_model()
    other = nn.Linear(3, 3)
    other.weight = model[6].weight  # a parameter that two modules share comes once
    value, total = float(rank + 1), world * (world + 1) / 2

    def fill() -> None:
        for module in (model, other):
            for parameter in module.parameters():
                parameter.grad = torch.full_like(parameter, value)

    def check(of: Any) -> None:
        for parameter in of.parameters():
            assert_same(parameter.grad, torch.full_like(parameter, total / world))

    for make in (
        lambda: model,
        lambda: [model, other],
        lambda: model.parameters(),
        lambda: list(model.named_parameters()),
        lambda: dict(model.named_parameters()),
        lambda: (parameter.grad for parameter in model.parameters()),
    ):
        fill()
        gradpack.allreduce(make())
        check(model)
    fill()
    model[0].weight.grad[0] = float("inf")
    assert gradpack.allreduce(model).nonfinite == ("0.weight",)
    assert gradpack.allreduce([model, other]).nonfinite == ("0.0.weight",)
    single = torch.full((2, 2), value)
    gradpack.allreduce(single, op="sum")
    assert_same(single, torch.full((2, 2), total))
    mixed: list[Any] = [np.full(3, value), torch.full((2,), value, dtype=torch.bfloat16), bytearray([rank + 1] * 5)]
    gradpack.allreduce(mixed, op="sum")
    assert (mixed[0] == total).all() and (mixed[1] == total).all() and mixed[2] == bytearray([int(total)] * 5)
    for lone in (bytearray([rank + 1] * 3), array.array("d", [value] * 3), (ctypes.c_double * 3)(*[value] * 3)):
        gradpack.allreduce(lone, op="sum")
        assert list(lone) == [total] * 3
    assert gradpack.allreduce([]).finite is True
    base = torch.zeros(6, 4)
    view = base[1:5:2, ::3]
    view.fill_(value)
    gradpack.allreduce([view, base[0]], op="sum")
    wanted = torch.zeros(6, 4)
    wanted[1:5:2, ::3] = total
    assert_same(base, wanted)


@pytest.mark.parametrize("world", [1, 2])
def test_everything_that_holds_gradients_is_taken(world: int) -> None:
    run_ranks(kinds_of_input, world)


def autograd(rank: int, world: int) -> None:
    weight = torch.ones(3, requires_grad=True)
    grad = torch.full((3,), 2.0)
    product = (weight * grad).sum()
    gradpack.allreduce([grad])
    # grad was saved for backward and has been overwritten since: autograd must notice.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    parameter = nn.Parameter(torch.ones(2))
    (parameter**3).sum().backward(create_graph=True)
    gradpack.allreduce([parameter])
    assert_same(parameter.grad, torch.full((2,), 3.0))
    with torch.inference_mode():
        flat = torch.full((4,), float(rank))
        gradpack.allreduce([flat], op="sum")
        assert flat.sum() == 4 * sum(range(world))


def subnormals(rank: int, world: int) -> None:
    """Kept though the caller flushes them, in what gloo sums too: set before the first call, its threads could inherit it."""
    torch.set_flush_denormal(True)
    for whole, floating in ((np.int32, torch.float32), (np.int64, torch.float64)):
        bits = torch.from_numpy(np.full(100_000, 1000, whole))
        gradpack.allreduce([bits.view(floating)], op="sum")
        assert (bits == 1000 * world).all()


def test_subnormals_are_kept_though_torch_flushes_them() -> None:
    run_ranks(subnormals, 2)


def compiled(rank: int, world: int) -> None:
    layer = nn.Linear(4, 2)

    @torch.compile(backend="eager")
    def step(images: torch.Tensor) -> torch.Tensor:
        layer.zero_grad()
        layer(images).sum().backward()
        gradpack.allreduce(layer, op="sum")
        return images + 1

    for _ in range(2):
        step(torch.ones(3, 4))
        assert_same(layer.bias.grad, torch.full((2,), 3.0 * world))


@pytest.mark.filterwarnings("ignore")
def test_works_inside_a_compiled_function_from_the_first_call_on() -> None:
    run_ranks(compiled, 2)


def test_autograd_sees_what_was_written() -> None:
    run_ranks(autograd, 2)


def explains(rank: int, world: int, transport: str) -> str:
    os.environ["GRADPACK_TRANSPORT"] = transport
    return str(gradpack.explain([torch.ones(100_000), torch.ones(10, dtype=torch.bfloat16)], splits=2))


def test_explain_names_transport_and_reason() -> None:
    for text in run_ranks(explains, 2, "process_group"):
        assert "pack 1: 50,000 elements, float32, 200,000 bytes" in text
        assert "transport: process_group: the group goes by the process group (GRADPACK_TRANSPORT on rank 0)" in text
        assert "2 slices, 2 of them direct and 0 sharded" in text
    for text in run_ranks(explains, 2, "auto"):
        assert "transport: shared_memory: the group has all 2 ranks on one host" in text
        assert "over: a segment of " in text
    assert "nothing travels" in run_ranks(explains, 1, "auto")[0]


def test_plan_needs_no_group() -> None:
    assert len(gradpack.plan(make_model(), splits=3).packs) == 3
    assert len(gradpack.plan([np.zeros(7)], splits=2).packs) == 2
