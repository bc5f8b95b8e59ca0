# make demo    install into .venv and watch the bundled model write, alone and with each of its adapters
# make test    the default tests            make test-slow  the long ones      make test-nightly  the longest
# make lint    what CI checks before the tests
#
# Without an NVIDIA GPU, TORCH is installed first; with one, the newest torch that pyproject.toml allows is taken.
# TORCH_INDEX is searched for it in addition to pip's own index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= $(if $(shell nvidia-smi -L 2>/dev/null),,torch==2.13.0)
TORCH_INDEX ?=
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS)

.PHONY: demo test test-slow test-nightly lint format clean

# One thread: a model so small gains nothing from more, and on a busy machine loses much waiting for them.
demo: $(VENV)/.installed
	@OMP_NUM_THREADS=1 $(BIN)/hybridserve generate demo --compare --prompt "for the" --temperature 0.7 --top_k 40 --max-tokens 120

test: $(VENV)/.installed-test
	$(PYTEST)

test-slow: $(VENV)/.installed-test
	$(PYTEST) -m slow

test-nightly: $(VENV)/.installed-test
	$(PYTEST) -m nightly

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/.torch:
	@echo "Installing into $(VENV): a few minutes the first time"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hybridserve needs Python 3.11 or newer (make PYTHON=...)")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(if $(TORCH),$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH))
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.torch
	@$(PIP) -e '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.torch
	@$(PIP) -e '.[test,dev]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test
