# Two commands do everything on a fresh machine: `make quickstart` and `make test`. Each makes .venv if there is none.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
OUTPUT_DIR ?= runs/quickstart

.PHONY: quickstart test test-lowest check format benchmarks clean

quickstart: $(VENV)/.installed
	$(BIN)/loopformers quickstart --output-dir $(OUTPUT_DIR)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmarks: $(VENV)/.installed
	$(BIN)/python benchmarks/speed.py

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "loopformers needs Python 3.11 or newer, and $(PYTHON) is older; run: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
