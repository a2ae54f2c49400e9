# Everything a developer types. `make setup` is idempotent and every other target calls it.

.DEFAULT_GOAL := help
.SILENT:
.DELETE_ON_ERROR:
.PHONY: help setup serve test test-fast lint verify faults bench clean

# Where it is set, every process would compile torch and all else anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON     ?= $(shell command -v python3.11 || command -v python3)
TORCH      := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
TORCH_ARGS ?=# more arguments for installing torch, e.g. --index-url of the CPU builds
ARGS       ?=# arguments for `make serve` and for pytest
WORKERS    ?= 2# processes that `make test` runs tests in
VENV       := .venv
BIN        := $(VENV)/bin
STAMP      := $(VENV)/.setup-done
PIP        := $(BIN)/python -m pip --disable-pip-version-check -qq install --no-compile \
              --root-user-action=ignore
UV         := $(BIN)/uv pip install --quiet --system-certs --python $(BIN)/python
EXTRAS     := .[dev,nixl,ray,redis]
BENCHMARKS  = $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))
BESIDE      = $(wildcard benchmarks examples/*.py)

help: ## list the targets
	sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(STAMP) ## create .venv with everything that the code and its tests need

# torch first and alone: nothing installed later may choose another build of it. By pip, because
# its configuration may name where the builds for this machine are. uv does not read that, but takes
# a tenth of pip's time for all else; where it finds nothing, pip gets a try.
$(STAMP): pyproject.toml
	test -n "$(PYTHON)" || { echo "make setup: needs python3.11 or newer" >&2; exit 1; }
	test -x $(BIN)/python || { echo "Creating $(VENV)" && $(PYTHON) -m venv $(VENV); } || \
	    { rm -rf $(VENV); echo "make setup: on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	echo "Installing $(TORCH)"
	$(PIP) $(TORCH) $(TORCH_ARGS)
	echo "Installing kvrelay and its tools"
	$(PIP) 'uv>=0.13' && $(UV) -e '$(EXTRAS)' || $(PIP) -e '$(EXTRAS)'
	echo "Compiling the kernels for this CPU"
	$(BIN)/python -c 'from engine.kernels import CompiledKernels; CompiledKernels()' || \
	    echo "make setup: plain torch will compute, slowly" >&2
	touch $@

# exec: the server itself gets Ctrl-C and SIGTERM, with no shell in between.
serve: setup ## serve a model on this machine (ARGS="--port 8000 ...")
	exec $(BIN)/kvrelay serve $(ARGS)

test: lint ## lint, then every test
	$(BIN)/pytest -n $(WORKERS) $(ARGS)

test-fast: setup ## the tests that need no real model and no patience
	$(BIN)/pytest -n $(WORKERS) -m "not real_model and not slow" $(ARGS)

lint: setup ## ruff and mypy
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy --no-error-summary
	$(if $(BESIDE),$(BIN)/mypy --no-error-summary $(BESIDE))

verify: setup ## the reference test: the tokens of every combination against an independent model
	$(BIN)/pytest tests/e2e/test_reference.py --all-combinations $(ARGS)

faults: setup ## every state of a hand-off × every fault × every transport, a long soak, and chaos
	$(BIN)/pytest tests/faults tests/ray tests/multihost \
	    tests/kv_transfer/test_handoff*chaos.py --all-faults \
	    --hypothesis-profile=patient $(ARGS)

bench: setup ## run every benchmark; each prints its result as JSON
	set -e; for benchmark in $(BENCHMARKS); do $(BIN)/python $$benchmark --json; done

clean: ## remove .venv, caches and build products
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
