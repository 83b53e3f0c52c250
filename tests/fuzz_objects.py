"""Objects that lie about their memory, and calls with any numbers: refused in the right words, never a crash.

Only what an object says is random. The tables that say it are memory of their own: nobody can check a wild pointer to those.
"""

import array
import ctypes

import numpy as np
from border_arrays import FakeCuPy, HandMade, OldDLPack, OnlyDLPack, describe

from gradpack import _C
from gradpack.dtypes import DTYPES

# What describe() may answer with. A LayoutError is a ValueError.
REFUSALS = (TypeError, BufferError, ValueError)

_NUMBERS = [0, 1, 2, 3, 4, 7, 8, 63, 64, 65, 2**31 - 1, 2**31, 2**32, 2**40, 2**61, 2**62, 2**63 - 1]
_PLAIN = [None, True, 3, -1, 2.5, "abc", "", b"abc", (), (1,), [], [1.0], {}, object(), int, np.float32(1), float("nan"), 2**80]


def any_int(rng):
    number = rng.choice(_NUMBERS) if rng.random() < 0.7 else rng.getrandbits(rng.randrange(1, 64))
    return min(max(number + rng.randrange(-1, 2), 0), 2**63 - 1) * rng.choice([1, 1, 1, -1]) - (rng.random() < 0.02)


def mostly(rng, usual, *others):
    return usual if rng.random() < 0.92 else rng.choice(others)


def clipped(number):
    return min(max(number, -(2**63)), 2**63 - 1)


def extents(rng):
    count = mostly(rng, rng.randrange(5), 0, 1, 63, 64, 65, 200)
    sizes = [mostly(rng, rng.randrange(4), any_int(rng)) for _ in range(count)]
    strides = [mostly(rng, rng.randrange(-9, 10), any_int(rng)) for _ in range(count)]
    return sizes, mostly(rng, strides, None)


# ---- DLPack ----------------------------------------------------------------------------------------------------------------


class AnyCapsule(HandMade):
    """A HandMade whose tensor has been tampered with, in a capsule of any name."""

    name = b"dltensor_versioned"

    def __dlpack__(self, **options):
        capsule = super().__dlpack__(**options)
        if self.name != b"dltensor_versioned":
            self.given -= 1
            rename = ctypes.pythonapi.PyCapsule_SetName
            rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
            rename(capsule, self.name)
        return capsule


class Answers:
    """Has __dlpack__, of a kind: what it does with a call is up to the test."""

    def __init__(self, answer):
        self.answer = answer

    def __dlpack__(self, *_arguments, **_options):
        if isinstance(self.answer, type) and issubclass(self.answer, BaseException):
            raise self.answer("no")
        return self.answer


def hand_made(rng):
    shape, strides = extents(rng)
    code, bits, lanes = (
        rng.choice([*range(7), 2, 2, 2, rng.randrange(20)]),
        mostly(rng, rng.choice([8, 16, 32, 64]), *range(256)),
        mostly(rng, 1, 0, 2, 65535),
    )
    device = mostly(rng, 1, *range(-1, 20)), mostly(rng, 0, -1, 1, 2**31 - 1, -(2**31))
    made = AnyCapsule(
        shape, strides, code, bits, lanes, device, mostly(rng, 0, rng.randrange(8)), mostly(rng, 1, 0, 2, 2**32 - 1)
    )
    tensor = made.managed.tensor
    tensor.byte_offset = mostly(rng, 0, 4, 3, any_int(rng) % 2**64)
    tensor.data = mostly(rng, made.memory.ctypes.data, 0, any_int(rng) % 2**64)
    tensor.ndim = mostly(rng, len(shape), -1, 65, 2**31 - 1, -(2**31)) if len(shape) < 65 else len(shape)
    if rng.random() < 0.02:
        tensor.shape = None
    made.name = mostly(rng, made.name, b"used_dltensor_versioned", b"other", b"", None)
    return made


def strange_dlpack(rng):
    used = HandMade().__dlpack__()
    answers = [*_PLAIN, used, TypeError, ValueError, RuntimeError, BufferError, AttributeError, OverflowError]
    made = Answers(rng.choice(answers))
    if rng.random() < 0.2:
        made.__dlpack__ = rng.choice(_PLAIN)
    if rng.random() < 0.2:
        made.__class__ = type("WithApi", (Answers,), {"__dlpack_c_exchange_api__": rng.choice([*_PLAIN, used])})
    return made


