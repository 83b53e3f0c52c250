"""broadcast: every bit of the root, of modules and optimizers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_allreduce import batch_of, make_model
from torch import nn

import gradpack
from gradpack.testing import assert_same, run_ranks


def then_allreduce(rank: int, world: int) -> None:
    """What broadcast takes, allreduce may still refuse, though shapes, dtypes and options are the same."""
    for values in (torch.ones(5, dtype=torch.int32), torch.ones(5, dtype=torch.bool)):
        gradpack.broadcast([values])
        with pytest.raises(TypeError, match=r"allreduce: grads\[0\]: found (int32 with op='mean'|bool)"):
            gradpack.allreduce([values])
        gradpack.broadcast([values])
        assert values.all()


@pytest.mark.parametrize("world", [1, 2])
def test_what_broadcast_takes_allreduce_still_refuses(world: int) -> None:
    run_ranks(then_allreduce, world)


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def broadcasts(rank: int, world: int, root: int) -> None:
    model, wanted = make_model(rank), make_model(root)
    for seed, module in ((rank, model), (root, wanted)):
        module[1].running_mean.fill_(float(seed))
        module.register_buffer("mask", torch.tensor([True, seed % 2 == 0, False]))
    result = gradpack.broadcast(model, root)
    assert result.finite is None and (result.wire_bytes > 0) == (world > 1)
    for (name, found), other in zip(model.state_dict().items(), wanted.state_dict().values(), strict=True):
        assert torch.equal(found, other), name

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if rank == root:
        optimizer.param_groups[0]["lr"] = 0.125
        for step in range(3):
            images, labels = batch_of(step, rank)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    gradpack.broadcast(model, root, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.125
    mine = torch.cat([tensor.flatten() for tensor in [*model.parameters(), *state_of(optimizer)]]).detach()
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine)
    for other in everyone:
        assert_same(other, mine)
    assert len(state_of(optimizer)) == 3 * len(list(model.parameters()))
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    values = patterns.clone() if rank == root else torch.zeros(65536, dtype=torch.float16)
    gradpack.broadcast([values], root)
    assert torch.equal(values.view(torch.int16), patterns.view(torch.int16))


@pytest.mark.parametrize(("world", "root"), [(1, 0), (2, 1), (4, 2)])
def test_broadcast_copies_every_bit_of_the_root(world: int, root: int) -> None:
    run_ranks(broadcasts, world, root)


def refusals(rank: int, world: int) -> None:
    """A refused broadcast leaves the optimizer as it was; what only the root can see reaches the others."""
    model = make_model(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    images, labels = batch_of(0, rank)
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    before = [tensor.clone() for tensor in [*model.parameters(), *state_of(optimizer)]]
    with pytest.raises(gradpack.LayoutMismatch, match=r"float32\[[34]\]"):
        gradpack.broadcast([model, torch.zeros(3 + rank)], optimizer=optimizer)
    for tensor, was in zip([*model.parameters(), *state_of(optimizer)], before, strict=True):
        assert_same(tensor, was)
    assert optimizer.param_groups[0]["lr"] == 0.1 * (rank + 1)
    with pytest.raises(TypeError, match="broadcast: optimizer: found str"):
        gradpack.broadcast(model, optimizer="adam")
    if rank == 0:
        optimizer.param_groups[0]["schedule"] = lambda: None
    with pytest.raises(Exception, match="pickle" if rank == 0 else "rank 0 refused: .*pickle"):
        gradpack.broadcast(model, optimizer=optimizer)
    gradpack.broadcast(model)


def test_a_refused_broadcast_leaves_the_optimizer_alone() -> None:
    run_ranks(refusals, 2)


def odd_state(rank: int, world: int) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state["global"] = {"ema": torch.full((3,), 7.0 + rank)}
    gradpack.broadcast(layer, optimizer=optimizer, names=["weight", "bias"])
    assert_same(optimizer.state["global"]["ema"], torch.full((3,), 7.0))


def test_state_that_belongs_to_no_parameter_and_names() -> None:
    run_ranks(odd_state, 2)


def optimizers_that_differ(rank: int, world: int) -> str:
    model = make_model()
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters if rank == 0 else parameters[:-1])
    optimizer.step()
    kind: type[Exception] = gradpack.LayoutMismatch if rank == 0 else ValueError
    with pytest.raises(kind) as caught:
        gradpack.broadcast(model, optimizer=optimizer)
    gradpack.broadcast(model)
    return str(caught.value)


def test_an_optimizer_that_cannot_take_the_roots_state_reaches_all_ranks() -> None:
    assert "rank 1 refused: ValueError" in run_ranks(optimizers_that_differ, 2)[0]
