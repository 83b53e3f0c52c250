"""What lives beyond a call: background calls, groups, threads, forks, deadlines."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

import gradpack
from gradpack import groups
from gradpack.testing import assert_same, every_rank_raises, run_ranks, try_ranks
from gradpack.transports.process_group import _Waiting

pytestmark = pytest.mark.usefixtures("over")


def background(rank: int, world: int) -> None:
    grads = [[torch.full((30_000,), float(rank + call))] for call in range(6)]
    handles = [gradpack.allreduce(listed, op="sum", async_op=True) for listed in grads]
    last = torch.full((3,), float(rank))
    gradpack.allreduce([last], op="sum")  # in call order: after the six
    assert all(handle.done() for handle in handles)
    for call, (handle, listed) in enumerate(zip(handles, grads, strict=True)):
        assert handle.wait().finite is True and handle.wait().finite is True
        assert_same(listed[0], torch.full((30_000,), float(sum(range(world)) + call * world)))
    # Arrays live until the call is done even if nobody else holds them.
    temporary = torch.ones(200_000)
    alive = weakref.ref(temporary)
    handle = gradpack.allreduce([temporary], async_op=True)
    del temporary
    handle.wait()
    del handle
    gc.collect()
    # What a dropped Handle found comes out of the next call that waits, on every rank; the one after works.
    gradpack.allreduce([torch.ones(3 + rank)], async_op=True)
    gradpack.allreduce([torch.ones(3)], async_op=True)
    with pytest.raises(gradpack.LayoutMismatch, match=r"grads\[0\]: float32"):
        gradpack.allreduce([torch.ones(3)])
    gradpack.allreduce([torch.ones(3)])
    gradpack.allreduce([torch.ones(3 + rank)], async_op=True)
    with pytest.raises(gradpack.LayoutMismatch, match=r"grads\[0\]: float32"):
        gradpack.close()
    failed = gradpack.allreduce([torch.ones(3 + rank)], async_op=True)
    with pytest.raises(gradpack.LayoutMismatch):
        failed.wait()
    gradpack.allreduce([torch.ones(3)])
    gradpack.close()
    assert alive() is None


def dropped(rank: int, world: int) -> None:
    """Handles dropped, the group destroyed: what failed is told at exit, what did not lets the group's state go."""
    gradpack.allreduce([torch.ones(500_000)], async_op=True)
    gradpack.allreduce([torch.ones(3 + rank)], async_op=True)
    dist.destroy_process_group()
    with pytest.warns(RuntimeWarning, match=r"left behind at exit: LayoutMismatch.*grads\[0\]"):
        groups._at_exit()
    assert not groups._owing


def test_a_dropped_handle_loses_no_error_though_the_group_is_destroyed() -> None:
    run_ranks(dropped, 2)


LEFT_AT_EXIT = """
import sys, torch, torch.distributed as dist, gradpack
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
gradpack.allreduce([torch.ones(3)], async_op=True).wait()
if sys.argv[3] == "failed":
    gradpack.allreduce([torch.ones(3 + rank)], async_op=True)
"""


@pytest.mark.parametrize("left", ["nothing", "failed"])
def test_a_process_that_ends_tells_what_a_background_call_left(left: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEFT_AT_EXIT, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank), left], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        for rank in ranks:
            _, text = rank.communicate(timeout=60)
            assert rank.returncode == 0, text
            told = re.findall(r"RuntimeWarning: (gradpack.*)", text)
            if left == "nothing":
                assert told == []
            else:
                (warning,) = told
                assert re.match(r"gradpack: a call was left behind at exit: LayoutMismatch\(.*grads\[0\]", warning)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


class LateWork:
    """A collective that completes just after a wait has given up."""

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return True


def test_a_collective_that_completes_as_a_wait_gives_up_is_complete() -> None:
    began = time.monotonic()
    _Waiting(LateWork(), "all-gather", 2).wait(began + 5)
    assert time.monotonic() < began + 4


