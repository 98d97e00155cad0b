# The project's verbs. Each does its own set-up on a machine that has Python 3.11 or later and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Tests start some fifty processes: what Python has compiled once is kept, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all check cluster-test gpu-test bench generate clean

setup: $(READY)  ## install everything into .venv

$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (torch is large: some minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(READY)  ## plan the quickstart over unlike devices, run it, ask it something
	@$(BIN)/python -m strata_operator.demo

# A file stays in one worker: what its tests share, a running deployment say, is made once.
pytest = $(BIN)/python -m pytest -n $(or $(WORKERS),$(1)) --dist loadfile --no-loadscope-reorder

test: $(READY)  ## unit tests: no cluster, no GPU, no network; each law by its quickest cases
	@$(call pytest,3)

test-all: $(READY)  ## the same with every example of the slow laws and every architecture in each sweep; PART=1/3: of a third of the files
	@$(call pytest,2) -m "" --hypothesis-profile=all --timeout=600 $(if $(PART),--part=$(PART))

check: $(READY)  ## style, types, import contracts, chart, kernels compiled for GPUs that need not be here
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@if command -v go >/dev/null; then scripts/build-cluster-tools helm; else echo 'no Go here: the chart is not rendered'; fi
	@$(BIN)/python -m pytest -q -m "" tests/operator/test_chart.py tests/runtime/kernels/test_triton_compiles.py

cluster-test: $(READY)  ## a real Kubernetes on this machine, and tokens from it (needs root)
	@scripts/install-system-packages
	@scripts/build-cluster-tools
	@$(BIN)/python -m pytest -m cluster tests/cluster

gpu-test: $(READY)  ## what needs a CUDA device; skipped with a message where there is none
	@$(BIN)/python -m pytest -m gpu tests/gpu

bench: $(READY)  ## every performance claim, as tables and as JSON under build/bench
	@$(BIN)/python -m benchmarks

generate: $(READY)  ## CRDs, the plan's JSON schema and the list of modules, from their one source
	@$(BIN)/python -m strata_operator.crds
	@$(BIN)/python -m strata_planner.contract.schema
	@$(BIN)/python scripts/list-modules

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
