# k3plan: `make demo` and `make test` start from a fresh clone, a Python >= 3.10 and a network.
#   PYTHON=python3.12        the interpreter that the environment is made from
#   TORCH="torch==2.13.0"    the torch to install when there is none (default: see .ci/install_torch.py)
#   WORKERS=2                test processes

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test test-all lint venv clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    plan a tiny Kimi K3 decode step and run it on this machine"
	@echo "make test    ruff, mypy and every test but the slow ones"
	@echo "make test-all  those too: every kernel case, every cross-compile (half an hour on two cores)"
	@echo "make lint    ruff and mypy only"
	@echo "make venv    the environment that demo uses"
	@echo "make clean   remove the environment and everything that was built"

demo: $(VENV)/.installed
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

test: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(ARGS)

test-all: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	PATH="$(CURDIR)/$(BIN):$$PATH" sh .ci/mypy

venv: $(VENV)/.installed

# the stamps make a second call instant; an edit of the dependencies installs again
$(VENV)/.installed: pyproject.toml .ci/install .ci/install_torch.py
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" sh .ci/install .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" sh .ci/install ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
