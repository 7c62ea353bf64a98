# Every target creates its environment if it is missing.
PYTHON ?= python3
# Tests start thousands of processes, and none should compile what another one has.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
PEERS := .venv-peers/bin
# Each process of tests may start workers; a third one computes while others wait.
TWO := -n 2 --dist worksteal
THREE := -n 3 --dist worksteal
# pip takes the newest torch of its index where it is told none.
TORCHES := $(shell sed -n 's/.*"torch>=\(.*\)",/\1/p' pyproject.toml) $(shell sed -n 's/^torch==//p' constraints.txt) newest
TORCH_TESTS := tests/parity tests/exchange tests/step tests/state tests/checkpoint tests/c10d tests/ddp
PYTHONS := 3.12 3.13 3.14
PYTHON_TESTS := tests/programs tests/train tests/workers tests/data tests/callbacks tests/launch

.PRECIOUS: .venv-torch-%/ready .venv-python-%/ready
.PHONY: demo test fast chaos test-verify test-races test-pages test-ddp test-torch test-python test-places test-peers test-hosts test-clusters test-gpu promises check format bench bench-costs bench-peers bench-gpu gpu docs test-site pictures wheel clean help

demo: .venv/installed      ## install what a user gets, and train a small CNN on two workers and on one, on the CPU
	$(BIN)/unisono demo

test: .venv/ready          ## every test, in about twenty minutes on two cores
	$(BIN)/python -m pytest -q $(THREE) -m "not long and not gpu and not hosts"

fast: .venv/ready          ## the quick tests, in a minute on two cores
	$(BIN)/python -m pytest -q $(TWO) -m "not slow and not long and not gpu and not hosts"

chaos: .venv/ready         ## kill 200 workers on each exchange and 20 launchers, run 30 random programs; SEED=7 chooses the same again
	$(BIN)/python -m pytest -q -m "long and not gpu"
	$(BIN)/python -m tests.chaos.driver --launcher-kills 20 $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.chaos.driver --exchange staged $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.chaos.driver --exchange sim $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.chaos.programs --programs 30 $(if $(SEED),--seed $(SEED))

test-verify: .venv/ready   ## unisono verify on correct programs and on planted mistakes, a few minutes
	$(BIN)/python -m pytest -q -m long tests/verify

test-races: .venv/ready    ## every test, three times, with threads that take turns at every moment; an hour; WHERE=tests/c10d for a part
	$(BIN)/python -m tests.races -q $(TWO) -m "not long and not gpu and not hosts" $(WHERE)

test-pages: .venv/ready    ## all recipes, and what pages say that programs print; two minutes
	$(BIN)/python -m pytest -q $(TWO) -m long tests/test_docs.py tests/test_examples.py

test-ddp: .venv/ready      ## torch's own DDP tests on our backend and class, beside gloo and torch's class
	$(BIN)/python -m tests.ddp.torchs_own --all

test-torch: $(TORCHES:%=test-torch-%)  ## parity and contracts on the oldest torch that we claim, the pinned and the newest one; TORCHES=2.12.1 for others

test-torch-%: .venv-torch-%/ready
	.venv-torch-$*/bin/python -m pytest -q $(TWO) -m "not long and not gpu and not hosts" $(TORCH_TESTS)

test-python: $(PYTHONS:%=test-python-%)  ## what depends on the interpreter, on python3.12, python3.13 and python3.14; PYTHONS=3.14 for one

test-python-%: .venv-python-%/ready
	.venv-python-$*/bin/python -m pytest -q $(TWO) -m "not long and not gpu and not hosts" $(PYTHON_TESTS)

test-places: .venv/ready   ## a run on full and read-only disks, without HOME, network or /dev/shm, with long names, …, in one table; three minutes, as root
	$(BIN)/python -m tests.places

test-peers: .venv/ready .venv-peers/ready  ## Accelerate, transformers and Lightning on our backend, and Ray Train, from .venv-peers
	UNISONO_PEERS="$(CURDIR)/$(PEERS)/python" $(BIN)/python -m pytest -q tests/peers
	UNISONO_PEERS="$(CURDIR)/$(PEERS)/python" $(BIN)/python -m pytest -q -m long tests/verify -k with_

