# On a machine with Python 3.11 or newer and make, each target does all of its own set-up.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/ready
# Always with the constraints: they keep pip from choosing another, far larger, build of torch.
INSTALL := $(RUN) -m pip install --constraint constraints.txt

# The virtual environment alone decides what is imported.
unexport PYTHONPATH

.PHONY: help demo test deep check format clean

help:
	@echo "make demo   train a U-Net over two devices and compare with one"
	@echo "make test   run the tests"
	@echo "make deep   run the tests with many more random examples"
	@echo "make check  lint, formatting and types"
	@echo "make format reformat"
	@echo "make clean  remove what these made"

demo: $(READY)
	$(RUN) -m examples.denoise

test: $(READY)
	$(RUN) -m pytest

deep: $(READY)
	HYPOTHESIS_PROFILE=deep $(RUN) -m pytest

check: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools
	$(INSTALL) --no-build-isolation --editable '.[test,demo]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
