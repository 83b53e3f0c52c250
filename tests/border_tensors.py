"""torch tensors of every kind for the tests of the border."""

import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor


class SimpleSubclass(torch.Tensor):
    pass


class Lying(torch.Tensor):
    """A subclass whose Python face is not to be trusted."""

    @property
    def requires_grad(self):
        return True

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("describe() must not call this")


class NoCalls(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError("describe() must not call this")


def fake_tensor():
    with FakeTensorMode():
        return torch.zeros(3)


def with_grad(param, grad):
    param.grad = grad
    return param


def wrapper_tensor():
    return TwoTensor(torch.zeros(3), torch.zeros(3))
