# `make demo` and `make test` do all the set-up they need; VENV=... uses an environment that exists.
PYTHON ?= python3
VENV ?= venv
TORCH ?= torch==2.13.0
RUN := $(VENV)/bin/python -m

.PHONY: venv demo test nightly lint
.DEFAULT_GOAL := demo

# CPU builds of PyTorch live on PyTorch's own index; the package index is asked first because it is always reachable.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("restorekv needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet "$(TORCH)" \
		|| $(RUN) pip install --quiet --index-url https://download.pytorch.org/whl/cpu "$(TORCH)"
	$(RUN) pip install --quiet -e '.[dev,train]'
	touch $@

venv: $(VENV)/ready

demo: venv
	$(VENV)/bin/restorekv demo

test: venv
	$(RUN) pytest -m "not slow"

nightly: venv
	$(RUN) pytest

lint: venv
	$(RUN) ruff check src tests recipes
	$(RUN) ruff format --check src tests recipes
