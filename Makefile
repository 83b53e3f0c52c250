# The two commands: `make demo` and `make test`. Both make .venv first; a second run installs and compiles only what changed.

PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
SANITIZED := build/sanitize
RACES := build/races
BIN := $(VENV)/bin
# Twice quiet: no warnings about how pip is set up here, but still the output of a build that fails.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
CPP_FILES := find csrc tests -path csrc/third_party -prune -o \( -name '*.h' -o -name '*.cc' -o -name '*.cu' \) -print0
CPP_SOURCES := $(shell find csrc -type f ! -name 'LICENSE*')
EXTENSION := $(wildcard gradpack/_C.*.so)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long lint types pytest sanitize races bench format clean distclean FORCE

help:
	@echo 'make demo       set up .venv and train a small model on two ranks (examples/digits.py)'
	@echo 'make test       set up .venv, then lint, types, pytest, sanitize and races'
	@echo 'make test-long  the test suite with its long matrices and all cases of the fuzzer'
	@echo 'make sanitize   the tests that need no torch, with AddressSanitizer and UndefinedBehaviorSanitizer'
	@echo 'make races      shared memory between threads, with ThreadSanitizer'
	@echo 'make bench      the benchmarks, one after the other'
	@echo 'make format     rewrite Python and C++ in the house style'
	@echo 'make clean      remove what was built; make distclean removes .venv too'
	@echo 'PYTHON=python3.12 picks the interpreter of a new .venv'

# Set-up: one stamp for each step, so that each is done again only when its inputs change.

setup: $(VENV)/.extension $(VENV)/.project

$(VENV)/bin/python:
	@echo '==> making $(VENV)'
	@$(PYTHON) -m venv $(VENV) || { echo 'make: $(PYTHON) -m venv failed: Python 3.10 or newer with venv is needed (Debian: apt install python3-venv)' >&2; exit 1; }

$(VENV)/.requirements: requirements-dev.txt | $(VENV)/bin/python
	@echo '==> installing requirements-dev.txt'
	@$(PIP) install -r requirements-dev.txt
	@touch $@

# Compiled before pip sees the project: that shows progress, and one line where there is no compiler.
$(VENV)/.extension: $(VENV)/.requirements setup.py gradpack/_version.py CMakeLists.txt $(CPP_SOURCES) $(if $(EXTENSION),,FORCE)
	@echo '==> building the extension'
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# The build tools are pinned and installed above, so no isolated build environment is needed.
$(VENV)/.project: $(VENV)/.requirements pyproject.toml setup.py gradpack/_version.py | $(VENV)/.extension
	@echo '==> installing gradpack (editable)'
	@$(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@

FORCE:

# Work.

demo: setup
	@$(BIN)/python examples/digits.py

test: lint types pytest sanitize races

test-long: export GRADPACK_TEST_LONG := 1
test-long: pytest

lint: setup
	@echo '==> lint'
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(CPP_FILES) | xargs -0 -r $(BIN)/clang-format --dry-run -Werror

types: setup
	@echo '==> types'
	@$(BIN)/mypy --no-error-summary

pytest: setup
	@echo '==> pytest'
	@$(BIN)/python -m pytest -q -n 2 --dist loadgroup $(PYTEST_ARGS)

# A build and a package of their own, so that the tree's extension stays what it is. Python's own leaks are by design, and its
# allocator would hide where a bytearray ends. A report goes to descriptor 2 and ends the process, so pytest may not capture that.
sanitize: $(VENV)/.requirements
	@echo '==> building the extension with sanitizers'
	@$(BIN)/cmake --log-level=WARNING -S . -B $(SANITIZED) -G Ninja -DGRADPACK_SANITIZE=ADDRESS -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
		-DPython_EXECUTABLE=$(abspath $(BIN))/python -Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)"
	@$(BIN)/cmake --build $(SANITIZED) -- --quiet
	@rm -rf $(SANITIZED)/site && mkdir -p $(SANITIZED)/site && cp -R gradpack $(SANITIZED)/site
	@rm -f $(SANITIZED)/site/gradpack/_C.*.so && cp $(SANITIZED)/_C.*.so $(SANITIZED)/site/gradpack
	@echo '==> pytest with sanitizers'
	@cd $(SANITIZED)/site && LD_PRELOAD="$$(cat ../preload.txt)" GRADPACK_TEST_SANITIZED=1 PYTHONPATH="$$PWD" PYTHONMALLOC=malloc \
		ASAN_OPTIONS=detect_leaks=0:handle_segv=2 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
		$(abspath $(BIN))/python -m pytest -q -n 2 --capture=sys -c $(CURDIR)/pyproject.toml $(CURDIR)/tests $(PYTEST_ARGS)

# The planted race has to be found: else the other program's silence would say nothing.
races: $(VENV)/.requirements
	@echo '==> building with ThreadSanitizer'
	@$(BIN)/cmake --log-level=WARNING -S . -B $(RACES) -G Ninja -DGRADPACK_SANITIZE=THREAD -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja
	@$(BIN)/cmake --build $(RACES) -- --quiet
	@echo '==> threads with ThreadSanitizer'
	@TSAN_OPTIONS=halt_on_error=1:exitcode=66 $(RACES)/shm_threads
	@TSAN_OPTIONS=halt_on_error=1:exitcode=66 $(RACES)/shm_threads_planted >$(RACES)/planted.log 2>&1; \
		if [ $$? -ne 66 ] || ! grep -q 'ThreadSanitizer: data race' $(RACES)/planted.log; then \
			echo 'make: the planted race was not found, see $(RACES)/planted.log' >&2; exit 1; fi

bench: setup
	@$(BIN)/python benchmarks/bench_border.py
	@$(BIN)/python benchmarks/bench_pack.py
	@$(BIN)/python benchmarks/bench_allreduce.py
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/bench_ways.py
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/bench_opening.py
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/bench_merge.py
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/bench_shm.py latency
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/bench_shm.py chunks

format: setup
	@$(BIN)/ruff check --quiet --fix . || true
	@$(BIN)/ruff format --quiet .
	@$(CPP_FILES) | xargs -0 -r $(BIN)/clang-format -i

clean:
	@rm -rf build dist *.egg-info gradpack/_C.*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV)