test-hosts: .venv/ready    ## several hosts, made of network namespaces, and Slurm where slurm-wlm and munge are installed; up to an hour, skipped without root
	$(BIN)/python -m pytest -q -n 3 -m hosts tests/hosts

test-clusters: .venv/ready ## real Slurm and Open MPI on those hosts, installed with apt where root may; about ten minutes, skipped with a reason elsewhere
	.ci/packages slurmctld slurm-wlm munge
	.ci/packages mpirun openmpi-bin
	$(BIN)/python -m pytest -q -n 2 -m hosts $(WHERE) tests/hosts/test_slurm.py

test-gpu: .venv/ready      ## what needs a GPU, skipped without one; UNISONO_TEST_DEVICE=cpu shows that it runs
	$(BIN)/python -m pytest -q -m gpu -W default tests/gpu

promises: .venv/ready      ## each row of docs/guarantees.md, the tests that prove it, and how they ended last
	$(BIN)/python -m tests.promises

check: .venv/ready         ## style, strict types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/ready         ## every workload against plain torch and DDP, ratios in one sitting
	$(BIN)/python -m bench
	$(BIN)/python -m bench.allreduce
	$(BIN)/python -m bench.allreduce --workers 4

bench-costs: .venv/ready   ## memory, start, resume and end of a run beside plain torch and DDP; ten minutes
	$(BIN)/python -m bench.costs

bench-peers: .venv-peers/ready  ## the CNN against Accelerate, Lightning Fabric and Lightning, which get .venv-peers
	$(PEERS)/python -m bench.peers

bench-gpu: .venv/ready     ## GPT-2, ResNet-50 and a small network on a GPU, beside a bare loop and peers
	$(BIN)/python -m bench.gpu

gpu: .venv/ready           ## test-gpu and bench-gpu in one sitting of ten minutes, all figures in one file
	$(BIN)/python -m bench.gpu.sitting

docs: .venv/docs           ## the documentation as a site, in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test-site: .venv/docs      ## the site in a browser: links, contrast, width, console; a minute or two, needs chromium
	$(BIN)/python -m pytest -q -m long tests/test_site.py

pictures: .venv/ready      ## docs/pictures and outputs on pages and in the notebook again, from runs on this machine; needs chromium
	$(BIN)/python -m docs.pictures.make
	$(BIN)/python -m tests.shown_runs

wheel: .venv/ready         ## source distribution, and from it the wheel, in dist/; then `unisono demo` in a fresh environment; a few minutes
	rm -rf dist
	$(BIN)/python -m build --quiet
	PYTHON=$(PYTHON) .ci/wheel

clean:
	rm -rf .venv .venv-peers .venv-torch-* site dist build

help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## */\t/'

.venv/installed: pyproject.toml constraints.txt
	@echo "torch and 20 small packages into .venv: 1 GB if pip finds torch for CPUs, 6 GB with torch for GPUs"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e .
	touch .venv/installed

.venv/ready: .venv/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch .venv/ready

.venv/docs: .venv/ready
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch .venv/docs

.venv-peers/ready: pyproject.toml constraints.txt bench/peers/requirements.txt
	$(PYTHON) -m venv .venv-peers
	$(PEERS)/python -m pip install --quiet -r bench/peers/requirements.txt -e .
	touch .venv-peers/ready

.venv-python-%/ready: pyproject.toml constraints.txt
	python$* -m venv .venv-python-$*
	.venv-python-$*/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

.venv-torch-%/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-torch-$*
	grep -Ev '^(torch|setuptools)=' constraints.txt > .venv-torch-$*/constraints.txt
	.venv-torch-$*/bin/python -m pip install --quiet -c .venv-torch-$*/constraints.txt torch$(patsubst %,==%,$(filter-out newest,$*)) -e '.[test]'
	touch $@
