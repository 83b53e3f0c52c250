"""What describe() costs for a list of gradients.

Columns: median and best microseconds per call; `+version` adds torch.autograd.graph.increment_version, which every call that
writes torch tensors makes.

    python benchmarks/bench_border.py [number of arrays]
"""

import array
import statistics
import sys
import time
from functools import partial

import numpy as np
import torch

from gradpack import _C

increment_version = torch.autograd.graph.increment_version


def describe(objects, protocol="auto"):
    return _C.describe(objects, "bench", "grads", None, "grad", protocol)


def describe_and_move_versions(objects):
    increment_version(describe(objects).torch_tensors())


def microseconds(call, repeats=2000):
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3, min(times) / 1e3


def parameters(count, *, keep):
    params = [torch.nn.Parameter(torch.randn(8, 16)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(8, 16)
    # With a Python reference elsewhere a gradient's Python object outlives the call; without, torch revives it every time.
    return params, [param.grad for param in params] if keep else None


def cases(count):
    yield "Parameter, .grad held", *parameters(count, keep=True)
    yield "Parameter", *parameters(count, keep=False)
    yield "torch.Tensor", [torch.randn(8, 16) for _ in range(count)], None
    yield (
        "torch.Tensor, channels_last",
        [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last) for _ in range(count)],
        None,
    )
    yield "torch.Tensor, columns", list(torch.randn(8, 16, count).unbind(-1)), None
    yield "numpy.ndarray", [np.zeros((8, 16), np.float32) for _ in range(count)], None
    yield "array.array", [array.array("f", bytes(512)) for _ in range(count)], None


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    print(f"{count} arrays{'':22}{'median':>10}{'best':>10}{'+version':>10}")
    for label, objects, _kept in cases(count):
        median, best = microseconds(partial(describe, objects))
        line = f"{label:32}{median:10.1f}{best:10.1f}"
        if isinstance(objects[0], torch.Tensor):
            both, _ = microseconds(partial(describe_and_move_versions, objects))
            line += f"{both:10.1f}"
        print(line)


if __name__ == "__main__":
    main()
