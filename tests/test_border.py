"""The border: what describe() accepts, and for how long it keeps it."""

import array
import ctypes
import gc
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from border_arrays import FakeCuPy, HandMade, Lying, NoCalls, OldDLPack, OnlyDLPack, SimpleSubclass, describe, key, with_grad

from gradpack.errors import LayoutError

# Torch announces prototypes and deprecations of the kinds that are refused here.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

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
    if min(source.strides) > 0:
        tensor = torch.from_numpy(source)
        described["exchange"] = describe([tensor], protocol="exchange")
        described["torch dlpack"] = describe([tensor], protocol="dlpack")
    for arrays in described.values():
        assert (arrays.key, arrays.shape(0), arrays.dtype(0)) == (described["auto"].key, source.shape, dtype)
        assert (arrays.order(0), arrays.nbytes, arrays.device) == (described["auto"].order(0), source.nbytes, ("cpu", 0))
    cuda = describe([FakeCuPy(source)], protocol="cuda_array_interface")
    assert (cuda.shape(0), cuda.dtype(0), cuda.order(0)) == (source.shape, dtype, described["auto"].order(0))
    assert cuda.device == ("cuda", 0)
    assert cuda.key != described["auto"].key  # the device kind counts


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex32", "uint16", "int8", "uint8", "bool"])
def test_torch_dtypes(dtype):
    tensor = torch.zeros(3, dtype=getattr(torch, dtype))
    for protocol in ("exchange", "dlpack", "auto"):
        arrays = describe([tensor], protocol=protocol)
        assert arrays.dtype(0) == dtype
        assert arrays.torch_tensors()[0] is tensor


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
    base = torch.zeros(2, 3)
    objects = [base, np.zeros(4), OnlyDLPack(np.zeros((2, 2), np.int8)), bytearray(5), HandMade(shape=(2, 3)), np.float32(0)[...]]
    arrays = describe(objects)
    assert [arrays.shape(i) for i in range(len(arrays))] == [(2, 3), (4,), (2, 2), (5,), (2, 3), ()]
    assert arrays.nbytes == 24 + 32 + 4 + 5 + 24 + 4
    assert (arrays.present, arrays.num_absent, len(arrays)) == (b"\x3f", 0, 6)
    assert [id(x) for x in arrays.torch_tensors()] == [id(base)]


def test_empty_list_and_generators():
    empty = describe([])
    assert (len(empty), empty.nbytes, empty.present, empty.device, empty.torch_tensors()) == (0, 0, b"", ("cpu", 0), [])
    assert len(describe(torch.zeros(2) for _ in range(3))) == 3
    for method in (empty.shape, empty.dtype, empty.order):
        with pytest.raises(IndexError):
            method(0)
    with pytest.raises(IndexError):
        describe([bytearray(1)]).shape(-1)


def test_zero_size_and_size_one():
    empty = np.zeros((0, 3), np.float32)
    arrays = describe([empty, empty, torch.empty(2, 0), HandMade(shape=(1 << 62, 1 << 62, 0), strides=(0, 5, 0))])
    assert (arrays.nbytes, arrays.num_absent, arrays.present) == (0, 0, b"\x0f")
    assert arrays.order(3) == ()
    assert key(np.zeros((0, 3)).T) == key(np.zeros((3, 0)))  # no elements, no order
    odd = np.lib.stride_tricks.as_strided(np.zeros(8), (1, 4, 1), (0, 8, 8 * 999))
    assert key(odd) == key(np.zeros((1, 4, 1)))
    assert key(HandMade(shape=(), strides=())) == key(np.float32(0)[...])
    assert describe([HandMade(shape=(2, 3), strides=None)]).order(0) == ()


def test_parameters():
    values = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    param = torch.nn.Parameter(values)
    absent = describe([param])
    assert (absent.present, absent.num_absent, absent.shape(0), absent.nbytes) == (b"\0", 1, (2, 3, 4, 5), 480)
    assert absent.torch_tensors() == []
    param.grad = torch.ones_like(param)
    present = describe([param])
    assert (present.present, present.key) == (b"\1", absent.key)
    assert present.torch_tensors()[0] is param.grad
    assert describe([param], parameters="value").torch_tensors()[0] is param
    assert describe([param, param.detach()[:0]]).num_absent == 0
    # The gradient of a parameter with gaps is contiguous, whatever the order of the parameter.
    gappy = torch.nn.Parameter(torch.zeros(8, 6)[:, ::2].t())
    gappy.sum().backward()
    with_gradient = describe([gappy]).key
    gappy.grad = None
    assert describe([gappy]).key == with_gradient
    many = [torch.nn.Parameter(torch.zeros(1)) for _ in range(11)]
    many[9].grad = torch.zeros(1)
    assert (describe(many).present, describe(many).num_absent) == (b"\x00\x02", 10)


