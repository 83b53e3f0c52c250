"""What the documentation shows runs, and says what is there."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gradpack
from gradpack import settings
from gradpack.testing import run_ranks

ROOT = Path(__file__).parents[1]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run_snippet(rank: int, world: int, index: int) -> None:
    import torch.distributed as dist

    dist.init_process_group = lambda *args, **options: None  # the rank has one already
    exec(compile(SNIPPETS[index], f"README.md snippet {index}", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_readme_snippets_run(index: int, world: int) -> None:
    run_ranks(run_snippet, world, index)


def test_tables_are_those_of_the_results() -> None:
    subprocess.run([sys.executable, ROOT / "benchmarks/tables.py", "--check"], check=True)


def test_readme_has_snippets_and_the_options_of_allreduce() -> None:
    assert len(SNIPPETS) == 2
    text = (ROOT / "README.md").read_text()
    named = set(inspect.signature(gradpack.allreduce).parameters) - {"grads", "scaling", "max_norm", "transport"}
    assert [name for name in named if f"`{name}=" not in text] == []


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), (page.name, target)


@pytest.mark.parametrize("name", [module.name for module in pkgutil.walk_packages(gradpack.__path__, "gradpack.")])
def test_docstring_examples_run(name: str) -> None:
    if name.endswith(("_C", "__main__")):
        return
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


@pytest.mark.parametrize("name", [name for name in gradpack.__all__ if name != "__version__"])
def test_every_public_name_is_documented(name: str) -> None:
    public = getattr(gradpack, name)
    assert inspect.getdoc(public)
    if not (inspect.isclass(public) and issubclass(public, gradpack.GradpackError)) or public is gradpack.GradpackError:
        assert "Example:" in (inspect.getdoc(public) or "")
    if inspect.isfunction(public):
        text = inspect.getdoc(public) or ""
        assert "Example:" in text and "Raises:" in text
        for parameter in inspect.signature(public).parameters:
            assert re.search(rf"^    {parameter}: ", text, re.MULTILINE), parameter


def test_report_names_versions_and_settings() -> None:
    text = subprocess.run([sys.executable, "-m", "gradpack"], capture_output=True, text=True, check=True).stdout
    for fact in (f"gradpack {gradpack.__version__}", "instruction set", "torch 2.", "CUDA", "GRADPACK_SLOT_BYTES", "(default)"):
        assert fact in text


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("GRADPACK_NUM_THREADS", "2 ", "wanted a whole number"),
        ("GRADPACK_NUM_THREADS", "2000", "wanted a number from 0 to 1024"),
        ("GRADPACK_SLOT_BYTES", "16M", "wanted a whole number"),
        ("GRADPACK_SLOT_BYTES", "0", "wanted a positive multiple of 65536"),
        ("GRADPACK_FULL_PATH", "yes", "wanted 0 or 1"),
        ("GRADPACK_ARRAY_PROTOCOL", "x", "wanted one of 'auto'"),
        ("GRADPACK_SIMD", "sse", "wanted one of ''"),
    ],
)
def test_settings_that_cannot_be_are_named(name: str, value: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"environment: {name}: found '{value}', {wanted}"):
        settings.get(name)
    done = subprocess.run([sys.executable, "-m", "gradpack"], capture_output=True, text=True)
    text = done.stdout
    assert done.returncode == 1
    assert f"{name} = '{value}' (not usable: environment: {name}: found '{value}', {wanted}" in text


def test_a_source_folder_without_its_extension_says_so(tmp_path: Path) -> None:
    shutil.copytree(Path(gradpack.__file__).parent, tmp_path / "gradpack", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # Without what is installed: an editable installation finds the extension of its own folder.
    python = [sys.executable, "-S"]
    done = subprocess.run([*python, "-m", "gradpack"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    message = f"import: gradpack: found {tmp_path / 'gradpack'}, a source folder without its extension, wanted an installed"
    assert f"not usable: {message}" in done.stdout
    program = "import gradpack\ngradpack.allreduce([])"
    done = subprocess.run([*python, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert f"gradpack.errors.BuildError: {message}" in done.stderr


def test_the_list_of_names_is_what_resolves() -> None:
    assert [name for name in gradpack.__all__ if not hasattr(gradpack, name)] == []
    assert set(gradpack.__all__) <= set(dir(gradpack))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = gradpack.nonsense  # type: ignore[attr-defined]
