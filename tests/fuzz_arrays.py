"""Random lists of arrays through describe() and every operation of Plan, against NumPy, to the bit.

Around the elements of every array and around what is packed lie bytes that must stay as they were.
"""

import itertools
import struct
import zlib

import numpy as np
import pytest
import reference
from border_arrays import HandMade, OldDLPack, OnlyDLPack, describe, read_only

from gradpack import _C
from gradpack.dtypes import COMPRESS, DTYPES
from gradpack.errors import LayoutError
from gradpack.layout import ArraySpec, plan_layout

_CODES = {"bool": 6, "int": 0, "uint": 1, "float": 2, "bfloat16": 4, "complex": 5}  # of DLPack
_FOREIGN = {"bfloat16", "complex32"}  # NumPy has no such dtypes
_GUARD = 64

# What rounding, overflow, subnormals and sums go wrong at.
_EDGES = [0.0, 1.0, 3.0, 65504.0, 65519.99, 65520.0, 2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 1 + 2.0**-8, 1 + 3 * 2.0**-8]
_EDGES += [1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-11 + 2.0**-50, 3.3961e38, 3.4028235e38, 1e-40, 5e-324, 1.7e308]
_EDGES += [float("inf"), float("nan")]
_EDGES = np.array(_EDGES + [-edge for edge in _EDGES])


def random_bits(rng, scalar, count):
    dtype = reference.bits_dtype(scalar)
    kind = rng.randrange(3) if reference.is_float(scalar) else 0
    if kind == 0:
        return np.frombuffer(rng.randbytes(count * dtype.itemsize), dtype).copy()
    generator = np.random.Generator(np.random.PCG64(rng.getrandbits(64)))
    if kind == 1:
        return reference.narrowed(generator.standard_normal(count) * 2.0 ** rng.randrange(-20, 15), scalar)
    return reference.narrowed(generator.choice(_EDGES, count), scalar)


