"""The border: torch tensors and parameters of every kind, accepted and refused."""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from border_arrays import FakeCuPy, HandMade, OldDLPack, assert_refused, describe, key, order
from border_tensors import Lying, NoCalls, SimpleSubclass, fake_tensor, with_grad, wrapper_tensor
from test_border import NUMPY_DTYPES

from gradpack.errors import LayoutError

# Torch announces prototypes and deprecations of the kinds that are refused here.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.T, lambda x: x[:, ::2]])
def test_tensors_say_what_their_arrays_say(dtype, view):
    source = view(np.zeros((4, 6), dtype))
    wanted = describe([source])
    for protocol in ("exchange", "dlpack", "auto"):
        tensor = torch.from_numpy(source)
        arrays = describe([tensor], protocol=protocol)
        assert (arrays.key, arrays.shape(0), arrays.dtype(0)) == (wanted.key, source.shape, dtype)
        assert (arrays.order(0), arrays.nbytes, arrays.device) == (wanted.order(0), source.nbytes, ("cpu", 0))
        assert [id(x) for x in arrays.torch_tensors()] == [id(tensor)]


def test_tensors_among_other_arrays():
    tensors = [torch.zeros(2, 3), torch.empty(2, 0)]
    arrays = describe([np.zeros(4), tensors[0], bytearray(5), tensors[1], HandMade()])
    assert [arrays.shape(i) for i in range(len(arrays))] == [(4,), (2, 3), (5,), (2, 0), (4,)]
    assert [id(x) for x in arrays.torch_tensors()] == [id(x) for x in tensors]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex32", "uint16", "int8", "uint8", "bool"])
def test_torch_dtypes(dtype):
    tensor = torch.zeros(3, dtype=getattr(torch, dtype))
    for protocol in ("exchange", "dlpack", "auto"):
        arrays = describe([tensor], protocol=protocol)
        assert arrays.dtype(0) == dtype
        assert arrays.torch_tensors()[0] is tensor


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


def test_without_torch():
    code = (
        "import sys, array; from gradpack import _C\n"
        "d = lambda x: _C.describe([x], 'op', 'arg', None, 'grad', 'auto')\n"
        "d(array.array('f', [1])); assert 'torch' not in sys.modules\n"
        "import torch; p = torch.nn.Parameter(torch.zeros(2)); assert d(p).num_absent == 1\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0


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


def test_many_tensor_types():
    tensors = [torch.zeros(1).as_subclass(type(f"Tensor{i}", (torch.Tensor,), {})) for i in range(40)]
    assert len(describe(tensors)) == 40


def test_orders_and_keys_of_channels_last():
    image = torch.zeros(2, 3, 4, 5)
    channels_last = image.to(memory_format=torch.channels_last)
    assert order(image) == order(torch.zeros(2, 1, 4, 5).to(memory_format=torch.channels_last)) == ()
    assert order(channels_last) == (0, 2, 3, 1)
    assert key(image) == key(torch.ones(2, 3, 4, 9)[..., :5]) == key(np.zeros((2, 3, 4, 5), np.float32))
    assert key(channels_last) == key(torch.zeros(2, 9, 4, 5).to(memory_format=torch.channels_last)[:, 2:5]) != key(image)


def test_shared_gradients_overlap():
    base = torch.zeros(4, 6)
    shared = torch.nn.Parameter(base)
    shared.grad = torch.zeros_like(base)
    with pytest.raises(LayoutError, match="the same memory"):
        describe([shared, shared])
    shared.grad = None
    assert describe([shared, shared]).num_absent == 2  # nothing to overlap yet


def test_described_gradients_stay_alive():
    param = with_grad(torch.nn.Parameter(torch.zeros(3)), torch.ones(3))
    arrays = describe([param])
    (grad,) = arrays.torch_tensors()
    param.grad = None
    assert sys.getrefcount(grad) == 3
    del arrays
    assert sys.getrefcount(grad) == 2


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


# ---- refusals --------------------------------------------------------------------------------------------------------------

REFUSED = {
    "leaf": (lambda: torch.zeros(3, requires_grad=True), ValueError, "pass its .grad"),
    "sparse": (lambda: torch.eye(3).to_sparse(), TypeError, "torch.sparse_coo"),
    "sparse csr": (lambda: torch.eye(3).to_sparse_csr(), TypeError, "torch.sparse_csr"),
    "sparse gradient": (
        lambda: with_grad(torch.nn.Parameter(torch.zeros(3, 3)), torch.eye(3).to_sparse()),
        TypeError,
        "torch.sparse_coo",
    ),
    "mkldnn": (lambda: torch.eye(3).to_mkldnn(), TypeError, "torch._mkldnn"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.quint8),
        TypeError,
        "quantized tensor (torch.quint8)",
    ),
    "meta": (lambda: torch.zeros(3, device="meta"), TypeError, "meta tensor"),
    "absent meta": (lambda: torch.nn.Parameter(torch.zeros(3, device="meta")), TypeError, "meta tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), TypeError, "nested tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        TypeError,
        "nested tensor (torch.jagged)",
    ),
    "negated": (lambda: torch._neg_view(torch.zeros(3)), BufferError, ".resolve_neg()"),
    "negated, detached": (lambda: torch._neg_view(torch.zeros(3)).detach(), BufferError, ".resolve_neg()"),
    "negated gradient": (
        lambda: with_grad(torch.nn.Parameter(torch.zeros(3)), torch._neg_view(torch.ones(3)).detach()),
        BufferError,
        ".resolve_neg()",
    ),
    "imaginary part": (lambda: torch.zeros(3, dtype=torch.complex64).conj().imag.detach(), BufferError, ".resolve_neg()"),
    "negated complex": (lambda: torch._neg_view(torch.zeros(3, dtype=torch.complex64)), BufferError, ".resolve_neg()"),
    "conjugated": (lambda: torch.zeros(3, dtype=torch.complex64).conj(), BufferError, ".resolve_conj()"),
    "expanded": (lambda: torch.zeros(3).expand(2, 3), BufferError, "strides [0, 1]"),
    "float8": (lambda: torch.zeros(3).to(torch.float8_e4m3fn), TypeError, "float8_e4m3fn"),
    "float8_e5m2": (lambda: torch.zeros(3).to(torch.float8_e5m2), TypeError, "float8_e5m2 "),
    "uint4": (lambda: torch.zeros(3, dtype=torch.uint4), TypeError, "torch.uint4"),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, TypeError, "UninitializedParameter has no shape"),
    "fake tensor": (fake_tensor, TypeError, "FakeTensor without memory"),
    "wrapper subclass": (wrapper_tensor, TypeError, "TwoTensor without memory"),
    "absent wrapper": (lambda: torch.nn.Parameter(wrapper_tensor()), TypeError, "TwoTensor without memory"),
    "zero tensor": (lambda: torch._efficientzerotensor(3), TypeError, "Tensor without memory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    make, exception, fact = REFUSED[case]
    assert_refused([torch.zeros(2), make()], exception, fact)


def test_the_cause_is_kept():
    with pytest.raises(TypeError) as raised:
        describe([torch.eye(3).to_sparse()])
    assert isinstance(raised.value.__cause__, Exception)
