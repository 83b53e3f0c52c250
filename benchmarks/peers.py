"""The ways to average gradients over ranks that bench_allreduce.py compares, each as a user of torch would write it."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shapes import Shapes, count
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gradpack
from gradpack.testing import exact_values

SPLITS = 4


def views_of(flat: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
    return [part.view(shape) for part, shape in zip(flat.split([count([shape]) for shape in shapes]), shapes, strict=True)]


class Gradients:
    """The gradients of one rank, and what must be in them before and after.

    Args:
        shapes: Their shapes.
        dtype: Their dtype.
        rank: Whose.
        world: Number of ranks, a power of two: then dividing is exact too, and whatever is wrong was moved or summed wrongly.
    """

    def __init__(self, shapes: Shapes, dtype: torch.dtype, rank: int, world: int) -> None:
        self.shapes = shapes
        self.dtype = dtype
        self.world = world
        self.tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        self.numel = count(shapes)
        self.nbytes = self.numel * dtype.itemsize
        # bfloat16 holds whole numbers up to 256. The values repeat after the square of a period, so one largest gradient and a
        # bit more of memory serves all of them.
        largest = min(60, 256 // world)
        period = (2 * largest + 1) ** 2
        mine = torch.from_numpy(exact_values(period, rank, largest))
        total = sum(torch.from_numpy(exact_values(period, peer, largest)) for peer in range(world))
        self._before = self._repeated(mine)
        self._mean = self._repeated(total / world)

    def _repeated(self, values: torch.Tensor) -> list[torch.Tensor]:
        longest = max(count([shape]) for shape in self.shapes)
        values = values.to(self.dtype)
        line = values.repeat(-(-longest // len(values)) + 1)
        views, begin = [], 0
        for shape in self.shapes:
            views.append(line[begin % len(values) :][: count([shape])].view(shape))
            begin += count([shape])
        return views

    def fill(self, tensors: list[torch.Tensor] | None = None) -> None:
        """Writes every element anew, as backward does: what follows finds the caches as it would in training."""
        torch._foreach_copy_(self.tensors if tensors is None else tensors, self._before)

    def wrong(self, tensors: Sequence[torch.Tensor | None], divisor: int = 1) -> int:
        """How many elements of `tensors`, divided, are not the mean over ranks."""
        wrong = 0
        for tensor, mean in zip(tensors, self._mean, strict=True):
            wrong += mean.numel() if tensor is None else int((tensor / divisor != mean).sum())
        return wrong


class Peer:
    """One way.

    Attributes:
        name: What a row calls it.
        transport: What carries it.
        wire: The wire dtype.
        every: As for rows.Piece.
        passes: How often a row's GB/s counts the gradients' bytes.
    """

    name = ""
    transport = "gloo"
    every = 1
    passes = 1

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.wire = str(gradients.dtype).removeprefix("torch.")

    def release(self) -> None:
        """Gives up what an earlier peer has left for this one to use."""

    def prepare(self) -> None:
        """Makes what is kept from step to step."""

    def before(self) -> None:
        """What a step does outside the timed part."""
        self.gradients.fill()

    def run(self) -> None:
        """The timed part."""
        raise NotImplementedError

    def wrong(self) -> int:
        """How many elements `run` left wrong."""
        return self.gradients.wrong(self.gradients.tensors)


class Flat(Peer):
    """Gradients that already lie in one buffer, summed and not divided: less than any of the others can do.

    Args:
        gradients: As for Peer.
        other: A peer whose buffer this one uses too.
    """

    name = "flat"

    def __init__(self, gradients: Gradients, other: Flat | None = None) -> None:
        super().__init__(gradients)
        self.buffer = torch.zeros(gradients.numel, dtype=gradients.dtype) if other is None else other.buffer
        self.views = views_of(self.buffer, gradients.shapes)

    def before(self) -> None:
        self.gradients.fill(self.views)

    def run(self) -> None:
        dist.all_reduce(self.buffer)

    def wrong(self) -> int:
        return self.gradients.wrong(self.views, self.gradients.world)


class FlatWithCopies(Peer):
    """The hand-rolled loop at its best: a buffer made once, and one call to copy each way."""

    name = "flat + copies"

    def prepare(self) -> None:
        self.buffer = torch.zeros(self.gradients.numel, dtype=self.gradients.dtype)
        self.views = views_of(self.buffer, self.gradients.shapes)

    def run(self) -> None:
        torch._foreach_copy_(self.views, self.gradients.tensors)
        dist.all_reduce(self.buffer)
        self.buffer.div_(self.gradients.world)
        torch._foreach_copy_(self.gradients.tensors, self.views)


class Cat(Peer):
    """The hand-rolled loop as it is mostly written."""

    name = "cat"

    def run(self) -> None:
        buffer = torch.cat([gradient.view(-1) for gradient in self.gradients.tensors])
        dist.all_reduce(buffer)
        buffer /= self.gradients.world
        begin = 0
        for gradient in self.gradients.tensors:
            gradient.copy_(buffer[begin : begin + gradient.numel()].view_as(gradient))
            begin += gradient.numel()


class PerTensor(Peer):
    """One all-reduce for each gradient, all under way at once."""

    name = "per tensor"

    def __init__(self, gradients: Gradients) -> None:
        super().__init__(gradients)
        self.every = 1 if len(gradients.tensors) < 500 else 10

    def run(self) -> None:
        works = [dist.all_reduce(gradient, async_op=True) for gradient in self.gradients.tensors]
        for work in works:
            work.wait()
        torch._foreach_div_(self.gradients.tensors, self.gradients.world)


class Coalesced(Peer):
    """torch's own all-reduce of a list."""

    name = "coalesced"

    def run(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # that it may go one day
            dist.all_reduce_coalesced(self.gradients.tensors)
        torch._foreach_div_(self.gradients.tensors, self.gradients.world)


class HandOut(torch.autograd.Function):
    """A loss whose backward hands out gradients that are ready, and so costs next to nothing."""

    @staticmethod
    def forward(ctx: Any, ready: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.ready = ready
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = (None, *ctx.ready)
        # With no reference left, autograd keeps each gradient as it is instead of copying it.
        ctx.ready.clear()
        return gradients


class Model(torch.nn.Module):
    """Parameters of given shapes, which nothing reads or writes, so that they take no memory."""

    def __init__(self, gradients: Gradients) -> None:
        super().__init__()
        empty = [torch.empty(shape, dtype=gradients.dtype) for shape in gradients.shapes]
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(tensor) for tensor in empty])

    def forward(self, ready: list[torch.Tensor]) -> torch.Tensor:
        return HandOut.apply(ready, *self.weights)


