"""Objects of every kind but torch's for the tests of the border, and describe() with its usual arguments."""

import ctypes

import numpy as np
import pytest

from gradpack import _C


def describe(objects, names=None, parameters="grad", protocol="auto"):
    return _C.describe(objects, "allreduce", "grads", names, parameters, protocol)


def assert_refused(objects, exception, fact):
    """That describe() refuses objects[1] with and without a name, in one line that states the fact."""
    for names, label in ((["first", "layer.weight"], "grads[1] 'layer.weight'"), (None, "grads[1]")):
        with pytest.raises(exception) as raised:
            describe(objects, names=names)
        assert str(raised.value).startswith(f"allreduce: {label}: ")
        assert fact in str(raised.value)
        assert "\n" not in str(raised.value)


def order(obj):
    return describe([obj]).order(0)


def key(*objects, **options):
    return describe(list(objects), **options).key


class FakeCuPy:
    """Speaks the GPU protocol over host memory."""

    def __init__(self, base, **overrides):
        self.base = base
        self.overrides = overrides

    @property
    def __cuda_array_interface__(self):
        interface = {k: self.base.__array_interface__[k] for k in ("shape", "typestr", "data", "strides")}
        return {**interface, "version": 3, **self.overrides}


class OnlyDLPack:
    def __init__(self, base):
        self.base = base

    def __dlpack__(self, *, max_version=None):
        return self.base.__dlpack__(max_version=max_version)


class OldDLPack:
    """From before DLPack 1.0: knows no max_version, returns the unversioned capsule."""

    def __init__(self, base):
        self.base = base

    def __dlpack__(self):
        return self.base.__dlpack__()


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


class HandMade:
    """A DLPack producer that says what the test wants; `given` and `deleted` count capsules and the deleter's calls."""

    def __init__(
        self, shape=(4,), strides=None, code=2, bits=32, lanes=1, device=(1, 0), flags=0, major=1, offset=0, address=None
    ):
        self.memory = np.zeros(64, np.float64)
        self.given = self.deleted = 0
        ints = ctypes.c_int64 * max(len(shape), 1)
        self.extents = ints(*shape), ints(*strides) if strides is not None else None
        deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.delete)
        tensor = DLTensor(
            self.memory.ctypes.data if address is None else address,
            *device,
            len(shape),
            code,
            bits,
            lanes,
            self.extents[0],
            self.extents[1],
            offset,
        )
        self.managed = Versioned(major, 0, None, deleter, flags, tensor)

    def delete(self, _managed):
        self.deleted += 1

    def __dlpack__(self, **_options):
        self.given += 1
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), b"dltensor_versioned", None)


def read_only(base):
    base.flags.writeable = False
    return base
