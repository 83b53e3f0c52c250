"""Groups of every kind: objects of one's own, mpi4py communicators; none of them needs torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks_numpy

import gradpack
from gradpack.testing import local_group, run_ranks, try_ranks

MPIRUN = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize(
    ("transport", "over"), [("auto", "over: a segment of "), ("process_group", "over: allgather and alltoall of the group")]
)
def test_every_call_over_an_object(world: int, transport: str, over: str) -> None:
    assert all(found.startswith(over) for found in run_ranks(ranks_numpy.check_local, world, transport, backend=None))


@pytest.mark.skipif(not MPIRUN or not importlib.util.find_spec("mpi4py"), reason="wants mpi4py and mpirun")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("transport", ["auto", "process_group"])
def test_every_call_over_mpi(world: int, transport: str) -> None:
    done = mpirun(world, sys.executable, transport)
    assert sorted(line[:11] for line in done.stdout.splitlines()) == [f"rank {rank} of {world}" for rank in range(world)]


def mpirun(world: int, python: str, transport: str) -> subprocess.CompletedProcess[str]:
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [str(MPIRUN), "--oversubscribe", "-n", str(world), python, str(Path(ranks_numpy.__file__)), "mpi"]
    done = subprocess.run(
        command, env=os.environ | as_root | {"GRADPACK_TRANSPORT": transport}, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


class Broken:
    """A group whose ``allgather`` does as ``how`` says after its first ``good`` times."""

    def __init__(self, how: str, good: int) -> None:
        self.group, self.how, self.good, self.calls = local_group(), how, good, 0
        self.rank, self.size = self.group.rank, self.group.size

    def allgather(self, data: bytes, timeout: float) -> Any:
        self.calls += 1
        found: Any = self.group.allgather(data, timeout)
        if self.calls <= self.good:
            return found
        if self.how == "raises":
            raise KeyError("no such rank")
        return {"short": found[:-1], "strings": ["x"] * self.size, "cut": [part[:-1] for part in found], "none": None}[self.how]


WRONG = {
    "raises": "KeyError: 'no such rank'",
    "short": "wanted bytes of each of 2 ranks",
    "strings": "wanted bytes of each of 2 ranks",
    "none": "found NoneType, wanted bytes of each of 2 ranks",
    "cut": "bytes of rank 0, wanted",
}


def misbehaves(rank: int, world: int, how: str) -> None:
    os.environ["GRADPACK_TRANSPORT"] = "process_group"
    group = Broken(how, 3)  # two to meet, one for the first call
    gradpack.allreduce([np.ones(4, np.float32)], group=group)
    with pytest.raises(gradpack.TransportError, match=WRONG[how]):
        gradpack.allreduce([np.ones(4, np.float32)], group=group, timeout=5)
    with pytest.raises(gradpack.TransportError, match="broken by an earlier failure"):
        gradpack.allreduce([np.ones(4, np.float32)], group=group)


@pytest.mark.parametrize("how", sorted(WRONG))
def test_an_object_that_misbehaves_is_told_apart(how: str) -> None:
    assert [outcome.text for outcome in try_ranks(misbehaves, 2, how, backend=None)] == ["", ""]


def misbehaves_at_the_meeting(rank: int, world: int, how: str, good: int) -> str:
    with pytest.raises(gradpack.TransportError) as caught:
        gradpack.allreduce([np.ones(4, np.float32)], group=Broken(how, good), timeout=5)
    return str(caught.value)


@pytest.mark.parametrize("good", [1, 2, 3])
@pytest.mark.parametrize("how", sorted(WRONG))
def test_an_object_that_misbehaves_while_ranks_meet_is_told_apart(how: str, good: int) -> None:
    wanted = "found no card of rank 0" if how == "cut" else WRONG[how]
    for text in run_ranks(misbehaves_at_the_meeting, 2, how, good, backend=None):
        assert text.startswith("allreduce: first call on this group: ") and wanted in text


class Fake:
    """An object with some of what a group needs."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("rank",)
    size = 1

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        return [data]


@pytest.mark.parametrize(
    ("group", "kind", "match"),
    [
        (3, TypeError, "found int, wanted a torch.distributed process group"),
        (Fake(rank=0, size=1), TypeError, "found Fake, wanted a torch.distributed process group"),
        (Fake(allgather=len, size=1), TypeError, "whose rank is None"),
        (Fake(allgather=len, rank=0, size="2"), TypeError, "whose size is '2'"),
        (Fake(allgather=len, rank=2, size=2), ValueError, "found rank 2 of 2"),
        (Fake(allgather=len, rank=0, size=0), ValueError, "found rank 0 of 0"),
        (Fake(allgather=len, rank=0, size=1, timeout="soon"), TypeError, "whose timeout is 'soon'"),
    ],
)
def test_what_is_no_group_is_refused_by_name(group: Any, kind: type[Exception], match: str) -> None:
    for call in (gradpack.allreduce, gradpack.explain):
        with pytest.raises(kind, match=match):
            call([np.ones(3, np.float32)], group=group)
    with pytest.raises(kind, match=match):
        gradpack.barrier(group)


def test_a_group_without_weak_references_is_refused() -> None:
    group = Slotted()
    group.rank = 0
    with pytest.raises(TypeError, match="found Slotted, wanted an object that weak references can be made to"):
        gradpack.barrier(group)


def test_a_group_may_have_methods_in_the_place_of_attributes() -> None:
    grads = [np.ones(3, np.float32)]
    gradpack.allreduce(grads, group=Fake(allgather=len, rank=lambda: 0, size=lambda: np.int64(1)))
    assert grads[0].tolist() == [1, 1, 1]
