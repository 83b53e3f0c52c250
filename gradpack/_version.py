"""The version, said once: pyproject.toml and CMakeLists.txt read this file."""

__version__ = "0.1.0"
