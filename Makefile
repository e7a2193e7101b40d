# Every target sets up what it needs: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TRITON36 := $(VENV)/triton-3.6.0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Threads that wait by spinning slow small models down up to 50 times as soon as another program wants the same cores.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help demo test check format gpu-test clean
help:
	@echo "make demo      train GPT-2 and LLaMA-3 (tiny) with and without --flash on real text, and write a report"
	@echo "make test      the tests (no GPU needed; GPU tests are skipped with the reason where there is none)"
	@echo "make check     linter, formatter, type checker, and whether the documents' tables are the ledger's"
	@echo "make gpu-test  the GPU tests, with this machine's own python3 and its packages (no network);"
	@echo "               with pytest-xdist: make gpu-test PYTEST_ARGS='-n 12' compiles the kernels side by side"
	@echo "make format    let ruff rewrite what it can"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "tileflash needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) -V). Use: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@echo "setting up $(VENV) (PyTorch, Triton and the test tools; a few minutes where torch is the CUDA build)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

# The kernels are compiled a second time with the Triton that torch 2.11 brings; nothing of it is ever launched.
$(TRITON36)/.installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target $(TRITON36) triton==3.6.0
	touch $@

demo: $(STAMP)
	$(BIN)/tileflash compare gpt2-tiny llama3-tiny --demo --output reports/demo

test: $(STAMP) $(TRITON36)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadgroup

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/tileflash report --write README.md --write README.zh-CN.md --write docs/performance.md --check

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu-test:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache reports
