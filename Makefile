# Two commands for a fresh machine with git, make and Python 3.10 or newer:
#
#   make demo    trains a digit reader with a learned bias, beside its twin in plain PyTorch
#   make test    the whole test suite
#
# Each creates .venv, installs what it needs and runs; a second call only runs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
# options for the demo, e.g. make demo ARGS="--epochs 4"
ARGS ?=

# Without an NVIDIA driver a CPU-sized torch does; it must be asked for before anything else pulls in another one.
NVIDIA := $(shell { command -v nvidia-smi || ls /proc/driver/nvidia; } >/dev/null 2>&1 && echo yes)
ifeq ($(NVIDIA),yes)
TORCH ?=
GPU := ,gpu
else
TORCH ?= torch==2.13.0
GPU :=
endif

PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

.PHONY: demo test lint docs-tables clean help
help:
	@sed -n '3,4p;/^#:/p' Makefile | sed 's/^#:* *//'

demo: $(VENV)/demo.stamp
	$(BIN)/biasflash demo $(ARGS)

test: $(VENV)/test.stamp
	$(PYTEST) tests --ignore=tests/interpreter
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter

#: make lint         formatting, lint rules, types and the import law
lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

#: make docs-tables  rewrites the tables of README.md and docs/ from the code
docs-tables: $(VENV)/demo.stamp
	$(BIN)/python -m biasflash.cli.support README.md docs/*.md

#: make clean        removes .venv and caches
clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "biasflash needs Python 3.10 or newer: make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/torch.stamp: $(VENV)/pyvenv.cfg
	$(if $(TORCH),@echo "installing $(TORCH)" && $(PIP) install "$(TORCH)")
	@touch $@

$(VENV)/%.stamp: pyproject.toml $(VENV)/torch.stamp
	@echo "installing biasflash[$*$(GPU)]: some minutes the first time"
	@$(PIP) install --editable ".[$*$(GPU)]"
	@touch $@