def test_parameters_of_subclasses():
    plain = torch.nn.Parameter(torch.zeros(2))
    subclass = torch.nn.Parameter(SimpleSubclass(torch.zeros(2)))  # stays a SimpleSubclass
    assert type(subclass) is SimpleSubclass
    assert describe([plain, subclass]).num_absent == 2
    subclass.grad = SimpleSubclass(torch.zeros(2))
    assert describe([plain, subclass]).present == b"\2"
    assert describe([plain.detach(), subclass], parameters="value").num_absent == 0


def test_tensors_that_require_grad():
    leaf = torch.ones(3, requires_grad=True)
    product = leaf * 2  # as gradients made with create_graph=True are
    for protocol in ("exchange", "dlpack", "auto"):
        assert describe([product], protocol=protocol).torch_tensors()[0] is product
        assert len(describe([torch.nn.Parameter(leaf)], parameters="value", protocol=protocol)) == 1
        with pytest.raises(ValueError, match=r"grads\[0\]: .*leaf.*\.grad.*\.detach\(\)"):
            describe([leaf], protocol=protocol)
    assert describe([leaf.detach()]).present == b"\1"


def test_subclasses_are_not_asked():
    lying = torch.zeros(3).as_subclass(Lying)
    assert describe([lying]).torch_tensors()[0] is lying
    param = with_grad(torch.nn.Parameter(torch.zeros(3)), torch.ones(3).as_subclass(Lying))
    assert describe([param]).present == b"\1"
    leaf = torch.zeros(3, requires_grad=True)
    with NoCalls():
        assert describe([param, lying]).present == b"\3"
        with pytest.raises(ValueError, match="leaf"):
            describe([leaf])
    with pytest.raises(ValueError, match="leaf"):
        describe([torch.zeros(3).as_subclass(SimpleSubclass).requires_grad_()])


def test_attributes_of_the_instance():
    class Plain:
        pass

    plain = Plain()
    plain.__cuda_array_interface__ = FakeCuPy(np.zeros(3)).__cuda_array_interface__
    assert describe([plain]).device == ("cuda", 0)


def test_many_types():
    classes = [type(f"Class{i}", (OnlyDLPack,), {}) for i in range(40)]
    objects = [classes[i * 7 % 40](np.zeros(2)) for i in range(200)]
    tensors = [torch.zeros(1).as_subclass(type(f"Tensor{i}", (torch.Tensor,), {})) for i in range(40)]
    assert len(describe(objects + tensors)) == 240


def test_without_torch():
    code = (
        "import sys, array; from gradpack import _C\n"
        "d = lambda x: _C.describe([x], 'op', 'arg', None, 'grad', 'auto')\n"
        "d(array.array('f', [1])); assert 'torch' not in sys.modules\n"
        "import torch; p = torch.nn.Parameter(torch.zeros(2)); assert d(p).num_absent == 1\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_described_objects_stay_alive():
    param = with_grad(torch.nn.Parameter(torch.zeros(3)), torch.ones(3))
    hand_made = HandMade()
    source, wrapped, cupy = np.zeros(3), np.zeros(3), FakeCuPy(np.zeros(3))

    def counts():
        return [sys.getrefcount(x) for x in (source, wrapped, cupy)]

    before = counts()
    arrays = describe([param, hand_made, source, OnlyDLPack(wrapped), np.zeros(4)])
    on_cuda = describe([cupy])
    (grad,) = arrays.torch_tensors()
    param.grad = None
    assert (sys.getrefcount(grad), hand_made.deleted) == (3, 0)
    assert all(now > then for now, then in zip(counts(), before, strict=True))
    del arrays, on_cuda
    assert (sys.getrefcount(grad), hand_made.deleted) == (2, 1)
    assert counts() == before


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_nothing_leaks():
    param = with_grad(torch.nn.Parameter(torch.zeros(3)), torch.ones(3))
    grad = param.grad
    column = torch.zeros(4, 4).t()
    source, buffer, cupy = np.zeros((3, 3)), bytearray(4), FakeCuPy(np.zeros(3))
    good = [param, torch.nn.Parameter(torch.zeros(2)), column, source, OldDLPack(np.zeros(2)), buffer]
    bad = [*good, torch.eye(3).to_sparse(), None]
    watched = [param, grad, column, source, buffer, cupy, *good, *bad, type(cupy), OldDLPack, np.ndarray]

    def calls(count):
        for _ in range(count):
            describe(good).torch_tensors()
            describe([cupy])
            for refused in (bad, [good[3], good[3]], [cupy, source], [HandMade]):
                with pytest.raises((TypeError, LayoutError)):
                    describe(refused)

    calls(200)
    gc.collect()
    counts, before = [sys.getrefcount(x) for x in watched], resident_bytes()
    calls(500)
    for _ in range(10_000):
        describe(good).key  # noqa: B018
    gc.collect()
    assert [sys.getrefcount(x) for x in watched] == counts
    assert resident_bytes() - before < 4 << 20


def test_threads():
    import threading

    tensors = [torch.zeros(4, 4) for _ in range(50)]
    expected, failures = describe(tensors).key, []

    def work():
        for _ in range(300):
            if describe(tensors).key != expected:
                failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
