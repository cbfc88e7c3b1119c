# The environment of all targets is .venv, made on first use and again whenever its inputs change.

PYTHON ?= python3
# Processes that run tests side by side. Three keep two cores busy: tests wait for processes of their own.
WORKERS ?= 3
# The versions that are installed, and what pip is told about torch alone, such as the index of builds without CUDA.
CONSTRAINTS ?= constraints.txt
TORCH_OPTIONS ?=
VENV := .venv
BIN := $(VENV)/bin
# What fails comes last, and is not lost among hundreds of warnings that tests provoke.
PYTEST := $(BIN)/python -m pytest -q --disable-warnings
STAMP := $(VENV)/.stamp
DOCS_STAMP := $(VENV)/.stamp-docs
BENCHMARKS := overhead step_cost interpreter_lock cpu_throughput bubble partitioner transfers bytes_moved optimizer staleness ranks
# Of `make gpu`, in the order in which they run.
GPU_STAGES := facts tests late full lora compiled

# Compiled modules are kept, whatever the environment says: pytest rewrites the assertions of those that it finds none
# of, for each worker and each run anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv test test-copies test-simulated test-accelerator test-network test-kills test-random test-pytorch-lightning test-projects test-stress package demo lint format docs bench gpu coverage clean $(BENCHMARKS:%=bench-%) $(GPU_STAGES:%=gpu-%)

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP)  ## Make the environment (PYTHON=... picks the interpreter, at least 3.10)

# torch comes first and alone, at its exact version: what else is installed must take the build that is there.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "'$(PYTHON)' is not Python 3.10 or later: choose another with 'make PYTHON=/path/to/python ...'" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) $(TORCH_OPTIONS) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[test]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@

test: $(STAMP)  ## Run the tests (ARGS='-k name' passes options to pytest, WORKERS=0 runs them in one process)
	$(PYTEST) -n $(WORKERS) --dist loadfile $(ARGS)

test-copies: $(STAMP)  ## Run the parity tests on devices with copies of their own, made by threads
	$(PYTEST) -n $(WORKERS) --dist loadfile tests/parity --devices=copies $(ARGS)

ON_ACCELERATOR := $(PYTEST) -n $(WORKERS) --dist loadfile --accelerator

# The tests of places are about what only a device that is not the host shows.
test-simulated: $(STAMP)  ## Run the tests of devices on simulated GPUs (skipped without a C++ compiler)
	$(ON_ACCELERATOR) tests/accelerator --ignore=tests/accelerator/simulation $(ARGS)
	$(ON_ACCELERATOR) tests/parity/test_parity_places.py --devices=accelerator $(ARGS)

test-accelerator: test-simulated  ## Also run the tests of the simulation, and the parity tests on it
	$(ON_ACCELERATOR) tests/accelerator/simulation $(ARGS)
	$(ON_ACCELERATOR) tests/parity --devices=accelerator $(ARGS)

test-network: $(STAMP)  ## Run the tests of ranks on two hosts, which are network namespaces (as root, on Linux)
	$(PYTEST) --network tests/ranks/test_ranks_network.py $(ARGS)

test-kills: $(STAMP)  ## Kill ranks at fifty moments of a training
	$(PYTEST) -n $(WORKERS) --kills 50 tests/ranks/test_ranks_killed.py $(ARGS)

test-random: $(STAMP)  ## Compare a thousand random models with plain Lightning
	$(PYTEST) -n $(WORKERS) --dist worksteal --random 1000 tests/parity/test_parity_random.py $(ARGS)

# An environment of its own, without the package lightning. It is kept beside the copy of the tests.
RENAMED := build/pytorch-lightning
RENAMED_PYTHON := $(CURDIR)/$(RENAMED)/venv/bin/python

test-pytorch-lightning: $(STAMP)  ## Run tests with the package pytorch_lightning alone, in an environment of its own
	rm -rf $(RENAMED)/copy
	test -x $(RENAMED_PYTHON) || $(PYTHON) -m venv $(RENAMED)/venv
	$(RENAMED_PYTHON) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) $(TORCH_OPTIONS) torch
	$(RENAMED_PYTHON) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) pytorch-lightning \
	    'jsonargparse[signatures]' hypothesis matplotlib peft pytest pytest-timeout pytest-xdist rich setuptools \
	    tensorboard transformers
	$(BIN)/python -m tests.package.renamed $(RENAMED)/copy
	cd $(RENAMED)/copy && PYTHONPATH=. $(RENAMED_PYTHON) -m pytest -q --disable-warnings -n $(WORKERS) --dist loadfile \
	    tests/parity tests/integration tests/compatibility $(ARGS)

test-stress: $(STAMP)  ## Run the tests while other processes keep all cores busy; lists what fails
	@trap 'kill $$busy' EXIT; \
	for core in $$(seq $$(getconf _NPROCESSORS_ONLN)); do (while :; do :; done) & busy="$$busy $$!"; done; \
	$(PYTEST) -n $(WORKERS) --dist loadfile $(ARGS)

test-projects: $(STAMP)  ## Run public projects, plain and with RoundPipe, into docs/reference/projects.md (ARGS='darts' picks)
	$(BIN)/python -m tests.real_projects $(ARGS)

package: $(STAMP)  ## Build sdist and wheel into dist/, and test what they hold and that they work when installed
	rm -rf dist
	$(BIN)/python -m tests.package.builds dist
	$(PYTEST) tests/package $(ARGS)

demo: $(STAMP)  ## Train a small language model that writes Python, on virtual devices, in about a minute
	$(BIN)/python examples/demo.py $(ARGS)

lint: $(STAMP)  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## Format the sources and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS_STAMP)  ## Build the documentation into site/
	$(BIN)/mkdocs build --strict

bench: $(BENCHMARKS:%=bench-%)  ## Run the benchmarks into docs/measurements/

# One after the other, also under make -j: side by side they would measure each other.
.NOTPARALLEL:
$(BENCHMARKS:%=bench-%): bench-%: $(STAMP)
	@mkdir -p docs/measurements
	$(BIN)/python -m benchmarks.$* $(ARGS) > docs/measurements/$*.json.part
	@mv docs/measurements/$*.json.part docs/measurements/$*.json
	@cat docs/measurements/$*.json

gpu: $(STAMP)  ## Test and measure on a GPU, at most 9 minutes a stage, into docs/measurements/gpu/
	$(BIN)/python -m benchmarks.gpu $(ARGS)

$(GPU_STAGES:%=gpu-%): gpu-%: $(STAMP)
	$(BIN)/python -m benchmarks.gpu $* $(ARGS)

# What knows nothing of Lightning.
COVERED := planning engine autograd usercode optimizer weights devices common

coverage: $(STAMP)  ## Run the tests; all below the integration with Lightning must be covered to 90 percent
	$(PYTEST) $(COVERED:%=--cov=lightning_roundpipe/%) --cov-report= $(ARGS)
	$(MAKE) test-simulated ARGS='$(COVERED:%=--cov=lightning_roundpipe/%) --cov-append --cov-report='
	$(BIN)/python -m coverage report --skip-covered --fail-under=90

clean:  ## Remove the environment and everything that was built
	rm -rf $(VENV) build dist site htmlcov .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
