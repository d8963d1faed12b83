# Everything here works from a fresh copy with Python 3.11 or later and make.
# The first call makes .venv in this folder and says what it will download; later calls reuse it.
#
#   make PYTHON=/path/to/python test     use that Python, and its torch if it has one
#   make test ARGS="-k pep"              pass more arguments on

PYTHON ?= python3
ARGS ?=
SETUP := $(PYTHON) tools/setup_environment.py
RUN := .venv/bin/python -m

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-all check bench format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv with everything for development
	@$(SETUP) all dev

demo: ## Run the demo: a small model, its tables made better and smaller
	@$(SETUP) cli
	$(RUN) rarebit demo $(ARGS)

test: ## Run the tests
	@$(SETUP) test
	$(RUN) pytest -n 2 $(ARGS)

test-all: ## Run the tests with every optional package, the slow ones too
	@$(SETUP) all test
	$(RUN) pytest -n 2 --run-slow $(ARGS)

check: ## Check style and types
	@$(SETUP) dev
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	.venv/bin/python tools/count_suppressions.py src

bench: ## Measure a training step and the time to import
	@$(SETUP) cli
	$(RUN) rarebit bench train $(ARGS)
	$(RUN) rarebit bench import $(ARGS)

format: ## Format the code and mend what can be mended by itself
	@$(SETUP) dev
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

clean: ## Remove .venv, caches and builds
	@$(PYTHON) tools/setup_environment.py --remove
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