# ---- the other protocols ---------------------------------------------------------------------------------------------------


def fake_cupy(rng):
    shape, strides = extents(rng)
    typestr = rng.choice("<|=>x") + rng.choice("biufcOSVm") + rng.choice(["1", "2", "4", "8", "16", "3", "", "-4", "4 "])
    made = FakeCuPy(np.zeros(4, np.float32))
    values = {
        "shape": mostly(rng, tuple(shape), shape, *_PLAIN),
        "typestr": mostly(rng, typestr, *_PLAIN),
        "data": mostly(rng, (any_int(rng), rng.random() < 0.1), (None, None), (1,), ("1", False), (-1, False), *_PLAIN),
        "strides": mostly(rng, strides and tuple(strides), *_PLAIN),
        "mask": rng.choice(_PLAIN),
        "version": rng.choice(_PLAIN),
    }
    made.overrides = {key: value for key, value in values.items() if rng.random() < 0.6}
    if rng.random() < 0.1:
        answer = rng.choice(_PLAIN)
        return type("Odd", (), {"__cuda_array_interface__": answer})()
    if rng.random() < 0.2:
        answer = mostly(rng, (2, any_int(rng)), *_PLAIN)
        made.__class__ = type("WithDevice", (FakeCuPy,), {"__dlpack_device__": lambda self: answer})
    return made


class Buffer(ctypes.Structure):  # Py_buffer
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    ]


def hand_made_buffer(rng):
    """A memoryview of whatever a buffer can be said to be, and what must stay alive as long as it."""
    shape, strides = extents(rng)
    shape = shape[:64]
    strides = (strides or [0] * 64)[: len(shape)]
    memory = np.zeros(64)
    format, item = rng.choice([(b"f", 4), (b"d", 8), (b"<i", 4), (b"@B", 1), (b"Zf", 8), (b"=e", 2), (None, 1)])
    format = mostly(rng, format, b"", b"Z", b"Zq", b"3f", b">f", b"!", b"@", b"T{f:x:}", b"f" * 99)
    item = mostly(rng, item, 0, 1, 2, 4, 8, 16, 3, -4, 2**62)
    strides = [clipped(stride * item) if abs(stride) < 10 else stride for stride in strides]
    ints = ctypes.c_ssize_t * max(len(shape), 1)
    tables = [ints(*numbers) for numbers in (shape, strides, [-1] * len(shape))]
    if rng.random() < 0.1:
        tables[2][0] = any_int(rng)
    address = mostly(rng, memory.ctypes.data, memory.ctypes.data + 1)
    suboffsets = tables[2] if rng.random() < 0.2 else None
    buffer = Buffer(address, None, 64, item, rng.random() < 0.1, len(shape), format, tables[0], tables[1], suboffsets, None)
    view = ctypes.pythonapi.PyMemoryView_FromBuffer
    view.restype, view.argtypes = ctypes.py_object, [ctypes.POINTER(Buffer)]
    return view(ctypes.byref(buffer)), (memory, tables, buffer)


def plain(rng):
    dtypes = ["f4", ">f4", "f4,i4", "O", "S3", "U2", "V5", "M8[s]", "g", "G", "?"]
    made = [np.zeros(rng.choice([(), 0, 3, (2, 2)]), rng.choice(dtypes)), array.array(rng.choice("bBdfu"), []), bytearray(3)]
    made += [OnlyDLPack(made[0]), OldDLPack(made[0]), memoryview(bytes(4)), memoryview(bytearray(8)).cast("d")[::-1]]
    made += [(ctypes.c_float * 3)(), (ctypes.c_char * 2)(), *_PLAIN]
    return rng.choice(made)


# ---- describe --------------------------------------------------------------------------------------------------------------


class Meddling:
    """Changes the list that it is described in."""

    def __init__(self, rng, objects):
        self.change = rng.choice(
            [objects.clear, objects.pop, lambda: objects.append(bytearray(1)), lambda: objects.__setitem__(0, 3)]
        )
        self.base = np.zeros(2)

    def __dlpack__(self, **options):
        self.change()
        return self.base.__dlpack__(**options)


