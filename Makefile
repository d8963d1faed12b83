# Everything here works from a fresh copy with Python 3.11 or later and make.
# The first call creates .venv in this folder and lists what it will download; later calls reuse it.
#
#   make PYTHON=/path/to/python test     use that Python, and its torch if it has one
#   make test ARGS="-k pep"              pass more arguments to pytest

PYTHON ?= python3
ARGS ?=
SETUP := $(PYTHON) tools/setup_environment.py
RUN := .venv/bin/python -m

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-slow test-all check docs coverage package bench format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Create .venv with everything for development
	@$(SETUP) all dev

demo: ## Run the demo: improve and shrink the tables of a small model
	@$(SETUP) cli data plots
	$(RUN) rarebit demo $(ARGS)

test: ## Run the quick tests: everything essential, in about six minutes
	@$(SETUP) test
	$(RUN) pytest -n 2 --dist worksteal $(ARGS)

test-slow: ## Run only the tests marked slow, with every optional package
	@$(SETUP) all test
	$(RUN) pytest -n 2 --dist worksteal --run-slow -m slow $(ARGS)

test-all: ## Run every test, quick and slow, with every optional package
	@$(SETUP) all test
	$(RUN) pytest -n 2 --dist worksteal --run-slow $(ARGS)

check: ## Check style and types
	@$(SETUP) dev
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	.venv/bin/python tools/count_suppressions.py src

docs: ## Build the documentation as a site in build/site
	@$(SETUP) docs
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(RUN) mkdocs build --strict --quiet $(ARGS)

coverage: ## Run the quick tests with coverage of lines and branches
	@$(SETUP) test
	$(RUN) pytest -n 2 --dist worksteal --cov --cov-report=term:skip-covered $(ARGS)

package: ## Build wheel and sdist, and use each from an empty folder
	@$(SETUP) cli
	.venv/bin/python tools/package.py

bench: ## Measure a training step and the import time
	@$(SETUP) cli
	$(RUN) rarebit bench train $(ARGS)
	$(RUN) rarebit bench import $(ARGS)

format: ## Format the code and apply automatic fixes
	@$(SETUP) dev
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

clean: ## Remove .venv, caches and builds
	@$(PYTHON) tools/setup_environment.py --remove
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
