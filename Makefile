# Each target does all its own set-up: a virtual environment in .venv with the tested versions.
PYTHON ?= python3
BIN := .venv/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install demo test check lint clean
install: .venv/installed

.venv/installed: pyproject.toml reproduction/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "budgetformer needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -e '.[carbon,data,demo,track,onnx,openvino,ray,serve,dev]' -e ./reproduction
	touch $@

# Real film reviews and a pretrained encoder, with exits and without, compared. Run again, it continues or shows the result.
demo: PRECISION := $(shell grep -qs avx512_bf16 /proc/cpuinfo && echo bf16 || echo fp32)
demo: install
	$(BIN)/budgetformer train demo:rotten_tomatoes --recipe examples/demo.toml --set precision=$(PRECISION) --resume -o runs/demo

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
