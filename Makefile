# On a machine with Python 3.11 or newer and make, each target does all of its own set-up.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/ready
# Always with the constraints: they keep pip from choosing another, far larger, build of torch.
INSTALL := $(RUN) -m pip install --constraint constraints.txt

# A test may use two threads of its own, so more processes than cores do not help; save where tests
# wait for processes that they start, and one more keeps the cores busy.
WORKERS := --maxprocesses=4 --dist=worksteal
QUICK := --numprocesses=logical $(WORKERS)
WHOLE := --numprocesses=$(shell expr 1 + $$(getconf _NPROCESSORS_ONLN)) $(WORKERS)
# What each change must pass; without this, pytest runs all, and make deep all with more examples.
SHORT := -m "not deep and not pages"

# The virtual environment alone decides what is imported.
unexport PYTHONPATH
# Tests start many processes: each would compile all modules for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-ranks test quick deep compat check compare docs format clean

help:
	@echo "make demo   train a U-Net over two devices and compare with one"
	@echo "make demo-ranks  the same with a process for each device"
	@echo "make test   run the tests, without those that are deep or of pages"
	@echo "make quick  run the tests that compile no model and start no process"
	@echo "make deep   run all tests, with many more random examples"
	@echo "make compat run the tests on the oldest and the newest torch and Python, and between"
	@echo "make check  lint, formatting and types"
	@echo "make compare  time fxpipe beside its peers"
	@echo "make docs   build the pages into build/docs, and run their code"
	@echo "make format reformat"
	@echo "make clean  remove what these made"

demo: $(READY)
	$(RUN) -m examples.denoise

# one thread a process, as torchrun chooses by itself, but with a warning
demo-ranks: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m torch.distributed.run --standalone --nproc-per-node=2 \
		-m examples.denoise

test: $(READY)
	$(RUN) -m pytest $(WHOLE) $(SHORT)

quick: $(READY)
	$(RUN) -m pytest $(QUICK) $(SHORT) --quick

deep: $(READY)
	HYPOTHESIS_PROFILE=deep $(RUN) -m pytest $(WORKERS)

compat: $(READY)
	$(RUN) -m benchmarks.compat $(WHOLE)

check: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

compare: $(READY)
	$(RUN) -m benchmarks.compare

docs: $(VENV)/docs
	$(RUN) -m sphinx --fail-on-warning --keep-going --fresh-env docs build/docs
	$(RUN) -m pytest $(WHOLE) -m pages tests/test_docs.py tests/test_readme.py tests/test_notebooks.py

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools
	$(INSTALL) --no-build-isolation --editable '.[test,demo,frameworks]'
	touch $@

$(VENV)/docs: $(READY)
	$(INSTALL) --no-build-isolation --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-* build docs/notebooks dist *.egg-info demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
