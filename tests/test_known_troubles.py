"""What goes wrong in data-parallel training time and again: ranks that differ, odd memory, lost precision, ranks that wait."""

from __future__ import annotations

import atexit
import os
import sys
import time
import warnings
from typing import Any

import numpy as np
import pytest
import ranks_contract
import torch
import torch.distributed as dist
from test_agreement import check_next_call, refused
from torch import nn

import gradpack
from gradpack.testing import assert_same, every_rank_raises, run_ranks, try_ranks

KINDS = ["shared_memory", "hierarchical", "process_group", "allgather", "alltoall"]


def of_all(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor of every rank, by torch's own means."""
    everyone = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    return everyone


# ---- Ranks that differ -----------------------------------------------------------------------------------------------------

ODD_ONES = {
    "longer": ((1025,), "float32", (262_144,), "float32"),
    "two hundred rows against one hundred": ((100, 64), "float32", (200, 64), "float32"),
    "half as wide": ((1000,), "float32", (1000,), "bfloat16"),
    "of as many bytes": ((1000,), "float32", (2000,), "bfloat16"),
}


def differ_later(rank: int, world: int, kind: str) -> None:
    group = ranks_contract.group_of(kind)
    for call in (gradpack.allreduce, gradpack.broadcast):
        for shape, dtype, odd_shape, odd_dtype in ODD_ONES.values():
            for _ in range(2):
                call([torch.ones(3), torch.ones(shape, dtype=getattr(torch, dtype))], group=group)
            mine = (odd_shape, odd_dtype) if rank == 1 else (shape, dtype)
            grad = torch.full(mine[0], 7.0, dtype=getattr(torch, mine[1]))
            began = time.monotonic()
            with pytest.raises(gradpack.LayoutMismatch) as caught:
                call([torch.ones(3), grad], group=group)
            assert time.monotonic() - began < 5
            told = {True: f"{odd_dtype}{list(odd_shape)}", False: f"{dtype}{list(shape)}"}
            where = "ranks 0, 2" if rank == 1 else "rank 1"
            assert f"[1]: {told[rank == 1]} here, {told[rank != 1]} on {where}" in str(caught.value)
            assert_same(grad, torch.full_like(grad, 7.0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_difference_that_comes_up_later_is_named_in_that_call(kind: str) -> None:
    run_ranks(differ_later, 3, kind, backend="gloo" if kind in ("shared_memory", "hierarchical", "process_group") else None)


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, classes)


def other_head(rank: int, world: int) -> None:
    model = Classifier(3 if rank == 0 else 2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradpack.allreduce(model)


def test_a_mismatch_names_the_parameter() -> None:
    messages = every_rank_raises(try_ranks(other_head, 2), gradpack.LayoutMismatch)
    assert messages[0] == "allreduce: grads[2] 'head.weight': float32[3, 4] here, float32[2, 4] on rank 1"
    assert messages[1] == "allreduce: grads[2] 'head.weight': float32[2, 4] here, float32[3, 4] on rank 0"


def calls_of(kind: str) -> None:
    values = [torch.ones(4)]
    {
        "allreduce": lambda: gradpack.allreduce(values),
        "broadcast": lambda: gradpack.broadcast(values),
        "barrier": gradpack.barrier,
        "check_in_sync": lambda: gradpack.check_in_sync(values),
    }[kind]()


def mixed_calls(rank: int, world: int) -> None:
    kinds = ["allreduce", "broadcast", "barrier", "check_in_sync"]
    for first in kinds:
        for second in kinds:
            mine, theirs = (first, second) if rank == 0 else (second, first)
            if mine == theirs:
                calls_of(mine)
                continue
            message = refused(lambda mine=mine: calls_of(mine), gradpack.LayoutMismatch)
            assert message == f"{mine}: kind of call: {mine!r} here, {theirs!r} on rank {1 - rank}"
            check_next_call(rank, world)


def test_calls_of_different_kinds_never_meet() -> None:
    run_ranks(mixed_calls, 2)


def root_refuses(rank: int, world: int) -> None:
    kind = TypeError if rank == 1 else gradpack.LayoutMismatch
    began = time.monotonic()
    message = refused(lambda: gradpack.broadcast([torch.ones(4), None] if rank == 1 else [torch.ones(4)], root=1), kind)
    assert time.monotonic() - began < 5
    assert "tensors[1]" in message and (rank == 1 or message.startswith("broadcast: rank 1 refused: TypeError"))
    check_next_call(rank, world)


def test_a_root_that_refuses_its_arguments_in_the_first_call_leaves_nobody_waiting() -> None:
    run_ranks(root_refuses, 3)


def sparse_on_one(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=rank == 1), nn.Linear(3, 1))
    model(torch.tensor([1, 2])).sum().backward()
    message = refused(lambda: gradpack.allreduce(model), TypeError if rank == 1 else gradpack.LayoutMismatch)
    assert "grads[0] '0.weight': a tensor of layout torch.sparse_coo, wanted a dense tensor" in message
    check_next_call(rank, world)


def test_a_sparse_gradient_on_one_rank_is_named_on_all() -> None:
    run_ranks(sparse_on_one, 2)


# ---- Gradients that are not there ------------------------------------------------------------------------------------------


def branches(rank: int, world: int) -> None:
    layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(4)])
    for step in range(8):
        layers.zero_grad()
        used = {step % 4, (step * 3 + 1) % 4}
        for _ in range(step % 3 + 1):
            for index in used:
                (layers[index](torch.ones(1, 2)) * (rank + 1)).sum().backward()
        gradpack.allreduce(layers, op="sum")
        for index, layer in enumerate(layers):
            if index in used:
                assert_same(layer.weight.grad, torch.full((2, 2), 3.0 * (step % 3 + 1)))
            else:
                assert layer.weight.grad is None


