"""Trains a small convolutional network on scikit-learn's handwritten digits, twice: with gradpack.allreduce, and with
DistributedDataParallel from the same seed. Ends with a table, and with an error where the two ranks' parameters differ in one bit
or the accuracy is under 95 %.

Run it as ``python examples/digits.py``; it starts torchrun with two processes itself. ``--help`` lists the options.
"""

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import gradpack

WANTED_ACCURACY = 0.95


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def load_data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    digits = load_digits()
    images, labels = digits.images[:, None] / 16.0, digits.target
    parts = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = (torch.as_tensor(part) for part in parts)
    return train_images.float(), train_labels, test_images.float(), test_labels


class Training:
    """One training run; ``reduce`` is what happens to the gradients between backward and the optimizer's step."""

    def __init__(self, title: str, model: nn.Module, reduce: Callable[[], int], options: argparse.Namespace) -> None:
        self.title = title
        self.model = model
        self.reduce = reduce
        self.options = options
        self.backward_seconds: list[float] = []
        self.reduce_seconds: list[float] = []
        self.wire_bytes = 0
        self.accuracy = 0.0

    def run(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        images, labels, test_images, test_labels = load_data()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        shuffle = torch.Generator().manual_seed(1)
        batch = self.options.batch
        steps = len(images) // (batch * world)
        bar = tqdm(total=steps * self.options.epochs, desc=self.title, disable=rank != 0, unit="step")
        for epoch in range(self.options.epochs):
            order = torch.randperm(len(images), generator=shuffle)[: steps * batch * world].view(steps, world, batch)
            for step in range(steps):
                mine = order[step, rank]
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.model(images[mine]), labels[mine])
                began = time.perf_counter()
                loss.backward()
                middle = time.perf_counter()
                self.wire_bytes = self.reduce()
                self.backward_seconds.append(middle - began)
                self.reduce_seconds.append(time.perf_counter() - middle)
                optimizer.step()
                bar.update()
            with torch.no_grad():
                self.accuracy = (self.model(test_images).argmax(1) == test_labels).float().mean().item()
            if rank == 0:
                bar.write(f"{self.title}: epoch {epoch + 1}: test accuracy {100 * self.accuracy:.1f} %")
        bar.close()


def parameters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def ranks_agree(model: nn.Module) -> bool:
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(parameters_of(model).numpy().tobytes()).hexdigest())
    return len(set(digests)) == 1


def train(options: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    model = make_model()
    gradpack.broadcast(model)
    packed = Training(
        "gradpack",
        model,
        lambda: gradpack.allreduce(model, splits=options.splits, compress=options.compress).wire_bytes,
        options,
    )
    packed.run()

    wrapped = DistributedDataParallel(make_model())
    ddp = Training("DDP", wrapped, lambda: 0, options)
    ddp.run()

    travels_by = gradpack.explain(model).transport
    agree = ranks_agree(model)
    difference = (parameters_of(model) - parameters_of(wrapped)).abs().max().item()
    if dist.get_rank() == 0:
        plain_backward = statistics.median(packed.backward_seconds)
        # DDP reduces inside backward, so what it costs is its backward less the same backward without it.
        ours = statistics.median(packed.reduce_seconds)
        theirs = statistics.median(ddp.backward_seconds) - plain_backward
        rows = {
            "final test accuracy": f"{100 * packed.accuracy:.2f} % (DDP: {100 * ddp.accuracy:.2f} %)",
            "parameters equal on all ranks": "yes, every bit" if agree else "NO",
            "largest parameter difference to DDP": f"{difference:.3g}",
            "gradpack's gradients travel by": str(travels_by),
            "gradient time per step, gradpack": f"{1e3 * ours:.2f} ms",
            "gradient time per step, DDP": f"{1e3 * theirs:.2f} ms ({theirs / ours:.1f} times as long)",
            "bytes on the wire per step and rank": f"{packed.wire_bytes:,}",
        }
        table = Table("handwritten digits", f"{dist.get_world_size()} processes", title="gradpack demo")
        for name, value in rows.items():
            table.add_row(name, value)
        Console().print(table)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if agree and packed.accuracy >= WANTED_ACCURACY else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="per process")
    parser.add_argument("--splits", type=int, default=4)
    parser.add_argument("--compress", choices=["fp16", "bf16"])
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return train(options)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.processes)]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return subprocess.run([*torchrun, *sys.argv], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
