# `make quickstart` and `make test` are the two commands to know; each sets up what it needs.

# The newest supported interpreter found on this machine; PYTHON=... chooses another.
PYTHON ?= $(shell for name in python3.13 python3.12 python3.11 python3; do \
	"$$name" -c 'import sys, venv, ensurepip; raise SystemExit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	&& { echo "$$name"; break; }; done)
# On Linux the default torch brings CUDA. A machine without a GPU saves gigabytes with
# make setup PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_FLAGS ?=
ARGS ?=
BIN := .venv/bin
STAMP := .venv/.requirements-installed

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-sglang lint format types imports docs check clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup: $(STAMP)  ## make .venv and install the pinned requirements

$(STAMP): requirements/base.txt requirements/dev.txt requirements/miles.txt
	@test -x $(BIN)/python || test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.13 found: install one or set PYTHON=/path/to/python"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -r requirements/dev.txt
	$(BIN)/python tests/miles/fetch.py
	@touch $@

quickstart: setup  ## train the tiny model in two arms through a Ray job and compare them (ARGS="--steps 3" shortens it)
	$(BIN)/python -m experiments submit experiments/configs/quickstart.yaml $(ARGS)

test: setup  ## run the tests (ARGS="-m 'not ray'" selects)
	$(BIN)/python -m pytest $(ARGS)

test-sglang:  ## run the tests of the real sglang without a GPU, in an environment of their own
	tests/sglang_cpu/run.sh $(ARGS)

lint: setup  ## ruff: rules and format of the imports
	$(BIN)/ruff check .

types: setup  ## pyright
	$(BIN)/pyright

imports: setup  ## import rules between the packages
	$(BIN)/lint-imports

docs: setup  ## write docs/configuration.md from the settings
	$(BIN)/python -m experiments.reference > docs/configuration.md

check: lint types imports test  ## everything a change must pass

clean:  ## remove caches and builds (not .venv, not runs)
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