def crossed(rank: int, world: int) -> None:
    """Two threads meet on two groups for the first time, in crossed order."""
    pair = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    grads = [torch.full((3,), float(rank)) for _ in pair]

    def run(place: int, delay: float) -> None:
        time.sleep(delay)
        gradpack.allreduce([grads[place]], op="sum", group=pair[place], timeout=20)

    threads = [threading.Thread(target=run, args=(place, 0.5 * (place != rank))) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for grad in grads:
        assert_same(grad, torch.ones(3))


def test_groups_meet_in_any_order() -> None:
    run_ranks(crossed, 2)


def met_late(rank: int, world: int) -> None:
    if rank == 0:
        with pytest.raises(gradpack.TransportTimeout):
            gradpack.allreduce([torch.ones(1)], timeout=1)
    else:
        time.sleep(2)
    gradpack.close()
    grad = torch.full((2,), float(rank))
    gradpack.allreduce([grad], op="sum")
    assert_same(grad, torch.ones(2))


def test_close_on_every_rank_mends_a_first_meeting_that_failed() -> None:
    run_ranks(met_late, 2)


def test_background_calls_run_in_call_order() -> None:
    run_ranks(background, 2)


def groups_and_duplicates(rank: int, world: int) -> None:
    """Traffic never mixes with the caller's own, subgroups work, closed and re-made groups start anew."""
    own = torch.full((1000,), float(rank))
    pending = dist.all_reduce(own, async_op=True) if rank == 0 else None
    grad = torch.full((70_000,), float(rank))
    gradpack.allreduce([grad], op="sum")
    if rank != 0:
        pending = dist.all_reduce(own, async_op=True)
    assert pending is not None
    pending.wait()
    assert_same(own, torch.full((1000,), float(sum(range(world)))))
    assert_same(grad, torch.full((70_000,), float(sum(range(world)))))

    pair = dist.new_group([0, 2])
    if rank in (0, 2):
        grad = torch.full((10,), float(rank))
        gradpack.allreduce([grad], op="sum", group=pair)
        assert_same(grad, torch.full((10,), 2.0))
        values = torch.full((4,), float(rank))
        gradpack.broadcast([values], root=1, group=pair)  # ranks are those of the group: this is rank 2
        assert_same(values, torch.full((4,), 2.0))
    else:
        with pytest.raises(gradpack.TransportError, match="without this rank"):
            gradpack.allreduce([torch.ones(1)], group=pair)
    for _ in range(5):
        gradpack.close()
        grad = torch.full((10,), float(rank))
        gradpack.allreduce([grad], op="sum")
        assert_same(grad, torch.full((10,), float(sum(range(world)))))
    dist.barrier()
    if rank in (0, 2):
        dist.destroy_process_group(pair)
        with pytest.raises(gradpack.TransportError, match="destroyed"):
            gradpack.allreduce([torch.ones(1)], group=pair)
    with pytest.raises(TypeError, match="group: found str"):
        gradpack.allreduce([torch.ones(1)], group="world")
    state = weakref.ref(groups.resolve("test", None))
    gc.disable()  # it dies with its group, not when the collector comes by
    dist.destroy_process_group()
    assert state() is None
    gc.enable()
    with pytest.raises(gradpack.TransportError, match="init_process_group"):
        gradpack.allreduce([torch.ones(1)])


def test_groups() -> None:
    run_ranks(groups_and_duplicates, 3)


class Renamed(dist.ProcessGroupGloo):
    """A backend that gradpack does not know: gloo by another name."""

    made: ClassVar[list[dist.ProcessGroupGloo]] = []  # torch keeps the C++ half only; without this one the name is gone

    def name(self) -> str:
        return "renamed"

    @staticmethod
    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        Renamed.made.append(Renamed(store, rank, size, timeout))
        return Renamed.made[-1]


def over_an_unknown_backend(rank: int, world: int) -> None:
    os.environ["GRADPACK_TRANSPORT"] = "process_group"
    dist.Backend.register_backend("renamed", Renamed.create, devices=["cpu"])
    group = dist.new_group([0, 1], backend="renamed")
    known = len(dist.distributed_c10d._world.pg_map)
    grad = torch.full((100_000,), float(rank))
    gradpack.allreduce([grad], op="sum", group=group)
    assert_same(grad, torch.ones(100_000))
    assert (len(Renamed.made), len(dist.distributed_c10d._world.pg_map)) == (2, known + 1)
    gradpack.close(group)
    assert len(dist.distributed_c10d._world.pg_map) == known


def test_any_backend_is_duplicated_as_itself() -> None:
    run_ranks(over_an_unknown_backend, 2)


def test_without_a_process_group_it_says_what_to_call() -> None:
    with pytest.raises(gradpack.TransportError, match=r"torch\.distributed\.init_process_group\(\)"):
        gradpack.allreduce([torch.ones(1)])
    with pytest.raises(gradpack.TransportError, match=r"broadcast: group: found no process group"):
        gradpack.broadcast([torch.ones(1)])


def from_a_forked_child(rank: int, world: int) -> None:
    gradpack.allreduce([torch.ones(1)])
    subgroup = dist.new_group([0, 1])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        told = []
        for group in (None, subgroup):  # one that gradpack knows already, one that it never saw
            try:
                gradpack.allreduce([torch.ones(1)], group=group)
            except gradpack.TransportError as error:
                told.append(str(error))
        os.write(write, "|".join(told).encode())
        os._exit(0)
    os.close(write)
    told = os.read(read, 10_000).decode().split("|")
    os.waitpid(child, 0)
    assert len(told) == 2 and all("forked child" in message for message in told), told
    gradpack.allreduce([torch.ones(1)])


def test_a_forked_child_is_refused_and_the_parent_goes_on() -> None:
    run_ranks(from_a_forked_child, 2)


def from_a_second_thread(rank: int, world: int) -> None:
    gradpack.allreduce([torch.ones(1)])
    inside = threading.Event()
    found: list[str] = []

    def grads() -> Any:
        inside.set()
        yield torch.ones(4)
        second.join()

    def other() -> None:
        inside.wait(10)
        for attempt in (lambda: gradpack.allreduce([torch.ones(1)]), lambda: gradpack.explain([torch.ones(1)]), gradpack.close):
            try:
                attempt()
            except gradpack.TransportError as error:
                found.append(str(error))

    second = threading.Thread(target=other)
    second.start()
    gradpack.allreduce(grads())
    second.join()
    assert [message.partition(":")[0] for message in found] == ["allreduce", "explain", "close"]
    assert all("another thread" in message for message in found)
    gradpack.allreduce([torch.ones(1)])


def test_a_second_thread_inside_a_call_is_refused() -> None:
    run_ranks(from_a_second_thread, 2)


def too_late(rank: int, world: int) -> None:
    gradpack.allreduce([torch.ones(4)])
    if rank == 1:
        time.sleep(2.5)
        return
    grad = torch.full((4,), 7.0)
    began = time.monotonic()
    with pytest.raises(gradpack.TransportTimeout, match=r"^allreduce: call 2 on this group: found rank 1 \(after its call 1\)"):
        gradpack.allreduce([grad], timeout=timedelta(seconds=0.5))
    assert 0.4 < time.monotonic() - began < 2
    assert_same(grad, torch.full((4,), 7.0))
    with pytest.raises(gradpack.TransportError, match="broken by an earlier failure"):
        gradpack.allreduce([grad])


def too_late_to_meet(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(2.5)
        return
    began = time.monotonic()
    with pytest.raises(gradpack.TransportTimeout, match=r"^allreduce: first call on this group: found rank 1 absent"):
        gradpack.allreduce([torch.ones(4)], timeout=0.5)
    assert 0.4 < time.monotonic() - began < 2
    with pytest.raises(gradpack.TransportError, match="broken by an earlier failure"):
        gradpack.allreduce([torch.ones(4)])


def test_the_deadline_holds_where_ranks_meet_for_the_first_time() -> None:
    outcomes = try_ranks(too_late_to_meet, 2)
    assert [outcome.text for outcome in outcomes] == ["", ""]


def later_calls_have_their_own(rank: int, world: int) -> None:
    gradpack.allreduce([torch.ones(4)], timeout=1)
    if rank == 1:
        time.sleep(2.5)
    grad = torch.ones(4)
    gradpack.allreduce([grad], op="sum")
    assert_same(grad, torch.full((4,), 2.0))


def test_a_short_deadline_is_that_of_its_call_only() -> None:
    run_ranks(later_calls_have_their_own, 2)


def test_a_deadline_that_passes_breaks_the_group() -> None:
    outcomes = try_ranks(too_late, 2)
    assert [outcome.text for outcome in outcomes] == ["", ""]


def raises_mismatch(rank: int, world: int) -> None:
    gradpack.allreduce([torch.ones(2 + rank)])


def test_an_uncaught_mismatch_ends_every_rank_with_its_class() -> None:
    messages = every_rank_raises(try_ranks(raises_mismatch, 3), gradpack.LayoutMismatch)
    assert messages[0] == "allreduce: grads[0]: float32[2] here, float32[3] on rank 1, float32[4] on rank 2"
