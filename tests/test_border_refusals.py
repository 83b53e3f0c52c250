"""The border: what describe() refuses, and the words it finds for it."""

import array

import numpy as np
import pytest
from border_arrays import FakeCuPy, HandMade, OnlyDLPack, assert_refused, describe, read_only

from gradpack import _C
from gradpack.errors import LayoutError


def sizeless():
    made = HandMade()
    made.managed.tensor.shape = None
    return made


REFUSED = {
    "None": (lambda: None, TypeError, "None has no shape: pass the module or its parameters so that a missing gradient has one"),
    "int": (lambda: 3, TypeError, "int is no array"),
    "str": (lambda: "abc", TypeError, "str is no array"),
    "list": (lambda: [1.0], TypeError, "list is no array"),
    "bytes": (lambda: b"abc", BufferError, "read-only bytes"),
    "numpy read-only": (lambda: read_only(np.zeros(3)), BufferError, "read-only numpy.ndarray"),
    "numpy structured": (lambda: np.zeros(3, "f4,i4"), (BufferError, TypeError), "('f0', '<f4')"),
    "numpy byte-swapped": (lambda: np.zeros(3, ">f4"), (BufferError, TypeError), ">f4"),
    "numpy object": (lambda: np.zeros(3, object), (BufferError, TypeError), "dtype object"),
    "numpy broadcast": (lambda: np.lib.stride_tricks.as_strided(np.zeros(4), (3, 4), (0, 8)), BufferError, "[0, 1]"),
    "numpy self-overlap": (lambda: np.lib.stride_tricks.as_strided(np.zeros(9), (3, 3), (16, 8)), BufferError, "[2, 1]"),
    "numpy misaligned": (
        lambda: np.frombuffer(bytearray(17), np.uint8)[1:].view("f4"),
        BufferError,
        "not aligned to the 4 bytes",
    ),
    "unicode array": (lambda: array.array("u", "ab"), TypeError, "format 'w'"),
    "memoryview of chars": (lambda: memoryview(bytearray(3)).cast("c"), TypeError, "format 'c'"),
    "dlpack read-only": (lambda: HandMade(flags=1), BufferError, "read-only HandMade"),
    "dlpack copied": (lambda: HandMade(flags=2), BufferError, "HandMade gives out a copy"),
    "dlpack version": (lambda: HandMade(major=2), BufferError, "DLPack 2.0"),
    "dlpack device": (lambda: HandMade(device=(8, 0)), TypeError, "device type 8"),
    "dlpack float4": (lambda: HandMade(code=17, bits=4), TypeError, "float4_e2m1fn"),
    "dlpack float6": (lambda: HandMade(code=15, bits=6), TypeError, "float6_e2m3fn"),
    "dlpack lanes": (lambda: HandMade(lanes=4), TypeError, "float32x4"),
    "dlpack float128": (lambda: HandMade(bits=128), TypeError, "float128"),
    "dlpack unknown": (lambda: HandMade(code=99), TypeError, "type code 99"),
    "dlpack misaligned": (lambda: HandMade(offset=2), BufferError, "not aligned to the 4 bytes"),
    "dlpack negative": (lambda: HandMade(shape=(-1,)), BufferError, "negative size"),
    "dlpack huge": (lambda: HandMade(shape=(1 << 62, 4)), BufferError, "64 bits"),
    "dlpack huge bytes": (lambda: HandMade(shape=(1 << 62,)), BufferError, "64 bits"),
    "dlpack huge strides": (lambda: HandMade(shape=(3,), strides=(1 << 62,)), BufferError, "address space"),
    "dlpack huge flip": (lambda: HandMade(shape=(1 << 40,), strides=(-(1 << 20),)), BufferError, "address space"),
    "dlpack lowest stride": (lambda: HandMade(shape=(2,), strides=(-(1 << 63),)), BufferError, "address space"),
    "dlpack beyond": (lambda: HandMade(shape=(1 << 59,), bits=64, offset=3 << 62), BufferError, "address space"),
    "dlpack without sizes": (sizeless, BufferError, "gives no sizes for its 1 dimensions"),
    "dlpack dims": (lambda: HandMade(shape=(1,) * 65), BufferError, "65 dimensions"),
    "cuda structured": (lambda: FakeCuPy(np.zeros(3, "f4,i4")), TypeError, "typestr '|V8'"),
    "cuda byte-swapped": (lambda: FakeCuPy(np.zeros(3, ">f4")), TypeError, "typestr '>f4'"),
    "cuda read-only": (lambda: FakeCuPy(read_only(np.zeros(3))), BufferError, "read-only FakeCuPy"),
    "cuda masked": (lambda: FakeCuPy(np.zeros(3), mask=FakeCuPy(np.zeros(3))), BufferError, "masked FakeCuPy"),
    "cuda strides": (lambda: FakeCuPy(np.zeros(3), strides=(8, 8)), BufferError, "2 strides for 1"),
    "cuda fraction of an item": (lambda: FakeCuPy(np.zeros(3), strides=(12,)), BufferError, "stride of 12 bytes"),
    "cuda null": (lambda: FakeCuPy(np.zeros(3), data=(0, False)), TypeError, "null pointer for 3 elements"),
    "cuda malformed": (lambda: FakeCuPy(np.zeros(3), data=None), TypeError, "that does not describe its memory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    make, exception, fact = REFUSED[case]
    objects = [FakeCuPy(np.zeros(2)) if "cuda" in case else np.zeros(2), make()]
    assert_refused(objects, exception, fact)
    if case.startswith("dlpack"):
        assert objects[1].deleted == 2  # the capsule was taken, so its deleter is owed


@pytest.mark.parametrize(
    "protocol, lacking",
    [
        ("exchange", np.zeros(2)),
        ("dlpack", bytearray(2)),
        ("cuda_array_interface", array.array("f", [1])),
        ("buffer", OnlyDLPack(np.zeros(2))),
        ("exchange", None),
    ],
)
def test_forced_protocol_that_the_object_lacks(protocol, lacking):
    with pytest.raises(TypeError, match=rf"grads\[0\]: .*{type(lacking).__name__.removesuffix('Type')}"):
        describe([lacking], protocol=protocol)


@pytest.mark.parametrize(
    "make, fact",
    [
        (lambda: read_only(np.zeros(3)), "read-only"),
        (lambda: np.zeros(3, ">f4"), "byte-swapped"),
        (lambda: np.zeros(3, "f4,i4"), r"'T\{"),
        (lambda: np.zeros(3, "g"), "'g'"),
        (lambda: np.zeros(4, "f4,f8")["f1"], "stride of 12 bytes"),
    ],
)
def test_refused_buffers(make, fact):
    with pytest.raises((BufferError, TypeError), match=fact):
        describe([make()], protocol="buffer")


def test_causes_are_kept():
    causes = [(lambda: np.zeros(3, object), "dlpack"), (lambda: b"", "buffer")]
    for make, protocol in causes:
        with pytest.raises((TypeError, BufferError)) as raised:
            describe([make()], protocol=protocol)
        assert isinstance(raised.value.__cause__, Exception)

    class Interrupted:
        def __dlpack__(self, **_options):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        describe([Interrupted()])


def test_bad_options():
    for options in ({"protocol": "fast"}, {"parameters": "both"}, {"names": ["a", "b"]}):
        with pytest.raises(ValueError):
            describe([bytearray(1)], **options)
    with pytest.raises(TypeError):
        describe(3)


def test_one_device():
    with pytest.raises(LayoutError, match=r"grads\[1\] 'b': on cuda:0, but grads\[0\] 'a' is on cpu"):
        describe([np.zeros(2), FakeCuPy(np.zeros(2))], names=["a", "b"])
    with pytest.raises(LayoutError, match=r"grads\[2\] 'c': on cuda:1, but grads\[0\] 'a' is on cuda:0"):
        describe([HandMade(device=(2, 0)), HandMade(device=(13, 0)), HandMade(device=(2, 1))], names=["a", "b", "c"])
    assert describe([HandMade(device=(3, 0))]).device == ("cpu", 0)  # pinned
    assert describe([HandMade(device=(2, 5))]).device == ("cuda", 5)


def test_masked_arrays_are_refused():
    with pytest.raises(BufferError, match=r"masked .*MaskedArray, wanted plain memory"):
        describe([np.ma.masked_array(np.ones(3), [0, 1, 0])])


@pytest.mark.parametrize("index", [-1, -5])
def test_a_cuda_device_below_zero_is_not_the_cpu(index):
    array = FakeCuPy(np.zeros(3, np.float32))
    array.__class__ = type("Below", (FakeCuPy,), {"__dlpack_device__": lambda self: (2, index)})
    with pytest.raises(BufferError, match=f"on CUDA device {index}, wanted an index of 0 or more"):
        describe([array], protocol="cuda_array_interface")


@pytest.mark.parametrize("arguments", [(None, "auto"), ("grad", None)])
def test_none_is_no_string(arguments):
    with pytest.raises(TypeError):
        _C.describe([], "op", "arg", None, *arguments)