def test_steps_may_use_other_branches_and_accumulate_over_any_number_of_backwards() -> None:
    run_ranks(branches, 2)


# ---- Memory and dtypes -----------------------------------------------------------------------------------------------------


def one_by_one(rank: int, world: int) -> None:
    warnings.simplefilter("error")
    torch.manual_seed(rank)

    def gradients(kernel: int, channels_last: bool) -> nn.Conv2d:
        layer = nn.Conv2d(8, 16, kernel)
        layer.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
        images = torch.randn(2, 8, 5, 5)
        layer(images.to(memory_format=torch.channels_last) if channels_last else images).square().sum().backward()
        return layer

    usual = gradpack.allreduce(gradients(1, False)).wire_bytes
    for kernel in (1, 3):
        layer = gradients(kernel, channels_last=rank == 1)
        weight = layer.weight.grad
        assert weight is not None
        before, strides = of_all(weight), weight.stride()
        sent = gradpack.allreduce(layer).wire_bytes
        assert_same(weight, (before[0] + before[1]) / 2)
        assert weight is layer.weight.grad and weight.stride() == strides
        # Strides along dimensions of size 1 mean nothing, and must not cost a round of messages.
        assert kernel != 1 or sent == usual


def test_convolutions_of_one_by_one_and_memory_formats_need_no_warning() -> None:
    run_ranks(one_by_one, 2)


def complex_training(rank: int, world: int) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
    filters = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    batches = [torch.randn(4, 3, dtype=torch.complex64) for _ in range(world)]

    def backward(batch: torch.Tensor) -> list[torch.Tensor]:
        weight.grad = filters.grad = None
        loss = ((filters.conj() * batch).sum() * 1j).imag + (batch @ weight).abs().sum()
        loss.backward()
        return [weight.grad.resolve_conj().clone(), filters.grad.resolve_conj().clone()]

    each = [backward(batch) for batch in batches]
    wanted = [(first + second) / 2 for first, second in zip(*each, strict=True)]
    backward(batches[rank])
    # What autograd leaves there is a lazy view; the test is of no use without one.
    assert filters.grad is not None and filters.grad.is_conj()
    gradpack.allreduce([weight, filters])
    for found, other in zip((weight.grad, filters.grad), wanted, strict=True):
        assert_same(torch.view_as_real(found.resolve_conj()), torch.view_as_real(other))
        assert (found.real != 0).all() and (found.imag != 0).all()


def test_complex_gradients_are_right_in_both_parts_also_lazily_conjugated_ones() -> None:
    run_ranks(complex_training, 2)