class Backward(Peer):
    """Backward without any reduction: what DDP's is net of."""

    name = "backward"
    transport = "memory"
    passes = 0

    def prepare(self) -> None:
        self.model = Model(self.gradients)
        self.wrapped: torch.nn.Module = self.model

    def before(self) -> None:
        super().before()
        self.model.zero_grad(set_to_none=True)
        # Other tensors in the same memory, for the gradients' own would be referred to elsewhere.
        self.loss = self.wrapped([gradient.detach() for gradient in self.gradients.tensors])

    def run(self) -> None:
        self.loss.backward()

    def wrong(self) -> int:
        return 0


class Ddp(Backward):
    """DistributedDataParallel, whose reduction is part of backward.

    Args:
        gradients: As for Peer.
        label: What tells it from the other ones.
        hook: A communication hook.
        wire: The wire dtype, where it is not the gradients'.
        **arguments: Of DistributedDataParallel.
    """

    transport = "gloo"
    passes = 1

    def __init__(
        self, gradients: Gradients, label: str, hook: Callable[..., Any] | None = None, wire: str | None = None, **arguments: bool
    ) -> None:
        super().__init__(gradients)
        self.name = f"DDP {label}"
        self.hook = hook
        self.wire = wire or self.wire
        self.arguments = arguments

    def prepare(self) -> None:
        super().prepare()
        self.wrapped = DistributedDataParallel(self.model, init_sync=False, **self.arguments)
        if self.hook is not None:
            self.wrapped.register_comm_hook(None, self.hook)

    def wrong(self) -> int:
        return self.gradients.wrong([weight.grad for weight in self.model.weights])


class Gradpack(Peer):
    """gradpack.allreduce.

    Args:
        gradients: As for Peer.
        compress: Its wire.
        asked: Its transport.
    """

    def __init__(self, gradients: Gradients, compress: str | None = None, asked: str = "auto") -> None:
        super().__init__(gradients)
        self.options = {"splits": SPLITS, "compress": compress, "transport": asked}
        self.wire = {None: self.wire, "fp16": "float16", "bf16": "bfloat16"}[compress]
        self.name = " ".join(["gradpack", *([compress] if compress else []), *(["over gloo"] if asked != "auto" else [])])

    def release(self) -> None:
        gradpack.close()

    def run(self) -> None:
        gradpack.allreduce(self.gradients.tensors, **self.options)

    def find_transport(self) -> None:
        self.transport = gradpack.explain(self.gradients.tensors, **self.options).transport or "memory"


