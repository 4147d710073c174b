# Every target sets up what it needs: on a fresh clone any of them can be the first command.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export PYTHON

.PHONY: help setup demo test test-targets harness random lint format types notebook bench clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: $(READY) ## make .venv with the pinned versions

# The stamp comes last, so a set-up that was interrupted starts over.
$(READY): pyproject.toml constraints.txt
	@python=$$(.ci/find-python) && \
	echo "Setting up $(VENV) with $$python: the first time takes some minutes." && \
	"$$python" -m venv --clear $(VENV) && \
	$(PIP) setuptools && \
	$(PIP) --no-build-isolation -e '.[dev]' && \
	touch $@

demo: $(READY) ## train a small language model on a sharded mesh, stop, resume on another mesh
	$(BIN)/autoshard train configs/train/demo.yaml

test: $(READY) ## run the tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

# What its plugins for accelerators share no process with: in an environment of their own.
TARGETS := .venv-targets

$(TARGETS)/ready: pyproject.toml constraints.txt
	@python=$$(.ci/find-python) && \
	"$$python" -m venv --clear $(TARGETS) && \
	$(TARGETS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools && \
	$(TARGETS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--no-build-isolation -e '.[tpu]' pytest hypothesis && \
	touch $@

test-targets: $(TARGETS)/ready ## compile for TPUs, which need not be here, and read what their compiler says
	$(TARGETS)/bin/python -m pytest tests/targets tests/test_target.py

harness: $(READY) ## run the programs that JAX ships for its own tests sharded, and print a table by group
	$(BIN)/python -m tests.harness --workers 2

random: $(READY) ## run more random programs than the tests do: 2000 others, or AUTOSHARD_EXAMPLES and AUTOSHARD_SEED
	AUTOSHARD_EXAMPLES=$${AUTOSHARD_EXAMPLES:-2000} AUTOSHARD_SEED=$${AUTOSHARD_SEED:-1} \
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/test_random_programs.py

lint: $(READY) ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY) ## put style right where that is mechanical
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY) ## check types
	$(BIN)/pyright --pythonpath $(BIN)/python

notebook: $(READY) ## execute the notebooks in place
	$(BIN)/jupyter-execute --inplace notebooks/*.ipynb

bench: $(READY) ## run the benchmarks
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) $(TARGETS) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .coverage* htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
