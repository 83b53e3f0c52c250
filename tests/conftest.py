"""What every test shares, and which of them `make sanitize` runs.

Hypothesis is derandomised, so a failure repeats, and has no deadline, since machines are shared.
"""

import ast
import os
import sys
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("gradpack", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("gradpack")


@pytest.fixture(params=["shared_memory", "process_group"])
def over(request, monkeypatch):
    """What the ranks of a test, which are all on this host, go by."""
    if request.param == "process_group":
        monkeypatch.setenv("GRADPACK_TRANSPORT", "process_group")
    return request.param


SANITIZED = os.environ.get("GRADPACK_TEST_SANITIZED") == "1"


def imports(path):
    """The modules that a file imports, wherever in it, with those that the ones beside it import."""
    found, files = set(), [path]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {node.module or ""}
            else:
                continue
            beside = {file.parent / f"{name}.py" for name in names - found}
            files += sorted(helper for helper in beside if helper.is_file())
            found |= names
    return found


def needs_torch(path):
    # run_ranks of gradpack.testing starts processes that import torch.
    return any(name.split(".")[0] == "torch" or name == "gradpack.testing" for name in imports(path))


if SANITIZED:
    # torch was built without sanitizers and is not ours to judge. A test that gets to it by a way not seen here fails.
    sys.modules["torch"] = None

    def pytest_ignore_collect(collection_path):
        return True if collection_path.suffix == ".py" and needs_torch(collection_path) else None

    def pytest_collection_modifyitems(items):
        items[:] = [item for item in items if not item.get_closest_marker("shipped")]

    def pytest_sessionstart():
        from gradpack import _C

        if b"__asan_init" not in Path(_C.__file__).read_bytes():
            raise pytest.UsageError(f"{_C.__file__} was built without GRADPACK_SANITIZE")
