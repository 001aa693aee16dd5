# make bench      install, and race the implementations of one op        (OP=lightning_decode ARGS='batch=1,8')
# make test       install, and run what CI runs: ruff, mypy, pytest
# make benchmark  install, and run the races under pytest-benchmark      (OP=… ARGS='--benchmark-compare')
# make format     let ruff rewrite the files
# PYTHON=python3.12 chooses the interpreter for .venv; by default the first python3 from 3.10 to 3.13.

SHELL := /bin/bash
KIND := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
STAMP := .venv/.installed-$(KIND)
OP ?= lightning_decode
ARGS ?=

.PHONY: bench test benchmark install lint format clean

bench: install
	.venv/bin/workbench bench op=$(OP) $(ARGS)

test: install lint
	.venv/bin/python -m pytest -n 2 -p no:benchmark $(ARGS)

lint: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

benchmark: install
	.venv/bin/python -m pytest tests/benchmarks -o python_files='bench_*.py' -o python_functions='bench_*' --op=$(OP) \
		--benchmark-autosave $(ARGS)

format: install
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

install: $(STAMP)

$(STAMP): pyproject.toml install.sh
	PYTHON='$(PYTHON)' ./install.sh $(KIND)
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
