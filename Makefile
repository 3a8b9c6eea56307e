# Every target builds .venv first, from Python 3.11 or later and the packages that pip finds.
# Nothing is installed twice: a stamp in .venv says what is there, and pyproject.toml and
# constraints.txt make it stale.

# what is imported is compiled once, not by each of the many processes that tests start
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PY := $(VENV)/bin/python
# --no-compile: Python compiles what is imported, which is a small part of what is installed
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,\
	$(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))

# The first that is a Python of this version, on PATH or pyenv's; and the torch that its package is tried
# with, if it is not the pinned one: the oldest, and a newer one
python_of = $(firstword $(foreach p,$(PY) python$(1) $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python),\
	$(shell $(p) -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(1)")' 2>/dev/null && echo $(p))))
TORCH_OF_3.12 := --torch 2.8.0
TORCH_OF_3.13 := --torch 2.14.1

# pytest fails where an output is closed, as `make test >&-` has it
PYTEST = (true 3>&1) 2>/dev/null || exec >/dev/null; (true 3>&2) || exec 2>/dev/null; \
	$(PY) -m pytest

# The emulated device: torch's CUDA build lies before the CPU's, everything else is the same.
# `make test-device TORCH=2.8.0` builds another torch beside it, and so for the targets below
TORCH := 2.13.0
DEVICE := $(VENV)/device-$(TORCH)
ON_DEVICE = export LD_LIBRARY_PATH=$(CURDIR)/$(DEVICE)/lib \
	PYTHONPATH=$(CURDIR)/$(DEVICE)/torch:$(CURDIR)/tests/device \
	CUBLAS_WORKSPACE_CONFIG=:4096:8 OMP_NUM_THREADS=1 EMU_DEVICES=2
MUTATIONS = $(ON_DEVICE); PYTHONPATH=$$PYTHONPATH:$(CURDIR)/tests $(PY) tests/device/mutations.py
# how pytest shows arguments prints storages value by value, which takes minutes on this device
DEVICE_TESTS = -p plugin -m gpu --tb=short --timeout 240 $(shell grep -rl --include='test_*.py' 'mark\.gpu' tests)

.PHONY: help environment demo test test-all test-hosts test-package test-places test-device test-device-all test-mutations distributions lint format bench docs clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | column -t -s "$$(printf '\t')"

environment: $(VENV)/.base $(VENV)/.lint $(VENV)/.docs $(VENV)/.hosts $(VENV)/.package $(VENV)/.device ## install what tests, lint and docs take

demo: $(VENV)/.base ## train a network without and with Penstock, side by side, and a model larger than memory (six minutes)
	$(PY) examples/demo.py
	$(PY) examples/demo_weights.py

test: $(VENV)/.base ## the tests, but for slow ones, side by side on up to four cores
	$(PYTEST) -m "not slow and not gpu" -n logical --maxprocesses 4 --dist worksteal \
		--durations=10

test-all: $(VENV)/.base ## the tests, slow ones, random ones and those for a GPU included
	export PENSTOCK_TEST_RANDOM=1; $(PYTEST)
	$(MAKE) test-places test-device test-device-all

test-hosts: $(VENV)/.base $(VENV)/.hosts ## callbacks and recipes for Hugging Face and Lightning (installs both)
	$(PYTEST) tests/hosts

test-package: test-package-3.11 test-package-3.12 test-package-3.13 ## wheel and source distribution, both used in fresh environments of each Python that is here

test-package-%: distributions
	@python="$(call python_of,$*)"; test -n "$$python" || { echo "Python $* is not here"; exit 0; }; \
	echo "Python $* $(TORCH_OF_$*)"; \
	$(PY) scripts/check_package --dist $(VENV)/dist --python "$$python" $(TORCH_OF_$*)

distributions: $(VENV)/.base $(VENV)/.package
	$(PY) scripts/check_package --build $(VENV)/dist

test-places: $(VENV)/.base ## break each place that matters most: a test must notice
	PYTHONPATH=$(CURDIR)/tests $(PY) tests/mutations/break_places.py

test-device: $(DEVICE)/.built ## the tests for a GPU on an emulated one (builds it first, for 2 GB)
	$(ON_DEVICE); $(PYTEST) $(DEVICE_TESTS) -m "gpu and not slow" -n logical --maxprocesses 4 \
		--dist worksteal --durations=10

test-device-all: $(DEVICE)/.built ## the same by the other schedules of the device; every mutation
	@$(ON_DEVICE) PENSTOCK_TEST_RANDOM=1; set -e; for each in eager:0 fixed:0 random:1 random:2 random:3 random:4; do \
		echo "== schedule and seed $$each"; \
		export EMU_SCHEDULE=$${each%:*} EMU_SEED=$${each#*:}; \
		$(PYTEST) $(DEVICE_TESTS) -n logical --maxprocesses 4 --dist worksteal; \
	done
	$(MUTATIONS) --excused

test-mutations: $(DEVICE)/.built ## leave out each wait of the device code: a test must notice
	$(MUTATIONS)

lint: $(VENV)/.base $(VENV)/.lint ## style, types, and the layers of the design
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.lint ## let ruff format and mend what it can
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

bench: $(VENV)/.base $(VENV)/.bench ## every benchmark; writes benchmarks/results (long)
	@set -e; for script in benchmarks/micro/[!_]*.py benchmarks/macro/[!_]*.py; do \
		[ -e "$$script" ] || continue; echo "== $$script"; $(PY) "$$script"; \
	done

docs: $(VENV)/.base $(VENV)/.docs ## the manual, to docs/_build/html; a warning is an error
	$(PY) -m sphinx -W --keep-going -n -q -b html docs docs/_build/html

clean: ## remove everything that was built here
	rm -rf $(VENV) dist build docs/_build demo-out gpu-out
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@test -n "$(PYTHON)" || { echo "Penstock needs Python 3.11 or later: none is on PATH" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# pip before 25.1 does not know --group, so the groups are read from pyproject.toml
$(VENV)/%.txt: pyproject.toml | $(PY)
	@$(PY) -c 'import sys, tomllib; \
	groups = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]; \
	print(*groups[sys.argv[1]], sep="\n")' $* > $@

$(VENV)/.base: $(VENV)/test.txt pyproject.toml constraints.txt
	$(PIP) -r $< -e '.[plot,data]'
	@touch $@

$(VENV)/.lint: $(VENV)/lint.txt constraints.txt
	$(PIP) -r $<
	@touch $@

$(VENV)/.bench: $(VENV)/bench.txt constraints.txt
	$(PIP) -r $<
	@touch $@

$(VENV)/.hosts: $(VENV)/hosts.txt constraints.txt
	$(PIP) -r $<
	@touch $@

$(VENV)/.package: $(VENV)/package.txt constraints.txt
	$(PIP) -r $<
	@touch $@

$(VENV)/.docs: $(VENV)/docs.txt constraints.txt
	$(PIP) -r $<
	@touch $@

$(VENV)/.device: $(VENV)/device.txt constraints.txt
	$(PIP) -r $<
	@touch $@

$(DEVICE)/.built: $(VENV)/.base $(VENV)/.device $(wildcard tests/device/build.py tests/device/runtime/*)
	$(PY) tests/device/build.py $(DEVICE) --torch $(TORCH)
	@touch $@

.SECONDARY: $(VENV)/device.txt $(VENV)/test.txt $(VENV)/bench.txt $(VENV)/lint.txt $(VENV)/hosts.txt $(VENV)/package.txt $(VENV)/docs.txt
