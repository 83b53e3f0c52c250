"""Shared memory between processes: how ranks come to share a segment or agree not to, and what is left of it afterwards."""

from __future__ import annotations

import gc
import os
import random
import re
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradpack
from gradpack import _C, groups
from gradpack.testing import assert_same, run_ranks, try_ranks
from gradpack.transports import shm_meeting

SHM = Path("/dev/shm")


def leftovers() -> set[str]:
    return {path.name for path in SHM.glob("gradpack-*")}


def transport_of() -> str:
    return groups.resolve("test", None)._resources["transport"].name  # type: ignore[attr-defined]


def works(rank: int, world: int) -> None:
    grads = [torch.full((100_003,), float(rank)), torch.full((5,), rank, dtype=torch.int16)]
    gradpack.allreduce(grads, op="sum")
    assert_same(grads[0], torch.full((100_003,), float(sum(range(world)))))
    assert_same(grads[1], torch.full((5,), sum(range(world)), dtype=torch.int16))


# Which transport.


def explained(rank: int, world: int, environment: list[dict[str, str]]) -> list[str]:
    os.environ.update(environment[rank])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        works(rank, world)
    assert not [warning for warning in caught if "gradpack" in str(warning.message)]
    lines = gradpack.explain([torch.ones(3)]).lines
    name = lines[0].split()[1].rstrip(":")
    assert name == transport_of()
    for other in ("process_group", "shared_memory", "hierarchical"):
        if other in (name, "process_group"):
            gradpack.allreduce([torch.ones(3)], transport=other)
            continue
        with pytest.raises(gradpack.TransportError, match=rf"^allreduce: transport: found '{other}' on a group that (has|goes) "):
            gradpack.allreduce([torch.ones(3)], transport=other)
    works(rank, world)
    return list(lines)


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ([{}, {}, {}], "transport: shared_memory: the group has all 3 ranks on one host; 3 ranks"),
        ([{"GRADPACK_HOST": "a"}] * 3, "transport: shared_memory: the group has all 3 ranks on one host; 3 ranks"),
        (
            [{"GRADPACK_HOST": "a"}, {"GRADPACK_HOST": "a"}, {"GRADPACK_HOST": "b"}],
            "transport: hierarchical: the group has all 3 ranks on 2 hosts; 3 ranks",
        ),
        ([{"GRADPACK_HOST": "a"}, {}, {}], "transport: hierarchical: the group has all 3 ranks on 2 hosts; 3 ranks"),
        (
            [{"GRADPACK_HOST": "a"}, {"GRADPACK_HOST": "b"}, {}],
            "transport: process_group: the group has each rank on a host of its own; 3 ranks",
        ),
        (
            [{}, {"GRADPACK_TRANSPORT": "process_group"}, {}],
            "transport: process_group: the group goes by the process group (GRADPACK_TRANSPORT on rank 1); 3 ranks",
        ),
    ],
)
def test_all_ranks_take_the_best_that_all_can(environment: list[dict[str, str]], first: str) -> None:
    for lines in run_ranks(explained, 3, environment):
        assert lines[0] == first
        assert any(line.startswith("over: ") for line in lines)


def asks_for_different(rank: int, world: int) -> None:
    for _ in range(2):
        grad = torch.full((3,), float(rank))
        with pytest.raises(gradpack.LayoutMismatch, match=r"transport: '(auto|process_group|shared_memory)' here"):
            gradpack.allreduce([grad], transport=["auto", "process_group"][rank])
        assert_same(grad, torch.full((3,), float(rank)))
        works(rank, world)
        gradpack.allreduce([grad], transport="process_group")
        gradpack.allreduce([grad], transport=["auto", "shared_memory"][rank])


def test_ranks_that_ask_for_different_transports_are_told() -> None:
    run_ranks(asks_for_different, 2)


# How they come to share it.


def refuse(*_: Any, **__: Any) -> Any:
    raise PermissionError(13, "Permission denied")


def without(rank: int, world: int, broken: str) -> tuple[str, list[str]]:
    """A group where something of the meeting does not work."""
    attach = shm_meeting._C.ShmChannel.attach
    if broken == "memfd":
        shm_meeting._in_memory = refuse  # type: ignore[assignment]
    elif broken in ("proc", "attach"):
        # ShmChannel takes no attributes, so the module's name for it is replaced.
        def proc(**given: Any) -> Any:
            if rank == 1 and (broken == "attach" or given["location"].startswith("/proc")):
                refuse()
            return attach(**given)

        class Extension:
            ShmChannel = type("ShmChannel", (), {"attach": staticmethod(proc), "create": staticmethod(_C.ShmChannel.create)})
            num_threads = staticmethod(_C.num_threads)

        shm_meeting._C = Extension  # type: ignore[assignment]
    elif broken == "small":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    elif broken == "absent":
        shm_meeting._in_memory = refuse  # type: ignore[assignment]
        shm_meeting._SHM = Path("/dev/shm/absent")
    before = leftovers()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        works(rank, world)
    assert leftovers() <= before
    works(rank, world)
    return transport_of(), [str(warning.message) for warning in caught if "gradpack" in str(warning.message)]


@pytest.mark.parametrize("broken", ["memfd", "proc"])
def test_a_file_takes_the_place_of_memory_that_others_cannot_find(broken: str) -> None:
    assert run_ranks(without, 3, broken) == [("shared_memory", [])] * 3


