# Everything here works on a machine with Python (>= 3.10) and make alone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What setuptools warns of at an editable install is no news to who runs make.
PIP := PYTHONWARNINGS=ignore::UserWarning $(BIN)/python -m pip install --quiet

.DEFAULT_GOAL := help

help: ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing Zipage, torch and what else it needs into $(VENV); this can take some minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@

install: $(VENV)/.installed ## create .venv and install Zipage into it

demo: $(VENV)/.installed ## answer a batch of problems with full KV, then with Zipage, in the same pool
	$(BIN)/zipage demo

# One thread each: many tests at once gain more from the cores than large products would.
test: $(VENV)/.installed-dev ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile -m "not slow and not gpu"

test-slow: $(VENV)/.installed-dev ## run the slow tests too
	$(BIN)/python -m pytest -m "not gpu"

test-gpu: $(VENV)/.installed-dev ## run the tests that need a CUDA device, the slow ones too
	$(BIN)/python -m pytest -m gpu

test-clients: ## run lm-eval and litellm against a server, in a virtual environment of their own
	$(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]' \
		-r tests/server/clients/requirements.txt
	$(VENV)-clients/bin/python -m pytest tests/server/clients

lint: $(VENV)/.installed-dev ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev ## check types
	$(BIN)/mypy

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) $(VENV)-clients .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info

.PHONY: help install demo test test-slow test-gpu test-clients lint types clean
