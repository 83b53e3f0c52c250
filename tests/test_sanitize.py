"""Which tests `make sanitize` runs: those that need no torch."""

from pathlib import Path

import pytest
from conftest import needs_torch

TESTS = Path(__file__).resolve().parent


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("import numpy\nfrom gradpack import _C", False),
        ("import torch", True),
        ("def f():\n    from torch import nn", True),
        ("import torch.distributed as dist", True),
        ("from gradpack.testing import run_ranks", True),
        ("import plain", False),
        ("from plain import x\nfrom helper import x", True),
    ],
)
def test_torch_is_found_wherever_it_is_imported(tmp_path, source, needs):
    (tmp_path / "plain.py").write_text("import os\nimport test_it\n")
    (tmp_path / "helper.py").write_text("import plain\nimport torch\n")
    (tmp_path / "test_it.py").write_text(source + "\n")
    assert needs_torch(tmp_path / "test_it.py") == needs


def test_the_tests_of_the_extension_are_among_them():
    wanted = {"test_border", "test_border_memory", "test_border_refusals", "test_fuzz", "test_kernel_refusals", "test_layout"}
    assert wanted <= {path.stem for path in TESTS.glob("test_*.py") if not needs_torch(path)}
