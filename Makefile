# Two commands do all the set-up: `make demo` runs the quickstart, `make test` passes the tests.
# Both make .venv when it is not there, and complete it when it is.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  := $(shell sed -n 's/^torch==//p' constraints.txt)
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
STAMP  := $(VENV)/.installed
# the suite mostly waits (for kernels, ranks, browsers to start and end): as many processes share it
WORKERS ?= 2
BESIDE := accelerate==1.15.0 huggingface_hub safetensors pyyaml

.PHONY: demo test browser lint typecheck bench bench-peers clean

# A machine without an NVIDIA driver takes torch's CPU build: from wherever pip already looks, else from PyTorch's own index.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "nbdist needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@if ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
	    echo "installing torch $(TORCH) (once; a few minutes on a slow line)"; \
	    if [ "$$(uname)" = Linux ] && [ ! -e /proc/driver/nvidia/version ]; then \
	        $(PIP) "torch==$(TORCH)+cpu" 2>/dev/null || \
	        $(PIP) --index-url https://download.pytorch.org/whl/cpu "torch==$(TORCH)+cpu" 2>/dev/null || \
	        $(PIP) "torch==$(TORCH)"; \
	    else $(PIP) "torch==$(TORCH)"; fi; fi
	@echo "installing nbdist and what its tests and the quickstart need"
	$(PIP) -c constraints.txt -e '.[test]'
	touch $@

demo: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python notebooks/run.py notebooks/quickstart.ipynb
	@echo "To open it yourself: $(BIN)/jupyter lab notebooks/quickstart.ipynb"

test: $(STAMP) browser lint typecheck
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

browser:
	@tests/browser/get-chromium.sh

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The package is checked as it is installed: mypy does not follow the mapping of magics/ and widgets/ in the tree.
typecheck: $(STAMP)
	rm -rf .typecheck build
	$(PIP) --no-deps --target .typecheck .
	cd .typecheck && ../$(BIN)/mypy --config-file ../pyproject.toml -p nbdist

# Accelerate goes into a folder of its own, beside what nbdist uses; without it the other figures are still printed.
bench: $(STAMP)
	@test -d benchmarks/.envs/beside/accelerate || $(PIP) --no-deps --target benchmarks/.envs/beside $(BESIDE) || true
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/cells.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/accelerator_overhead.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/ddp_overhead.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/resuming.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/imports.py

# Makes an environment for each peer below benchmarks/.envs (once, about 2 GB), then measures all in turns: half an hour.
bench-peers: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.peers

clean:
	rm -rf $(VENV) .typecheck build *.egg-info benchmarks/.envs
