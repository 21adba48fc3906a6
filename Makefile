# `make run` and `make test` need nothing but Python >= 3.11 and make; everything else goes into $(VENV).
#
#   make run ARGS="--preset tiny"         train a small model (--help lists the options)
#   make test ARGS="-k layout"            run the short suite; two files at a time (ARGS="-n 0": one after another)
#   make test-full                        run everything
#   make test-torch TORCH=2.11.0          run the short suite with another torch, in an environment of its own
#   make PYTHON=/usr/bin/python3.12 venv  choose the interpreter of the environment
#   make test NO_VENV=1 PYTHON=python3    use an interpreter that already has torch and pytest; installs nothing

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)

ifneq ($(strip $(NO_VENV)),)
  VENV :=
endif

ifneq ($(strip $(VENV)),)
  BIN := $(VENV)/bin/
  PY := $(BIN)python
  READY := $(VENV)/.ready
else
  BIN :=
  PY := $(PYTHON)
  READY := check-python
  export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

# Every rank of a test, and every program that a test starts, imports what the others have compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv run test test-full test-torch mutants fuzz soak lint fmt docs pages bench bench-compare bench-checkpoints gpu-check clean check-python

help:
	@echo "Targets: run test test-full test-torch mutants fuzz soak lint fmt docs pages bench bench-compare bench-checkpoints gpu-check venv clean. Options go into ARGS; the head of the Makefile has examples."

venv: $(READY)

# The stamp is newer than what it was made from, or the environment is brought up to date.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is not Python 3.11 or newer; name one that is: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "error: $(PYTHON) cannot make environments; install its venv package (Debian: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# torch by its exact pin first: pip then takes the build that fits the machine, and the next lines keep it.
	$(BIN)pip install --quiet "torch==$(TORCH)"
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[dev]'
	@touch $@

check-python:
	@$(PYTHON) -c 'import torch, pytest' || \
	  { echo "error: $(PYTHON) lacks torch or pytest; leave NO_VENV out to have an environment made" >&2; exit 1; }

run: $(READY)
	$(PY) -m megatron_fsdp.train --preset cpu-small $(ARGS)

# Two files at a time where there are two cores and pytest-xdist, each with ranks of its own; ARGS come last and win.
SIDE_BY_SIDE = $$($(PY) -c 'import os, xdist; print("-n 2 --dist loadfile --no-loadscope-reorder" * (os.cpu_count() > 1))' 2>/dev/null)

# Each fact once, in minutes; what it leaves to the full suite: tests/support/tiers.py.
test: $(READY)
	$(PY) -m pytest --short $(SIDE_BY_SIDE) $(ARGS)

test-full: $(READY)
	$(PY) -m pytest $(SIDE_BY_SIDE) $(ARGS)

# Another torch: TORCH=2.11.0 is the oldest that is allowed, 2.14.1 the newest.
test-torch:
	$(MAKE) test VENV=.venv-torch-$(TORCH) TORCH=$(TORCH)

# Faults planted one at a time: which test finds each (docs/testing.md); ARGS="--only norm", ARGS="--list".
mutants: $(READY)
	$(PY) tools/mutants.py $(ARGS)

# Random models, meshes, strategies and options against one process; ARGS="--cases 1000 --first-seed 0".
fuzz: $(READY)
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR):$(CURDIR)/src $(PY) -W ignore tools/fuzz.py $(ARGS)

# Short runs of the trainer with kills and restarts, for an hour; ARGS="--minutes 5".
soak: $(READY)
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR):$(CURDIR)/src $(PY) tools/soak.py $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The pages as a site in build/site, without network; a broken link is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

# What the pages print (listings, tables, pictures), made anew; ARGS="plan.md --check".
pages: $(READY)
	PYTHONPATH=$(CURDIR):$(CURDIR)/src $(PY) -W ignore tools/pages.py $(ARGS)

fmt: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Everything beside its peers, one page in build/bench. ARGS="--quick"; ARGS="--only large --rounds 4"; ARGS="--publish".
bench: $(READY)
	$(PY) benchmarks/bench.py $(ARGS)

# One model, chosen contenders; ARGS="--model large --contenders ours-0 ours-3 fsdp2".
bench-compare: $(READY)
	$(PY) benchmarks/compare.py $(ARGS)

# Saving and loading against plain torch.distributed.checkpoint.
bench-checkpoints: $(READY)
	$(PY) benchmarks/checkpoints.py $(ARGS)

# What needs a GPU, checked and measured in three parts of at most nine minutes (build/gpu); where there is none it says
# so and succeeds. ARGS="--device cpu" rehearses.
gpu-check: $(READY)
	@if [ -n "$(ARGS)" ] || $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  failed=0; for part in 1 2 3; do $(PY) tools/gpu_half_hour.py --part $$part --out build/gpu $(ARGS) || failed=1; done; exit $$failed; \
	else echo "gpu-check: no CUDA device here, nothing checked"; fi

clean:
	rm -rf .venv .venv-torch-* build dist src/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find src tests tools examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