def random_shape(rng, size):
    if size > 1 and rng.random() < 0.7:
        row = rng.choice([1, 3, 40])
        return rng.choice([(size,), (size // row + 1, row), (2, size // (2 * row) + 1, row)])
    return tuple(rng.randrange(rng.random() < 0.95, 8) for _ in range(rng.randrange(5)))


def random_strides(rng, shape, itemsize):
    """Strides in bytes at which no two elements meet."""
    if 2 <= len(shape) <= 3 and 1 < np.prod(shape) < 40 and rng.random() < 0.2:
        for _ in range(20):
            strides = [rng.choice([-1, 1]) * rng.randrange(1, 30) for _ in shape]
            places = [sum(map(int.__mul__, index, strides)) for index in itertools.product(*map(range, shape))]
            if len(set(places)) == len(places):
                return [stride * itemsize for stride in strides]
    inner_first = list(range(len(shape)))[::-1]
    if rng.random() < 0.6:
        rng.shuffle(inner_first)
    strides, reach = [0] * len(shape), itemsize * rng.choice([1, 1, 1, 2, 3])
    for dim in inner_first:
        strides[dim] = rng.choice([1, 1, 1, 1, -1]) * reach
        reach = reach * max(shape[dim], 1) + itemsize * rng.choice([0, 0, 0, 0, 1, 5])
    return strides


class Array:
    """One array in memory of its own, guarded or of exactly its size, and the object that it is described by."""

    def __init__(self, rng, dtype, shape):
        self.dtype, self.shape, self.scalar = dtype, shape, DTYPES[dtype].scalar
        item, scalar_item = DTYPES[dtype].itemsize, DTYPES[self.scalar].itemsize
        strides = random_strides(rng, shape, item)
        ends = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size]
        low, high = sum(end for end in ends if end < 0), sum(end for end in ends if end > 0)
        lead, tail = (0, 0) if rng.random() < 0.3 else (_GUARD + scalar_item * rng.randrange(17), _GUARD)
        self.memory = random_bits(rng, self.scalar, (lead + high - low + item + tail) // scalar_item).view(np.uint8)
        self.start = lead - low
        self.strides = strides
        self.carrier = np.dtype({"bfloat16": "u2", "complex32": "u4", "bool": "u1"}.get(dtype, dtype))
        self.logical = False
        self.object = self.exported(rng)

    def view(self, memory, dtype=None):
        return np.ndarray(self.shape, dtype or self.carrier, memory, self.start, self.strides)

    @property
    def numel(self):
        return int(np.prod(self.shape))

    def exported(self, rng):
        kind = rng.randrange(5)
        item = DTYPES[self.dtype].itemsize
        if kind == 0 or self.dtype in _FOREIGN:
            name = self.dtype if self.dtype == "bfloat16" else self.dtype.rstrip("0123456789")
            strides = [stride // item for stride in self.strides]
            memory = self.memory.ctypes.data + self.start
            return HandMade(self.shape, strides, code=_CODES[name], bits=8 * item, address=memory)
        array = self.view(self.memory, self.dtype)
        return {1: OnlyDLPack, 2: OldDLPack, 3: memoryview, 4: lambda x: x}[kind](array)

    def in_order(self, memory):
        """Its elements in packing order, as a view of one dimension fewer or as many."""
        view = self.view(memory)
        moving = [d for d, size in enumerate(self.shape) if size > 1]
        places = iter(moving if self.logical else sorted(moving, key=lambda d: -abs(self.strides[d])))
        return view.transpose([next(places) if size > 1 else d for d, size in enumerate(self.shape)])

    def bits(self, memory=None):
        """The bits of its scalars in packing order: a copy."""
        flat = self.in_order(self.memory if memory is None else memory).flatten()
        return flat.view(reference.bits_dtype(self.scalar))

    def with_bits(self, before, begin, bits):
        """`before`, memory like its own, with the scalars from `begin` on replaced."""
        memory = before.copy()
        if self.numel:
            everything = self.bits(before)
            everything[begin : begin + len(bits)] = bits
            ordered = self.in_order(memory)
            ordered[...] = everything.view(self.carrier).reshape(ordered.shape)
        return memory


def refused(rng, arrays):
    """The objects with one that must be refused among them, and what it raises."""
    objects = [array.object for array in arrays]
    index = rng.randrange(len(arrays))
    array = arrays[index]
    large, present = rng.choice([np.uint16, np.float32, np.float64]), np.zeros(9)
    kinds = {
        "broadcast": (np.ndarray((3, 2), np.float64, present, 0, rng.choice([(0, 8), (8, 0)])), BufferError),
        "self-overlap": (np.ndarray((3, 3), np.float64, present, 0, rng.choice([(16, 8), (-8, 16)][:1])), BufferError),
        "misaligned": (np.ndarray((2,), large, present, 1), BufferError),
        "read-only": (read_only(np.zeros(3)), BufferError),
        "byte-swapped": (np.zeros(2, ">i4"), (BufferError, TypeError)),
    }
    if len(arrays) > 1 and array.numel:
        objects.insert(index + 1, array.object)
        if rng.random() < 0.3:
            return objects, index + 1, LayoutError
        del objects[index + 1]
    objects[index], error = kinds[rng.choice(list(kinds))]
    return objects, index, error


class Case:
    """A list of arrays, its plan, and the operations on one of its streams after the other."""

    def __init__(self, rng):
        self.rng = rng
        dtypes = rng.sample(list(DTYPES), rng.randrange(1, 4))
        size = 400_000 if rng.random() < 0.004 else rng.choice([1, 1, 1, 40, 300, 300, 5000])
        self.arrays = [Array(rng, rng.choice(dtypes), random_shape(rng, size)) for _ in range(rng.randrange(1, 6))]
        self.digest = 0
        _C.set_num_threads(rng.randrange(1, 5))

    def check(self):
        rng, arrays = self.rng, self.arrays
        if rng.random() < 0.1:
            objects, index, error = refused(rng, arrays)
            with pytest.raises(error, match=rf"^allreduce: grads\[{index}\]: "):
                describe(objects)
        self.described = describe([array.object for array in arrays])
        assert [self.described.dtype(i) for i in range(len(arrays))] == [array.dtype for array in arrays]
        assert [self.described.shape(i) for i in range(len(arrays))] == [array.shape for array in arrays]
        logical = [i for i in range(len(arrays)) if rng.random() < 0.1]
        self.described.pack_logically(logical)
        for i in logical:
            arrays[i].logical = True
        specs = [ArraySpec(array.shape, array.dtype) for array in arrays]
        left_out = {i for i in range(len(arrays)) if rng.random() < 0.1}
        self.layout = plan_layout(specs, splits=rng.choice([1, 2, 3, 5]), compress=rng.choice(list(COMPRESS)), absent=left_out)
        streams = [(g.dtype, g.wire, g.gradients, [specs[i].numel for i in g.gradients]) for g in self.layout.groups]
        self.plan = _C.Plan(self.described.key, len(arrays), streams)
        self.check_finite()
        for stream, group in enumerate(self.layout.groups):
            for _ in range(rng.randrange(1, 4)):
                Range(self, stream, group).check()
        return self.digest

    def check_finite(self):
        flags = _C.Nonfinite(len(self.arrays))
        self.plan.check_finite(self.described, flags)
        planned = {i for group in self.layout.groups for i in group.gradients}
        wanted = [i for i in sorted(planned) if reference.nonfinite(self.arrays[i].bits(), self.arrays[i].scalar).any()]
        assert flags.indices() == wanted and flags.any() == bool(wanted)

    def note(self, memory):
        self.digest = zlib.crc32(memory, self.digest)


class Range:
    """One range of a stream, one operation on it."""

    def __init__(self, case, stream, group):
        rng, self.case, self.stream = case.rng, case, stream
        self.scalar, self.wire = DTYPES[group.dtype].scalar, group.wire
        self.parts = 2 if DTYPES[group.dtype].kind == "complex" else 1
        ends = [rng.choice([0, group.numel, rng.randrange(group.numel + 1)]) for _ in range(2)]
        self.begin, self.end = sorted(ends) if rng.random() < 0.7 else rng.choice(list(itertools.pairwise(group.cuts)))
        self.count = (self.end - self.begin) * self.parts
        self.exact = self.scalar == self.wire  # what is neither cast nor divided keeps its bits, those of a NaN too
        # (array, first scalar within the array, first scalar within the range, scalars)
        self.pieces = []
        for i, (first, last) in zip(group.gradients, itertools.pairwise(group.offsets), strict=True):
            begin, end = max(first, self.begin), min(last, self.end)
            if begin < end:
                places = (begin - first, begin - self.begin, end - begin)
                self.pieces.append((i, *(place * self.parts for place in places)))
        self.flags = _C.Nonfinite(len(case.arrays)) if rng.random() < 0.6 else None
        self.divisor, self.counts = 1, None
        if reference.is_float(self.scalar):
            self.divisor = rng.choice([0, 1, 2, 3, 7, rng.randrange(1, 100_000)])
            if rng.random() < 0.3:
                self.counts = [rng.choice([0, 1, 2, 3, 7]) for _ in case.arrays]

    def check(self):
        operations = [self.pack, self.unpack]
        if self.scalar != "bool":
            operations += [self.reduce_unpack, self.reduce]
        self.case.rng.choice(operations)()

    # What the calls get.

    def make_buffer(self, rows=1):
        """A buffer of random scalars, and the offsets of rows in it: one behind the other, or anywhere."""
        rng, size = self.case.rng, DTYPES[self.wire].itemsize
        lead = rng.choice([0, 1, 17])
        self.buffer = _C.Buffer((lead + rows * self.count) * size + rng.choice([0, 0, 64]))
        self.bytes = np.frombuffer(self.buffer, np.uint8)
        whole = len(self.bytes) // size
        self.bytes[: whole * size] = random_bits(rng, self.wire, whole).view(np.uint8)
        if rng.random() < 0.7:
            return [(lead + row * self.count) * size for row in range(rows)]
        return [rng.randrange(whole - self.count + 1) * size for _ in range(rows)]

    def wire_bits(self, offset, memory=None):
        dtype = reference.bits_dtype(self.wire)
        return np.ndarray((self.count,), dtype, self.bytes if memory is None else memory, offset)

    def divisors(self):
        """The divisor of each scalar of the range."""
        if self.counts is None:
            return np.full(self.count, self.divisor)
        return np.concatenate([np.zeros(0, int), *(np.full(n, self.counts[i]) for i, _, _, n in self.pieces)])

    def division(self):
        counts = None if self.counts is None else struct.pack(f"{len(self.counts)}i", *self.counts)
        return {"divisor": self.divisor, "counts": counts}

    # What they made of it.

    def check_values(self, got, want, scalar, exact):
        if exact.all() and self.exact:
            np.testing.assert_array_equal(got, want)
        reference.assert_same(got, want, scalar)

    def check_flags(self, nonfinite):
        """`nonfinite`: of each scalar of the range."""
        if self.flags is not None:
            wanted = sorted({i for i, _, at, n in self.pieces if nonfinite[at : at + n].any()})
            assert self.flags.indices() == wanted, f"flags of {self.flags.indices()}, wanted {wanted}"

    def check_written(self, call, values, exact):
        """That `call` writes `values`, the bits of the range's scalars, into the arrays and nothing anywhere else."""
        before = [array.memory.copy() for array in self.case.arrays]
        packed = self.bytes.copy()
        call()
        for i, begin, at, n in self.pieces:
            array = self.case.arrays[i]
            got = array.bits()[begin : begin + n]
            self.check_values(got, values[at : at + n], self.scalar, exact[at : at + n])
            before[i] = array.with_bits(before[i], begin, got)
        for i, array in enumerate(self.case.arrays):
            np.testing.assert_array_equal(array.memory, before[i], f"the memory around array {i}")
            self.case.note(array.memory)
        np.testing.assert_array_equal(self.bytes, packed, "what was unpacked")
        self.check_flags(reference.nonfinite(values, self.scalar))

    # The operations.

    def pack(self):
        case = self.case
        (offset,) = self.make_buffer()
        own = np.concatenate(
            [np.zeros(0, reference.bits_dtype(self.scalar)), *(case.arrays[i].bits()[b : b + n] for i, b, _, n in self.pieces)]
        )
        want = own if self.exact else reference.narrowed(reference.widened(own, self.scalar), self.wire)
        before, arrays = self.bytes.copy(), [array.memory.copy() for array in case.arrays]
        case.plan.pack(case.described, self.stream, self.begin, self.end, self.buffer, offset, self.flags)
        self.check_values(self.wire_bits(offset), want, self.wire, np.ones(self.count, bool))
        self.wire_bits(offset, before)[:] = self.wire_bits(offset)
        np.testing.assert_array_equal(self.bytes, before, "the buffer around the pack")
        for array, memory in zip(case.arrays, arrays, strict=True):
            np.testing.assert_array_equal(array.memory, memory, "what was packed")
        case.note(self.bytes)
        self.check_flags(reference.nonfinite(want, self.wire))

    def unpack(self):
        case = self.case
        (offset,) = self.make_buffer()
        wire, undivided = self.wire_bits(offset), self.divisors() <= 1
        want = reference.narrowed(self.divided(reference.widened(wire, self.wire)), self.scalar)
        if self.exact:
            want = np.where(undivided, wire, want)
        place = (self.stream, self.begin, self.end, self.buffer, offset)
        self.check_written(
            lambda: case.plan.unpack(case.described, *place, **self.division(), nonfinite=self.flags), want, undivided
        )

    def sums(self, offsets):
        return self.divided(reference.summed([self.wire_bits(offset).copy() for offset in offsets], self.wire))

    def divided(self, values):
        return reference.divided(values, self.divisors()) if reference.is_float(self.wire) else values

    def reduce_unpack(self):
        case = self.case
        offsets = self.make_buffer(rows=case.rng.randrange(1, 5))
        place = (self.stream, self.begin, self.end, self.buffer, offsets)
        self.check_written(
            lambda: case.plan.reduce_unpack(case.described, *place, **self.division(), nonfinite=self.flags),
            reference.narrowed(self.sums(offsets), self.scalar),
            np.zeros(self.count, bool),
        )

    def reduce(self):
        case, size = self.case, DTYPES[self.wire].itemsize
        offsets = self.make_buffer(rows=case.rng.randrange(1, 5))
        want = reference.narrowed(self.sums(offsets), self.wire)
        others = [abs(a - b) for a, b in itertools.product(offsets, repeat=2) if a != b]
        in_place = case.rng.random() < 0.5 and all(distance >= self.count * size for distance in others)
        out, out_offset = (self.buffer, case.rng.choice(offsets)) if in_place else (_C.Buffer(self.count * size + 80), 16)
        out_bytes = np.frombuffer(out, np.uint8)
        before, rows = out_bytes.copy(), self.bytes.copy()
        place = (self.stream, self.begin, self.end, self.buffer, offsets, out, out_offset)
        case.plan.reduce(*place, **self.division())
        got = self.wire_bits(out_offset, out_bytes)
        reference.assert_same(got, want, self.wire)
        self.wire_bits(out_offset, before)[:] = got
        np.testing.assert_array_equal(out_bytes, before, "the buffer around the sums")
        if not in_place:
            np.testing.assert_array_equal(self.bytes, rows, "the rows")
        case.note(out_bytes)


def check(rng):
    return Case(rng).check()