def check_describe(rng):
    objects, kept = [], []
    for _ in range(rng.randrange(1, 5)):
        kind = rng.randrange(12)
        if kind < 5:
            objects.append(hand_made(rng))
        elif kind < 7:
            objects.append(fake_cupy(rng))
        elif kind < 9:
            made, tables = hand_made_buffer(rng)
            objects.append(made)
            kept.append(tables)
        else:
            objects.append(strange_dlpack(rng) if kind < 10 else plain(rng))
    if rng.random() < 0.05:
        objects.insert(rng.randrange(len(objects)), Meddling(rng, objects))
    producers = [made for made in objects if isinstance(made, HandMade)]
    protocol = mostly(rng, "auto", "exchange", "dlpack", "cuda_array_interface", "buffer", "", "x")
    names = rng.choice([None, [f"name{i}" for i in range(len(objects))]])
    names = mostly(rng, names, ["only one"], _PLAIN)
    try:
        arrays = describe(objects, names=names, protocol=protocol)
    except REFUSALS as error:
        assert "internal error" not in str(error) and "\n" not in str(error), error
    else:
        for i in range(len(arrays)):
            assert arrays.dtype(i) in DTYPES and len(arrays.order(i)) in (0, len(arrays.shape(i)))
        arrays.pack_logically(range(len(arrays)))
        assert len(arrays.key) == 16 and arrays.nbytes >= 0
        del arrays
    del objects
    assert [made.deleted for made in producers] == [made.given for made in producers], "capsules taken and not given back"


# ---- calls -----------------------------------------------------------------------------------------------------------------


def check_calls(rng):
    """A plan of huge streams takes any numbers; a plan of real arrays moves data only where all of them are right."""
    huge = rng.random() < 0.3
    counts = [abs(any_int(rng)) if huge else rng.randrange(9) for _ in range(rng.randrange(4))]
    arrays = [np.zeros(count if count < 9 else 3, np.float32) for count in counts]
    described = describe(arrays)
    dtype, wire = mostly(rng, "float32", *DTYPES), mostly(rng, "float32", *DTYPES)
    indices = [mostly(rng, i, any_int(rng)) for i in range(len(counts))]
    buffer, out = _C.Buffer(rng.randrange(200)), _C.Buffer(rng.randrange(200))
    numbers = [mostly(rng, rng.randrange(4), any_int(rng)) for _ in range(4)]
    rows = [mostly(rng, 4 * rng.randrange(9), any_int(rng)) for _ in range(rng.randrange(4))]
    divisor = mostly(rng, 1, any_int(rng))
    given = rng.choice(
        [None, None, np.array([rng.randrange(4)] * len(counts), "i4").tobytes(), rng.randbytes(4 * len(counts)), b"a"]
    )
    flags = rng.choice([None, _C.Nonfinite(len(counts)), _C.Nonfinite(1)])
    key = mostly(rng, described.key, rng.randbytes(16), b"")
    stream = mostly(rng, 0, any_int(rng))
    begin, end, offset, out_offset = numbers
    end = mostly(rng, end, sum(counts))
    operations = [
        lambda plan: plan.pack(described, stream, begin, end, buffer, offset, flags),
        lambda plan: plan.unpack(described, stream, begin, end, buffer, offset, divisor, given, flags),
        lambda plan: plan.reduce_unpack(described, stream, begin, end, buffer, rows, divisor, given, flags),
        lambda plan: plan.reduce(stream, begin, end, buffer, rows, out, out_offset, divisor, given),
        lambda plan: plan.check_finite(described, flags or _C.Nonfinite(len(counts))),
    ]
    try:
        plan = _C.Plan(key, mostly(rng, len(counts), any_int(rng)), [(dtype, wire, indices, counts)])
        rng.choice(operations)(plan)
    except REFUSALS as error:
        assert "internal error" not in str(error), error
    except RuntimeError as error:  # bool has no sums and an integer no mean: the callers know
        assert "found bool" in str(error) or "integers have no mean" in str(error), error


def check(rng):
    (check_describe if rng.random() < 0.7 else check_calls)(rng)
