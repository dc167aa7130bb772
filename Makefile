# Each target sets up what it needs in .venv, from nothing; a second run finds it there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# One thread per process that sleeps at barriers: see moonlet/process.py.
export OMP_WAIT_POLICY := PASSIVE
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: demo test lint clean

demo: $(VENV)/demo.stamp
	$(BIN)/moonlet run recipes/laptop.toml --resume

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find moonlet tests -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Moonlet needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Moonlet into $(VENV) (once; torch is the big part)"
	$(BIN)/python -m pip install -qq --no-compile -c constraints.txt -e .
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Moonlet and its tests into $(VENV) (once; torch is the big part)"
	$(BIN)/python -m pip install -qq --no-compile -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/demo.stamp
