"""The border: what describe() accepts, and for how long it keeps it."""

import array
import ctypes
import sys

import numpy as np
import pytest
from border_arrays import FakeCuPy, HandMade, OldDLPack, OnlyDLPack, describe, key

NUMPY_DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
NUMPY_DTYPES += ["complex64", "complex128"]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.T, lambda x: x[:, ::2], lambda x: x[::-1, 1:]])
def test_every_protocol_says_the_same(dtype, view):
    source = view(np.zeros((4, 6), dtype))
    described = {
        "dlpack": describe([OnlyDLPack(source)], protocol="dlpack"),
        "old dlpack": describe([OldDLPack(source)], protocol="dlpack"),
        "buffer": describe([source], protocol="buffer"),
        "auto": describe([source]),
    }
    for arrays in described.values():
        assert (arrays.key, arrays.shape(0), arrays.dtype(0)) == (described["auto"].key, source.shape, dtype)
        assert (arrays.order(0), arrays.nbytes, arrays.device) == (described["auto"].order(0), source.nbytes, ("cpu", 0))
    cuda = describe([FakeCuPy(source)], protocol="cuda_array_interface")
    assert (cuda.shape(0), cuda.dtype(0), cuda.order(0)) == (source.shape, dtype, described["auto"].order(0))
    assert cuda.device == ("cuda", 0)
    assert cuda.key != described["auto"].key  # the device kind counts


def test_buffers_of_every_kind():
    objects = [
        *(array.array(code, [1, 2]) for code in "bBhHiIlLqQfd"),
        bytearray(3),
        memoryview(np.zeros(4, np.float16)),
        memoryview(bytearray(8)).cast("?"),
        (ctypes.c_float * 3)(),
        ((ctypes.c_int16 * 3) * 2)(),
    ]
    integers = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "int64", "uint64"]
    arrays = describe(objects)
    assert [arrays.dtype(i) for i in range(len(arrays))] == [
        *integers,
        "float32",
        "float64",
        "uint8",
        "float16",
        "bool",
        "float32",
        "int16",
    ]
    assert arrays.shape(16) == (2, 3)
    with pytest.raises(BufferError):  # held while described
        objects[12].append(1)
    del arrays
    objects[12].append(1)


def test_mixed_list():
    objects = [
        np.zeros((2, 3), np.float32),
        np.zeros(4),
        OnlyDLPack(np.zeros((2, 2), np.int8)),
        bytearray(5),
        HandMade(shape=(2, 3)),
        np.float32(0)[...],
    ]
    arrays = describe(objects)
    assert [arrays.shape(i) for i in range(len(arrays))] == [(2, 3), (4,), (2, 2), (5,), (2, 3), ()]
    assert arrays.nbytes == 24 + 32 + 4 + 5 + 24 + 4
    assert (arrays.present, arrays.num_absent, len(arrays)) == (b"\x3f", 0, 6)
    assert arrays.torch_tensors() == []


def test_empty_list_and_generators():
    empty = describe([])
    assert (len(empty), empty.nbytes, empty.present, empty.device, empty.torch_tensors()) == (0, 0, b"", ("cpu", 0), [])
    assert len(describe(np.zeros(2) for _ in range(3))) == 3
    for method in (empty.shape, empty.dtype, empty.order):
        with pytest.raises(IndexError):
            method(0)
    with pytest.raises(IndexError):
        describe([bytearray(1)]).shape(-1)


def test_zero_size_and_size_one():
    empty = np.zeros((0, 3), np.float32)
    arrays = describe([empty, empty, np.empty((2, 0)), HandMade(shape=(1 << 62, 1 << 62, 0), strides=(0, 5, 0))])
    assert (arrays.nbytes, arrays.num_absent, arrays.present) == (0, 0, b"\x0f")
    assert arrays.order(3) == ()
    assert key(np.zeros((0, 3)).T) == key(np.zeros((3, 0)))  # no elements, no order
    odd = np.lib.stride_tricks.as_strided(np.zeros(8), (1, 4, 1), (0, 8, 8 * 999))
    assert key(odd) == key(np.zeros((1, 4, 1)))
    assert key(HandMade(shape=(), strides=())) == key(np.float32(0)[...])
    assert describe([HandMade(shape=(2, 3), strides=None)]).order(0) == ()


def test_attributes_of_the_instance():
    class Plain:
        pass

    plain = Plain()
    plain.__cuda_array_interface__ = FakeCuPy(np.zeros(3)).__cuda_array_interface__
    assert describe([plain]).device == ("cuda", 0)


def test_many_types():
    classes = [type(f"Class{i}", (OnlyDLPack,), {}) for i in range(40)]
    objects = [classes[i * 7 % 40](np.zeros(2)) for i in range(200)]
    assert len(describe(objects)) == 200


def test_described_objects_stay_alive():
    hand_made = HandMade()
    source, wrapped, cupy = np.zeros(3), np.zeros(3), FakeCuPy(np.zeros(3))

    def counts():
        return [sys.getrefcount(x) for x in (source, wrapped, cupy)]

    before = counts()
    arrays = describe([hand_made, source, OnlyDLPack(wrapped), np.zeros(4)])
    on_cuda = describe([cupy])
    assert hand_made.deleted == 0
    assert all(now > then for now, then in zip(counts(), before, strict=True))
    del arrays, on_cuda
    assert hand_made.deleted == 1
    assert counts() == before
