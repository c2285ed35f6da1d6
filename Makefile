# `make demo` and `make test` do all set-up; a machine needs only Python 3.11 or newer, a compiler and make.
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
# One thread a process: tests run side by side. Compiled modules are kept even where an image says not to: each of the
# many processes that tests start would compile the package again, and pytest would rewrite all asserts in every run.
TEST_ENV := OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 PYTHONDONTWRITEBYTECODE=

.PHONY: help demo test lint types docs check check-fast clean
.DEFAULT_GOAL := help

help:
	@echo "make demo        install, then go the whole way on synthetic data"
	@echo "make test        install, then run linter, type checker, documents and tests"
	@echo "make check-fast  install, then run the tests that take seconds"

$(VENV)/train.stamp: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[train]'
	touch $@

$(VENV)/dev.stamp: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(VENV)/train.stamp
	$(BIN)/recap demo

# The type checker has one core for a minute and a half, so the tests begin beside it.
test: lint docs
	$(MAKE) --no-print-directory -j 2 types check

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/mypy

docs: $(VENV)/dev.stamp
	$(BIN)/mkdocs build --quiet --strict --site-dir $(VENV)/site

check: $(VENV)/dev.stamp
	$(TEST_ENV) $(BIN)/python -m pytest -q -n 2 --dist worksteal

check-fast: $(VENV)/dev.stamp
	$(TEST_ENV) $(BIN)/python -m pytest -q -n 2 --dist worksteal -m 'not slow'

clean:
	rm -rf $(VENV) recap-demo recap-demo-full .mypy_cache .ruff_cache .hypothesis
