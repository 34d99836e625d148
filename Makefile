PYTHON ?= python3
WORKERS ?= 2
TORCH  ?= torch # or one that suits the machine, such as torch==2.13.0+cpu
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo check test faults torch-test lowest newest bench-check docs wheel lint types clean

demo: $(VENV)/core.stamp ## install what is needed and train the embedded default
	$(BIN)/fedbraid run --out runs/demo-$$(date +%Y%m%d-%H%M%S)

check: lint ## while you work: lint, types and the core of the laws
	$(call with_types,$(BIN)/python -m pytest -q -n $(WORKERS) -m core $(wildcard tests/test_*.py))

test: lint ## everything that CI runs: lint, types and all tests
	$(call with_types,$(BIN)/python -m pytest -n $(WORKERS))

faults: $(VENV)/dev.stamp ## the whole fault harness, with counts; `make test` runs a sample of it
	FEDBRAID_FAULTS=whole $(BIN)/python -m pytest -n $(WORKERS) tests/faults

torch-test: .venv-torch/stamp ## models of PyTorch, Hugging Face and flax.nnx, in an environment that has these
	.venv-torch/bin/python -m pytest tests/models/test_torch.py tests/models/test_nnx.py tests/models/test_doors.py \
	  tests/models/test_transformers.py tests/models/test_lora.py tests/models/test_llama.py

.venv-torch/stamp: pyproject.toml
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -m pip --disable-pip-version-check -q install $(TORCH)
	.venv-torch/bin/python -m pip --disable-pip-version-check -q install -e '.[torch,flax]' transformers peft pytest hypothesis
	touch $@

lowest newest: ## all tests with the lowest, or the newest, versions that pyproject.toml allows
	$(PYTHON) -m venv .venv-$@
	.venv-$@/bin/python -m pip --disable-pip-version-check -q install uv
	VIRTUAL_ENV=.venv-$@ .venv-$@/bin/uv pip install -q --upgrade --resolution $(if $(filter lowest,$@),lowest-direct,highest) -e '.[dev]'
	.venv-$@/bin/python -m pytest -n $(WORKERS) $(TESTS)

bench-check: $(VENV)/dev.stamp ## measure again on a quiet machine; fails if a workload became more than 10% slower
	$(BIN)/python benchmarks/published.py --check

docs: .venv-docs/stamp ## build the documentation site into site/; the tutorials are executed, any warning is an error
	PYTHONPATH=docs .venv-docs/bin/python -m sitebuild

.venv-docs/stamp: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip --disable-pip-version-check -q install -e '.[docs]'
	touch $@

wheel: $(VENV)/dev.stamp ## build the package, check it, install it into an empty environment and run the demo there
	rm -rf dist build/empty
	$(PIP) install build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip --disable-pip-version-check -q install dist/*.whl
	cd build/empty && bin/fedbraid run --out demo && test -s demo/curves.png

# types are checked beside the tests, and their errors are printed after those of the tests; either fails the target
define with_types
@{ $(TYPES); } > $(VENV)/types.log 2>&1 & types=$$!; $(1); tests=$$?; \
  wait $$types; typed=$$?; echo types:; cat $(VENV)/types.log; exit $$((tests || typed))
endef

# No type errors, and a complete type of every public name. On failure the list of modules is left out of the output.
PUBLIC = PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH="$(CURDIR)/src" $(BIN)/basedpyright --verifytypes fedbraid --ignoreexternal
TYPES  = $(BIN)/basedpyright --level error && \
  { said=$$($(PUBLIC)) || { printf '%s\n' "$$said" | sed '/^   fedbraid/d'; false; }; }

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp ## no type errors, and complete types of public names
	@$(TYPES)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/core.stamp: pyproject.toml | $(BIN)/python
	$(PIP) install -e .
	touch $@

$(VENV)/dev.stamp: pyproject.toml | $(BIN)/python
	$(PIP) install -e '.[dev]'
	touch $@ $(VENV)/core.stamp

clean:
	rm -rf $(VENV) .venv-torch .venv-lowest .venv-newest .venv-docs site build/docs build/docs-cache runs