def integers(rank: int, world: int) -> None:
    small = torch.tensor([100, -100, 1], dtype=torch.int8)
    large = torch.tensor([2**53 + 1, -(2**61)], dtype=torch.int64)
    fractions = torch.full((3,), 1 + 2**-12)
    gradpack.allreduce([small, large, fractions], op="sum", compress="bf16")
    assert small.tolist() == [44, -44, 3]
    assert large.tolist() == [3 * (2**53 + 1), -3 * 2**61]
    assert_same(fractions, torch.full((3,), 3.0))


def test_integers_wrap_and_are_never_compressed() -> None:
    run_ranks(integers, 3)


# ---- Precision -------------------------------------------------------------------------------------------------------------


def both_ends(rank: int, world: int) -> None:
    for dtype, values in ((torch.float16, [65504.0, 2.0**-24]), (torch.bfloat16, [2.0**126, 2.0**-133])):
        for count in (4, 200_000):
            half = torch.tensor(values, dtype=dtype).repeat(count)
            full = half.float()
            before = half.clone()
            assert gradpack.allreduce([half]).finite is True
            assert_same(half, before)
            assert gradpack.allreduce([full], compress="fp16" if dtype is torch.float16 else "bf16").finite is True
            assert_same(full, before.float())
    # bfloat16 reaches as far as the float32 that it is summed in, so above a share of that the sum is inf, and reported.
    largest = torch.full((4,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    assert gradpack.allreduce([largest]).nonfinite == (0,)


def test_sixteen_bit_means_neither_overflow_nor_vanish() -> None:
    run_ranks(both_ends, 3)


def accumulates(rank: int, world: int) -> None:
    for count in (4, 200_000):
        # In bfloat16 itself 256 + 1 is 256.
        grad = torch.full((count,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
        gradpack.allreduce([grad], op="sum")
        assert_same(grad, torch.full((count,), 260.0, dtype=torch.bfloat16))


def test_many_small_values_beside_a_large_one_survive_sixteen_bits() -> None:
    run_ranks(accumulates, 5)


def halves_already(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    for dtype in (torch.float16, torch.bfloat16):
        source = torch.randn(50_000).to(dtype)
        found = []
        for compress in (None, "fp16", "bf16"):
            grad = source.clone()
            sent = gradpack.allreduce([grad], compress=compress).wire_bytes
            found.append((grad, sent))
        for grad, sent in found:
            assert_same(grad, found[0][0])
            assert sent == found[0][1]


def test_compress_leaves_gradients_of_sixteen_bits_as_they_are() -> None:
    run_ranks(halves_already, 2)


def random_gradients(rank: int) -> list[np.ndarray]:
    draw = np.random.default_rng(rank)
    shapes = ((3,), (70_001,), (40, 50), (1,), (9_000,), (30_011,))
    made = [draw.standard_normal(shape) * 10.0 ** draw.integers(-6, 6, shape) for shape in shapes]
    return [values.astype(np.float64 if place == 4 else np.float32) for place, values in enumerate(made)]


WAYS_TO_PACK: list[dict[str, Any]] = [
    {},
    {"splits": 1},
    {"splits": 7},
    {"bytes_per_pack": 1000},
    {"cut": "gradient", "splits": 3},
]


def packings(rank: int, world: int, kind: str) -> None:
    os.environ["GRADPACK_SLOT_BYTES"] = "65536"
    group = ranks_contract.group_of(kind)
    # In rank order; between hosts that of each host, then the hosts in the order of their first ranks.
    hosts = [range(0, world, 2), range(1, world, 2)] if kind == "hierarchical" else [range(world)]
    of_hosts = [[sum(parts[1:], parts[0]) for parts in zip(*map(random_gradients, ranks), strict=True)] for ranks in hosts]
    wanted = [sum(parts[1:], parts[0]) for parts in zip(*of_hosts, strict=True)]
    wanted = [(total / total.dtype.type(world)).astype(total.dtype) for total in wanted]
    # Another order of summing gives other bits: the values are such that a test of nothing would not pass.
    backwards = [sum(parts) for parts in zip(*(random_gradients(peer) for peer in reversed(range(world))), strict=True)]
    assert any((other / other.dtype.type(world) != total).any() for other, total in zip(backwards, wanted, strict=True))

    def check(grads: list[np.ndarray], what: str) -> None:
        for place, (found, other) in enumerate(zip(grads, wanted, strict=True)):
            assert_same(found, other, f"{what}: gradient {place}")

    for _ in range(2):
        for options in WAYS_TO_PACK:
            grads = random_gradients(rank)
            gradpack.allreduce(grads, group=group, **options)
            check(grads, str(options))
    grads = random_gradients(rank)
    gradpack.allreduce(grads[::-1], group=group)
    check(grads, "backwards")
    grads = random_gradients(rank)
    for grad in grads:
        gradpack.allreduce([grad], group=group)
    check(grads, "one by one")
    grads = random_gradients(rank)
    for handle in [gradpack.allreduce(grads[place::2], group=group, async_op=True) for place in range(2)]:
        handle.wait()
    check(grads, "in the background")


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_depend_neither_on_packing_nor_on_what_carries_them(kind: str) -> None:
    run_ranks(packings, 3, kind, backend="gloo" if kind in ("shared_memory", "hierarchical", "process_group") else None)


# ---- Optimizers ------------------------------------------------------------------------------------------------------------


def skips_what_nobody_used(rank: int) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(3)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    start = [layer.weight.detach().clone() for layer in layers]
    for _ in range(3):
        optimizer.zero_grad()
        # The first by all ranks, the second by rank 0 alone, the third by none.
        for layer in layers[: 2 if rank == 0 else 1]:
            layer(torch.ones(1, 3)).sum().backward()
        gradpack.allreduce(layers, missing="zeros")
        optimizer.step()
    gradpack.check_in_sync(layers)
    assert [torch.equal(layer.weight, was) for layer, was in zip(layers, start, strict=True)] == [False, False, True]
    assert layers[2].weight not in optimizer.state and layers[1].weight in optimizer.state


def scales_loss(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scales, weights = [], []
    for step in range(4):
        optimizer.zero_grad()
        images = torch.full((2, 3), float(rank + 1))
        if (rank, step) == (1, 1):
            images[0, 0] = float("inf")
        scaler.scale(model(images).sum()).backward()
        result = gradpack.allreduce(model)
        assert (result.finite, result.nonfinite) == ((False, ("weight",)) if step == 1 else (True, ()))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights.append(model.weight[0, 0].item())
    gradpack.check_in_sync(model)
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    assert weights[0] == weights[1] != weights[2] != weights[3]


def optimizers(rank: int, world: int) -> None:
    skips_what_nobody_used(rank)
    scales_loss(rank)


def test_optimizers_and_loss_scalers_step_and_skip_alike_on_every_rank() -> None:
    run_ranks(optimizers, 2)


# ---- Ranks that wait, and forks --------------------------------------------------------------------------------------------


def stuck(rank: int, world: int) -> None:
    gradpack.barrier()
    if rank == 2:
        time.sleep(2.5)
        return
    began = time.monotonic()
    with pytest.raises(gradpack.TransportTimeout, match=r"^barrier: call 2 on this group: .*rank 2 \(after its call 1\)"):
        gradpack.barrier(timeout=0.4)
    assert time.monotonic() - began < 2


def test_a_barrier_names_the_rank_that_does_not_come() -> None:
    run_ranks(stuck, 3)


def forks_while_it_reduces(rank: int, world: int) -> None:
    gradpack.allreduce([torch.ones(3)])
    for _ in range(3):
        grad = torch.full((2_000_000,), float(rank))
        handle = gradpack.allreduce([grad], op="sum", async_op=True)
        child = os.fork()
        if child == 0:
            # As a data-loader worker does, and as an ordinary exit would.
            good = torch.ones(300, 300).mm(torch.ones(300, 300)).sum().item() == 300.0**3
            sys.stderr.flush()
            atexit._run_exitfuncs()
            os._exit(0 if good else 1)
        end = time.monotonic() + 15
        found = (0, 0)
        while found[0] == 0 and time.monotonic() < end:
            found = os.waitpid(child, os.WNOHANG)
            time.sleep(0.005)
        if found[0] == 0:
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert found == (child, 0)
        handle.wait()
        assert_same(grad, torch.full((2_000_000,), 1.0))


def test_workers_that_fork_while_a_call_is_under_way_neither_hang_nor_disturb_it() -> None:
    run_ranks(forks_while_it_reduces, 2)