@pytest.mark.parametrize(
    ("broken", "messages"),
    [
        ("small", [r"File too large", r"wanted \d+ MB \(Docker: --shm-size=64m\)"]),
        ("absent", [r"/dev/shm/absent: .*No such file or directory", r"--shm-size=64m"]),
        ("attach", [r"rank 1: .*Permission denied"]),
    ],
)
def test_without_shared_memory_all_ranks_go_by_the_process_group_with_one_warning(broken: str, messages: list[str]) -> None:
    (first, warned), *others = run_ranks(without, 3, broken)
    assert [first, *others] == ["process_group", *[("process_group", [])] * 2]
    (text,) = warned
    assert text.startswith("gradpack: shared memory is not available: ")
    for message in messages:
        assert re.search(message, text), text


def test_files_of_the_dead_are_swept_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_meeting, "_SHM", tmp_path)
    started = shm_meeting._start_time(os.getpid())
    assert started > 0
    old = time.time() - 1000
    names = {
        f"gradpack-{os.getpid()}-{started}-0123456789abcdef": True,
        f"gradpack-{os.getpid()}-{started + 1}-0123456789abcdef": False,
        "gradpack-4194305-77-0123456789abcdef": False,
        "gradpack-4194305-77-young0123456789a": True,
        "somebody-4194305-77-0123456789abcdef": True,
    }
    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (old, old))
    young = tmp_path / "gradpack-4194305-78-0123456789abcdef"
    young.touch()
    shm_meeting._sweep()
    assert {path.name for path in tmp_path.iterdir()} == {name for name, stays in names.items() if stays} | {young.name}


def dies_at_the_meeting(rank: int, world: int, exchanges: int) -> str:
    if rank == 0:
        encode, made = shm_meeting.json.dumps, 0

        def dumps(value: Any) -> str:
            nonlocal made
            made += 1
            if made > exchanges:
                os._exit(0)
            return encode(value)

        shm_meeting.json = type("Json", (), {"dumps": staticmethod(dumps), "loads": staticmethod(shm_meeting.json.loads)})  # type: ignore[attr-defined]
    began = time.monotonic()
    with pytest.raises(gradpack.PeerLost, match=r"first call on this group: .*found rank 0 gone"):
        gradpack.allreduce([torch.ones(3)], timeout=20)
    assert time.monotonic() - began < 3
    return "noticed"


@pytest.mark.parametrize("exchanges", [0, 1, 2])
def test_a_death_between_meeting_and_sharing_is_noticed(exchanges: int) -> None:
    before = leftovers()
    outcomes = try_ranks(dies_at_the_meeting, 3, exchanges)
    assert [outcome.value for outcome in outcomes] == [None, "noticed", "noticed"], outcomes
    assert leftovers() <= before


# The same bits as by the process group.


def random_grads(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    counts = [0, 1, 7, 4097, 70_000, 300_001]
    grads = [torch.randn(count, generator=generator, dtype=torch.float64) * 1000 for count in counts]
    grads[3] = grads[3][::3]
    grads.append(torch.randn(6, 5, 7, generator=generator, dtype=torch.float64).to(memory_format=torch.contiguous_format).mT)
    return [grad.to(dtype) for grad in grads]


def same_bits(rank: int, world: int, threads: int) -> None:
    os.environ["GRADPACK_NUM_THREADS"] = str(threads)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.complex64):
        for compress in (None, "fp16", "bf16") if dtype in (torch.float32, torch.float64) else (None,):
            op = "sum" if dtype == torch.int32 else "mean"
            found = []
            for transport, splits in (("auto", 1), ("auto", 7), ("process_group", 4)):
                grads = random_grads(rank, dtype)
                result = gradpack.allreduce(grads, splits, op=op, compress=compress, transport=transport)
                assert result.finite in (True, None)
                found.append(grads)
            for others in found[1:]:
                for index, (one, other) in enumerate(zip(found[0], others, strict=True)):
                    assert_same(other, one, f"{dtype} compress={compress} grads[{index}]")


@pytest.mark.parametrize(("world", "threads"), [(2, 1), (2, 3), (3, 2), (4, 1)])
def test_bits_do_not_depend_on_transport_splits_or_threads(world: int, threads: int) -> None:
    run_ranks(same_bits, world, threads, deadline=120)


# Groups.


def held() -> tuple[int, int, int]:
    maps = sum("memfd:gradpack" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps


def made_again(rank: int, world: int) -> None:
    works(rank, world)
    gradpack.close()
    gc.collect()
    before = held()
    for _ in range(100):
        works(rank, world)
        gradpack.close()
    assert held() == before
    assert leftovers() == set()


def test_a_hundred_groups_leave_nothing() -> None:
    run_ranks(made_again, 2, deadline=120)


def overlapping(rank: int, world: int) -> None:
    members = [[0, 1, 2], [0, 1], [1, 2], [0, 2]]
    listed = [dist.new_group(ranks) for ranks in members]
    order = random.Random(3)
    for number in range(60):
        place = order.randrange(len(listed))
        if rank not in members[place]:
            continue
        grad = torch.full(([3, 90_000, 700_000][number % 3],), float(rank + 1))
        gradpack.allreduce([grad], op="sum", group=listed[place], async_op=number % 2 == 0)
        if number % 4 == 0:
            gradpack.barrier(group=listed[place])
        if number % 2 == 1:
            assert_same(grad, torch.full_like(grad, float(sum(member + 1 for member in members[place]))))
    dist.barrier()


def test_overlapping_groups_do_not_disturb_one_another() -> None:
    run_ranks(overlapping, 3)


def forks(rank: int, world: int) -> None:
    works(rank, world)
    child = os.fork()
    if child == 0:
        maps = Path("/proc/self/maps").read_text()
        os._exit(1 if "memfd:gradpack" in maps else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    works(rank, world)


def test_a_forked_child_has_none_of_the_segment() -> None:
    run_ranks(forks, 2)