class MpiFlat(Flat):
    """MPI's all-reduce of one buffer in which the gradients already lie; offered in processes that mpirun has started."""

    name = "MPI flat"
    transport = "MPI"

    def run(self) -> None:
        from mpi4py import MPI

        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, self.buffer.numpy())


def build_deepspeed() -> str | None:
    """Compiles DeepSpeed's all-reduce through shared memory from the sources that its package has: where it lies, or None."""
    package = importlib.util.find_spec("deepspeed")
    if package is None or package.origin is None:
        return None
    from torch.utils import cpp_extension

    sources = Path(package.origin).parent / "ops/csrc/cpu/comm"
    return str(
        cpp_extension.load(
            "deepspeed_shm",
            [str(sources / name) for name in ("shm_interface.cpp", "shm.cpp")],
            extra_cflags=["-O2", "-fopenmp"],
            is_python_module=True,
        ).__file__
    )


class DeepSpeedFlat(Flat):
    """DeepSpeed's all-reduce of one buffer in which the gradients already lie."""

    name = "DeepSpeed flat"
    transport = "DeepSpeed"
    sums_16_bits = False  # its kernels for those are AVX-512's alone, and nothing else keeps them from running

    @staticmethod
    def begin(path: str, rank: int, world: int) -> None:
        """Loads what build_deepspeed() made, which takes a group of ranks from the environment, once for a process."""
        os.environ["LOCAL_SIZE"] = str(world)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        found = importlib.util.spec_from_file_location("deepspeed_shm", path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        module.initialize(world, rank)
        DeepSpeedFlat.sums_16_bits = module.vector_kernel_level() >= 2

    def run(self) -> None:
        torch.ops.deepspeed.inference_all_reduce_(self.buffer)


class DeepSpeedPerTensor(Peer):
    """The same for each gradient."""

    name = "DeepSpeed per tensor"
    transport = "DeepSpeed"

    def run(self) -> None:
        for gradient in self.gradients.tensors:
            torch.ops.deepspeed.inference_all_reduce_(gradient)
        torch._foreach_div_(self.gradients.tensors, self.gradients.world)


class Memcpy(Peer):
    """The memory bound: all ranks at once read and write the gradients' bytes once."""

    name = "memcpy"
    transport = "memory"
    passes = 2

    def __init__(self, gradients: Gradients, source: Flat, target: FlatWithCopies) -> None:
        super().__init__(gradients)
        self.source, self.target = source, target

    def before(self) -> None:
        self.source.before()

    def run(self) -> None:
        self.target.buffer.copy_(self.source.buffer)

    def wrong(self) -> int:
        return int((self.target.buffer != self.source.buffer).sum())


class Scale(Flat):
    """The bound of what is reduced in place: all ranks at once read and write the gradients' bytes once, where they are."""

    name = "scale in place"
    transport = "memory"
    passes = 2

    def run(self) -> None:
        self.buffer.mul_(1.0)

    def wrong(self) -> int:
        return 0


def make_peers(gradients: Gradients, compress: Sequence[str]) -> list[Peer]:
    """All that this torch has and that the dtype allows."""
    flat, copies = Flat(gradients), FlatWithCopies(gradients)
    peers: list[Peer] = [flat, copies, Cat(gradients), PerTensor(gradients), Coalesced(gradients), Backward(gradients)]
    peers += [Ddp(gradients, "default"), Ddp(gradients, "bucket view", gradient_as_bucket_view=True)]
    if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters:
        peers.append(Ddp(gradients, "batched copy", batched_grad_copy=True))
    if gradients.dtype in (torch.float32, torch.float64):
        peers.append(Ddp(gradients, "fp16 hook", default_hooks.fp16_compress_hook, "float16"))
        peers += [Gradpack(gradients, wire, asked) for asked in ("auto", "process_group") for wire in compress]
        if "mpi4py.MPI" in sys.modules:
            peers.append(MpiFlat(gradients, flat))
    deepspeed = gradients.dtype == torch.float32 or (gradients.dtype.itemsize == 2 and DeepSpeedFlat.sums_16_bits)
    if hasattr(torch.ops.deepspeed, "inference_all_reduce_") and deepspeed:
        peers += [DeepSpeedFlat(gradients, flat), DeepSpeedPerTensor(gradients)]
    peers += [Gradpack(gradients), Gradpack(gradients, asked="process_group")]
    return [*peers, Memcpy(gradients, flat, copies), Scale(gradients, flat)]
