# Every target sets up what it needs: on a fresh clone any of them can be the first command.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export PYTHON

.PHONY: help setup demo test test-targets test-tpu test-gpu test-interop harness random kernels combinations pipelines mutants fuzz recipes recipes-full kills lint format types types-planted picture docs notebook bench bench-here bench-targets clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

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

# The plugins for TPUs and for GPUs share no process: each in an environment of its own. So is what builds the pages.
TARGETS := .venv-targets
GPUS := .venv-gpus
# PyTorch and what is made of it, which nothing else here needs.
INTEROP := .venv-interop
DOCS := .venv-docs
HERE := call_overhead emergence plan_time real_time recompute

$(TARGETS)/ready: EXTRA := tpu
$(GPUS)/ready: EXTRA := gpu
$(DOCS)/ready: EXTRA := docs
$(TARGETS)/ready $(GPUS)/ready $(DOCS)/ready: pyproject.toml constraints.txt
	@python=$$(.ci/find-python) && \
	"$$python" -m venv --clear $(@D) && \
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools && \
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--no-build-isolation -e '.[test,$(EXTRA)]' && \
	touch $@

# PyTorch asks for a cuDNN of its own, which is not what compiles for GPUs here.
$(INTEROP)/ready: pyproject.toml constraints.txt
	@python=$$(.ci/find-python) && \
	"$$python" -m venv --clear $(@D) && \
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools && \
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c <(grep -v ^nvidia- constraints.txt) \
		--no-build-isolation -e '.[test,interop]' && \
	touch $@

test-targets: test-tpu test-gpu ## compile for TPUs and GPUs, which need not be here, and read what comes of it

test-tpu: $(TARGETS)/ready ## the same for TPUs alone
	$(TARGETS)/bin/python -m pytest tests/targets/test_tpu.py tests/machine/test_target.py

test-gpu: $(GPUS)/ready ## the same for GPUs alone
	$(GPUS)/bin/python -m pytest tests/targets/test_gpu.py tests/machine/test_gpu_cluster.py

test-interop: $(INTEROP)/ready ## read and write models and adapters of transformers and PEFT: the same logits in both
	$(INTEROP)/bin/python -m pytest tests/interop -W ignore::FutureWarning

harness: $(READY) ## run the programs that JAX ships for its own tests sharded, and print a table by group
	$(BIN)/python -m tests.harness --workers 2

random: $(READY) ## run more random programs than the tests do: 2000 others, or AUTOSHARD_EXAMPLES and AUTOSHARD_SEED
	AUTOSHARD_EXAMPLES=$${AUTOSHARD_EXAMPLES:-2000} AUTOSHARD_SEED=$${AUTOSHARD_SEED:-1} \
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/test_random_programs.py

kernels: $(READY) ## run attention by interpreted TPU kernels, and rings, in 300 random shapes, masks and meshes, sharded
	AUTOSHARD_EXAMPLES=$${AUTOSHARD_EXAMPLES:-300} AUTOSHARD_SEED=$${AUTOSHARD_SEED:-1} \
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/rules/local_forms/test_attention_splash.py \
		tests/backend/rings/test_random_rings.py

combinations: $(READY) ## run every combination of model, mesh and strategy, and of other things that the tests take half of
	AUTOSHARD_COMBINATIONS=all $(BIN)/python -m pytest -n 2 --dist worksteal \
		tests/test_equivalence.py tests/rules/test_attention.py tests/rules/local_forms tests/passes/pad_uneven \
		tests/test_dtypes.py

pipelines: $(READY) ## train kinds of models as pipelines, by schedules on meshes, micro-batches and layers: any two of these together
	AUTOSHARD_COMBINATIONS=all $(BIN)/python -m pytest -n 2 --dist worksteal \
		tests/test_pipeline_forms.py tests/pipelining/test_executor.py

mutants: $(READY) ## plant faults one at a time, and see that the tests near each notice it
	$(BIN)/python -m tests.mutants

fuzz: $(READY) ## damage every kind of file that autoshard reads: each mutant is read, or refused by name
	$(BIN)/python -m tests.fuzz

recipes: $(READY) ## take a few steps of every recipe, sharded and by plain JAX on one device: the same numbers
	AUTOSHARD_RECIPES=all $(BIN)/python -m pytest -n 2 --dist worksteal tests/test_recipes.py

recipes-full: $(TARGETS)/ready $(GPUS)/ready ## compile every recipe at full size for a TPU slice and for H100s: an hour or two
	$(TARGETS)/bin/python -m benchmarks.recipes tpu
	JAX_PLATFORMS=cpu $(GPUS)/bin/python -m benchmarks.recipes gpu

kills: $(READY) ## kill training runs at random moments: each, resumed, ends as one that nothing disturbed
	$(BIN)/python -m benchmarks.kills
	$(BIN)/python -m benchmarks.kills_together

lint: $(READY) ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY) ## put style right where that is mechanical
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY) ## check types
	$(BIN)/pyright --pythonpath $(BIN)/python

types-planted: $(READY) ## plant a wrong type in a copy of every package: does the checker see each?
	$(BIN)/python -m tests.planted_types

picture: $(READY) ## draw anew the packages and their imports, docs/packages.svg, and the README's plan, docs/plan-memory.svg
	$(BIN)/python -m docs.packages
	$(BIN)/python -m docs.plan_picture

# Needs no network once its environment is there. What pages show is what their code printed while they were built.
docs: $(DOCS)/ready ## build the documentation, build/docs/index.html: every example runs, a warning is an error
	$(DOCS)/bin/python -m docs.made_pages
	$(DOCS)/bin/python -m sphinx -q -E -W --keep-going -b html docs build/docs
	$(DOCS)/bin/python -m pytest tests/docs

notebook: $(READY) ## make the notebooks that are pages of the documentation, and execute all in place
	$(BIN)/python -m docs.notebooks

bench: $(TARGETS)/ready $(GPUS)/ready ## autoshard beside sharding by hand, by the compilers for TPUs and GPUs: hours, then minutes
	$(TARGETS)/bin/python -m benchmarks.bench tpu --cache .targets-cache
	JAX_PLATFORMS=cpu $(GPUS)/bin/python -m benchmarks.bench gpu --cache .targets-cache

bench-here: $(READY) ## run the benchmarks that need no target
	@for name in $(HERE); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

bench-targets: $(TARGETS)/ready ## hold predicted memory and time against the TPU compiler's: hours, then minutes
	$(TARGETS)/bin/python -m benchmarks.memory_error --cache .targets-cache
	for chip in v5e v5p v6e; do $(TARGETS)/bin/python -m benchmarks.time_error $$chip --cache .targets-cache || exit 1; done
	$(TARGETS)/bin/python -m benchmarks.fits --cache .targets-cache

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) $(TARGETS) $(GPUS) $(DOCS) build dist docs/reference/made *.egg-info .pytest_cache .ruff_cache .hypothesis .coverage* htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
