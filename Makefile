PYTHON ?= python3
WORKERS ?= 2
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo test lint types clean

demo: $(VENV)/core.stamp ## install what is needed and train the embedded default
	$(BIN)/fedbraid run --out runs/demo-$$(date +%Y%m%d-%H%M%S)

test: lint types ## lint, type-check, test
	$(BIN)/python -m pytest -n $(WORKERS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/basedpyright --level error

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/core.stamp: pyproject.toml | $(BIN)/python
	$(PIP) install -e .
	touch $@

$(VENV)/dev.stamp: pyproject.toml | $(BIN)/python
	$(PIP) install -e '.[dev]'
	touch $@ $(VENV)/core.stamp

clean:
	rm -rf $(VENV) runs
