# Two commands do everything on a fresh machine with Python 3.11 and make:
#   make quickstart   trains a small model through Diamond on this machine
#   make test         passes the tests
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
# More than the cores: most tests wait for clusters, containers and timers. TEST_JOBS=0: one by one.
TEST_JOBS ?= 3
PIP    := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: help quickstart test check audit fmt serve site figures screenshots pictures docs system-packages clean

help:
	@echo "make quickstart   install, start Diamond, train a PDE surrogate, show the result"
	@echo "make test         install what the tests need, check the code, run every suite"
	@echo "make serve        start the service with this machine as an endpoint (Ctrl-C stops it)"
	@echo "make site         start a miniature HPC centre (Slurm, Apptainer) to play with; needs root on Debian"
	@echo "make fmt check    format the code; lint, types and layers"
	@echo "make audit        look for known holes in what is installed, where a database of them can be reached"
	@echo "make docs         regenerate the REST, settings and sites references"
	@echo "make figures      draw the plots of benchmarks/results"
	@echo "make screenshots  pictures of every page, in build/screenshots"
	@echo "make pictures     those few that the README and the docs show; needs what make site needs"

$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Diamond needs Python 3.11 or newer; found $$($(PYTHON) --version 2>&1). Try: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "Could not make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "Installing Diamond and PyTorch into $(VENV) (once; a few minutes) ..."
	@$(PIP) install -c constraints.txt torch -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "Installing what the tests need ..."
	@$(PIP) install -c constraints.txt -e '.[postgres,dev]'
	@touch $@

quickstart: $(VENV)/.base
	@$(BIN)/python scripts/quickstart.py

serve: $(VENV)/.base
	@$(BIN)/diamond up

test: $(VENV)/.dev system-packages check audit
	@$(BIN)/python -m testing.suites -n $(TEST_JOBS)

check: $(VENV)/.dev
	@$(BIN)/ruff format --check --quiet . || { echo "run: make fmt"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

# Says by name which database it could not ask; fails only for a hole that is known.
audit: $(VENV)/.dev
	@$(BIN)/python scripts/audit_dependencies.py

fmt: $(VENV)/.dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Only where it may; otherwise the suites concerned say by name what they could not run.
system-packages:
	@scripts/system-packages

site: $(VENV)/.dev system-packages
	@$(BIN)/python -m testing.minihpc

docs: $(VENV)/.dev
	@$(BIN)/python docs/generate_rest.py
	@$(BIN)/python docs/generate_settings.py
	@$(BIN)/python docs/generate_sites.py

figures: $(VENV)/.dev
	@$(BIN)/python benchmarks/figures.py

screenshots: $(VENV)/.dev
	@$(BIN)/python scripts/screenshots.py

pictures: $(VENV)/.dev system-packages
	@$(BIN)/python scripts/pictures.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
