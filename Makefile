# `make demo` and `make test` do all set-up; a machine needs only Python 3.11 or newer, a compiler and make.
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
# One thread a process: tests run side by side.
TEST_ENV := OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1

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

test: lint types docs check

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
	$(TEST_ENV) $(BIN)/python -m pytest -q -n 2 -m 'not slow'

clean:
	rm -rf $(VENV) recap-demo recap-demo-full .mypy_cache .ruff_cache .hypothesis
