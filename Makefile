# Everything runs inside .venv, made on first use. Where a GPU is used, install its extra too: .venv/bin/pip install -e ".[cuda]"

PYTHON      ?= python3
VENV        ?= .venv
PROMPT      ?= Explain in two sentences what a key-value cache is.
JOBS        ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
RUN := $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-gpu check format format-check lint types kernels sanitize clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The stamps make a repeated `make` free; a change of the dependencies installs again.
$(VENV)/.core: pyproject.toml
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing rollkv into $(VENV) ..."
	@$(RUN) -m pip install -qq --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing what the tests need into $(VENV) ..."
	@$(RUN) -m pip install -qq --disable-pip-version-check -e ".[dev]"
	@touch $@

venv: $(VENV)/.dev ## Make .venv with everything the tests need

demo: $(VENV)/.core ## Bring a small real model (98 MB, once) and let it talk; needs no GPU
	@$(RUN) -m rollkv.models smollm2
	@$(BIN)/rollkv generate -p "$(PROMPT)" -n 80

test: $(VENV)/.dev ## Run all tests that need no GPU
	@$(RUN) -m pytest -m "not gpu" -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

# One after the other: they measure and fill the memory of one device.
test-gpu: $(VENV)/.dev ## Run the tests that need a GPU
	@$(RUN) -m pytest -m gpu $(PYTEST_ARGS)

check: format-check lint types test ## Formatting, lint, types, tests

format: $(VENV)/.dev ## Format the sources
	@$(RUN) -m ruff format .

format-check: $(VENV)/.dev
	@$(RUN) -m ruff format --check .

lint: $(VENV)/.dev
	@$(RUN) -m ruff check .

types: $(VENV)/.dev
	@$(RUN) -m mypy

kernels: $(VENV)/.dev ## Compile every kernel for every architecture; registers, shared memory, spills
	@$(RUN) -m rollkv.cuda.report_kernels

# Probing a kernel's parameters ends with an error on purpose. racecheck reports hazards inside cuBLAS's own kernels (nvjet_sm90_*), so the
# tests that call them are left out there.
sanitize: $(VENV)/.dev ## Kernel tests under compute-sanitizer (needs a GPU and the CUDA toolkit)
	compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 $(RUN) -m pytest -m gpu tests/kernels $(PYTEST_ARGS)
	compute-sanitizer --tool racecheck --error-exitcode 1 $(RUN) -m pytest -m gpu tests/kernels -k "not many_rows and not feed_forward and not stacks" $(PYTEST_ARGS)

clean: ## Remove what building and testing left behind; .venv and the models stay
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find rollkv tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
