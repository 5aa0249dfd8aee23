# Two commands do all the set-up: `make quickstart` and `make test`. The active virtual environment is used, else .venv.
VENV := $(or $(VIRTUAL_ENV),.venv)
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# An extra would install a copy of an add-on, which stays as it was while the folder is worked on.
ADDONS := $(wildcard addons/*/pyproject.toml)

PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest --numprocesses 2 --max-worker-restart 0

.DEFAULT_GOAL := help
.PHONY: help quickstart install test soak soak-tests soak-consumers release-check release-tests release-benchmarks \
	cluster-check durations check style types quick \
	mutations fuzz kills pairs processors programs-check bench-checkpoints gpu-bundle gpu-check report cache-clean clean

help: ## Show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

quickstart: install ## Install, then run the main job on the checkpoint that ships with the project
	$(PYTHON) quantize.py quant_level=3 alpha=0.8

install: $(VENV)/.sd-quant-run ## Install what the commands need

test: $(VENV)/.sd-quant-test ## Install what the tests need, then run the commit cases (7 minutes on two cores)
	$(PYTEST) addons tests/cli tests/faults tests/fuzz tests/gpu tests/unit --cadence commit \
		--dist loadfile --no-loadscope-reorder --durations 10

# Each of these takes FILES, the files of cases to run in place of all; continuous integration gives them.
soak: ## The nightly cases, whatever became of the part before
	@$(MAKE) --keep-going --no-print-directory soak-tests soak-consumers

soak-tests: $(VENV)/.sd-quant-test
	$(PYTEST) $(or $(FILES),addons tests/cli tests/faults tests/fuzz tests/unit) --cadence nightly -m "not consumer" \
		--dist loadfile --no-loadscope-reorder --durations 10

soak-consumers: $(VENV)/.sd-quant-test $(VENV)/.sd-quant-consumers
	PYTHONPATH=$(abspath $(VENV)/consumers) $(PYTEST) $(or $(FILES),addons tests/cli/test_documents.py tests/cli/test_hand_over.py \
		tests/unit) -m consumer \
		--dist loadfile --durations 10

release-check: ## All that is to be green before a release, some hours: soak, benchmarks, clusters, fuzz, faults, processors, consumers
	@$(MAKE) --keep-going --no-print-directory test soak release-tests release-benchmarks cluster-check \
		mutations fuzz kills pairs processors programs-check

release-tests: $(VENV)/.sd-quant-test
	$(PYTEST) $(or $(FILES),addons tests/cli tests/faults tests/fuzz tests/unit) --cadence release --durations 10 \
		--ignore tests/cli/cluster --ignore tests/unit/benchmarks

release-benchmarks: $(VENV)/.sd-quant-test $(VENV)/.sd-quant-consumers $(VENV)/.sd-quant-peers
	$(PYTEST) $(or $(FILES),tests/unit/benchmarks) --cadence release --dist worksteal --durations 10

cluster-check: $(VENV)/.sd-quant-test $(VENV)/.sd-quant-ray ## Sweeps on a real Slurm and a real Ray cluster started here, and what befalls them (Slurm: as root, with Debian's slurm-wlm and munge)
	PYTHONPATH=$(abspath $(VENV)/ray) OMP_NUM_THREADS=1 $(PYTHON) -m pytest $(or $(FILES),tests/cli/cluster) --durations 10

durations: ## What the tests cost in the last run of .ci/run, and what has changed since the one before
	python3.11 -m tests.cadence.seconds

check: $(VENV)/.sd-quant-test ## Style, types and the quick unit tests, in a minute
	@$(MAKE) --no-print-directory --jobs 2 --output-sync style types quick

style:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

quick:
	$(PYTEST) addons tests/unit --dist worksteal --quiet --cadence commit -m "not slow"

mutations: $(VENV)/.sd-quant-test ## Apply each deliberate fault of tests/mutations and say which test notices it
	$(PYTHON) -m tests.run mutations --workers 2 $(or $(OPTIONS),--nightly)

fuzz: $(VENV)/.sd-quant-test ## Give every reader of files many damaged and hostile inputs
	$(PYTHON) -m tests.run fuzz

kills: $(VENV)/.sd-quant-test ## Kill, starve and race every command, and put it into hard places
	$(PYTHON) -m tests.run faults

pairs: $(VENV)/.sd-quant-test ## Run every knob at the ends of its range, in all pairs
	$(PYTHON) -m tests.run pairs

processors: $(VENV)/.sd-quant-run ## Run the main job as each class of processor that this one can be, and say what changes
	$(PYTHON) benchmarks/processors.py

programs-check: $(VENV)/.sd-quant-test $(VENV)/.sd-quant-consumers ## Have each program that exports are for open them, each in an environment of its own (10 GB); PROGRAMS=<folder with checkouts of ComfyUI, ComfyUI-GGUF, nunchaku>
	PYTHONPATH=$(abspath $(VENV)/consumers) OMP_NUM_THREADS=1 $(PYTHON) -m tests.run programs $(OPTIONS)

gpu-bundle: $(VENV)/.sd-quant-run ## What a GPU machine without a network needs beside this folder: gpu_bundle (a quarter of an hour)
	$(PYTHON) -m benchmarks.gpu.bundle

bench-checkpoints: install ## Train the checkpoints on which recipes are chosen, an hour and a half; goes on where it was stopped
	$(PIP) --editable '.[examples]'
	PYTHONPATH=. $(PYTHON) examples/sdxl_mini/second.py train --steps 1400
	PYTHONPATH=. $(PYTHON) examples/sdxl_mini/second.py pack
	PYTHONPATH=. $(PYTHON) benchmarks/bench_train.py

gpu-check: ## On a GPU: its tests and a table of latencies, with whatever is installed; elsewhere it says so
	PYTHONPATH=.:$$PYTHONPATH $(or $(wildcard $(PYTHON)),python3) -m benchmarks.gpu.check

report: ## Make the report of a run or a sweep again from its records, with whatever is installed: make report DIR=<folder>
	PYTHONPATH=.:$$PYTHONPATH $(or $(wildcard $(PYTHON)),python3) -m sd_quant.report $(DIR)

cache-clean: ## Remove what runs share: statistics, graphs, plans, images; the runs keep theirs
	rm -rf outputs/cache

clean: ## Remove what runs have written
	rm -rf outputs multirun

$(PYTHON):
	python3.11 -m venv $(VENV)

$(VENV)/.sd-quant-run: pyproject.toml setup.py $(ADDONS) constraints.txt | $(PYTHON)
	$(PIP) --editable '.[rtx]' $(ADDONS:%/pyproject.toml=--editable %)
	touch $@

$(VENV)/.sd-quant-test: pyproject.toml setup.py $(ADDONS) constraints.txt | $(PYTHON)
	$(PIP) --editable '.[test]' $(ADDONS:%/pyproject.toml=--editable %)
	touch $@

$(VENV)/.sd-quant-ray: tests/cli/cluster/requirements-ray.txt | $(PYTHON)
	$(PIP) --no-deps --upgrade --target $(VENV)/ray --requirement $<
	touch $@

$(VENV)/.sd-quant-peers: tests/unit/benchmarks/requirements-peers.txt | $(PYTHON)
	$(PIP) --no-deps --upgrade --target $(VENV)/peers --requirement $<
	touch $@

$(VENV)/.sd-quant-consumers: tests/programs/requirements-consumers.txt | $(PYTHON)
	$(PIP) --no-deps --upgrade --target $(VENV)/consumers --requirement $<
	touch $@
