"""What the kernel tests share: a stream of tensors with its plan and buffer, and awkward data."""

import numpy as np
import torch

from gradpack import _C

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
SCALARS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def name(dtype):
    return str(dtype).removeprefix("torch.")


def raw(tensor):
    """The bytes of a tensor's elements, in logical order."""
    dense = tensor.contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()  # the stride of a size of 1 may be anything


class Packing:
    """Tensors of one dtype as one stream, and a buffer for all of it (with rows for reductions)."""

    def __init__(self, tensors, wire=None, rows=1):
        self.tensors = tensors
        self.dtype = tensors[0].dtype
        self.wire = wire or SCALARS.get(self.dtype, self.dtype)
        self.arrays = _C.describe(tensors, "test", "tensors", None, "grad", "auto")
        counts = [tensor.numel() for tensor in tensors]
        self.numel = sum(counts)
        self.plan = _C.Plan(self.arrays.key, len(tensors), [(name(self.dtype), name(self.wire), range(len(tensors)), counts)])
        self.element_bytes = self.wire.itemsize * (2 if self.dtype in SCALARS else 1)
        self.buffer = _C.Buffer(rows * self.numel * self.element_bytes)
        self.offsets = [row * self.numel * self.element_bytes for row in range(rows)]
        self.nonfinite = _C.Nonfinite(len(tensors))

    def pack(self, begin=0, end=None, offset=None, nonfinite=None):
        end = self.numel if end is None else end
        offset = begin * self.element_bytes if offset is None else offset
        self.plan.pack(self.arrays, 0, begin, end, self.buffer, offset, nonfinite)
        return self

    def unpack(self, begin=0, end=None, divisor=1, counts=None, nonfinite=None):
        end = self.numel if end is None else end
        self.plan.unpack(self.arrays, 0, begin, end, self.buffer, begin * self.element_bytes, divisor, counts, nonfinite)
        return self

    def reduce_unpack(self, divisor=1, counts=None, nonfinite=None):
        self.plan.reduce_unpack(self.arrays, 0, 0, self.numel, self.buffer, self.offsets, divisor, counts, nonfinite)
        return self

    def wires(self):
        """One tensor of the wire dtype for each row; they share the buffer's memory."""
        return torch.frombuffer(self.buffer, dtype=self.wire).reshape(len(self.offsets), -1)


def random_bits(count, dtype, seed=0):
    """Every pattern is as likely as any other: NaNs, infs and subnormals among them."""
    generator = np.random.default_rng(seed)
    random_bytes = generator.integers(0, 2 if dtype == torch.bool else 256, (count + 1) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(random_bytes).view(dtype)[:count]


def normal(count, dtype, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
