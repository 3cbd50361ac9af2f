# Set-up needs nothing but Python (>= 3.11), its venv module, and a C++ compiler for torch.compile.
#   make demo    set up .venv, then train a small network, kill it ten times and compare the bits (80 seconds)
#   make train   set up .venv (about two minutes) and train a small GPT (about four)
#   make test    set up .venv and run the tests; make test-all the slow ones too; make test-tenth a tenth of the slow ones
#   make test-system   the tests of checkpoints with the system's own Python; make fuzz N=10000 damages so many checkpoints
#   make test-torch TORCH=2.15.0 [PYTHON=python3.12] [TEST_ARGS=tests/mesh]   the tests with another torch, in an environment that is
#                kept in the user's cache; make test-versions runs a part of them with the oldest torch and the newest
#   make test-elastic   the tests of elastic ranks with the newest torch; make chaos-elastic N=200 makes so many faults
#   make release   build sdist and wheel, install the wheel into a fresh environment and try it there
#   make explore N=500   try random programs
#   make chaos   kill runs N times and compare their ends (figures in build/chaos.txt); make bench measures what the library costs (figures in build/bench)
PYTHON ?= python3
VENV ?= .venv
TRAIN_ARGS ?=
TEST_ARGS ?=

BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==\([^ ;]*\).*/\1/p' constraints.txt)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := danling examples benchmarks scripts tests

.PHONY: demo train test test-all test-tenth test-system test-torch test-versions test-third test-elastic release chaos chaos-elastic fuzz explore bench lint format docs clean
.DELETE_ON_ERROR:

# Kills a training ten times, and compares the bits.
demo: $(VENV)/.core
	$(BIN)/python -m danling.demo

# One thread: with more, an update of so small a model mostly waits, on a busy machine several times longer.
train: $(VENV)/.core
	OMP_NUM_THREADS=1 $(BIN)/python examples/gpt.py $(TRAIN_ARGS)

# Four at a time, since many wait for the processes that they start, in forks of one process that loads the tests, which takes half a
# minute; without those marked slow, which are further variants of what the others show. `make test-all` runs everything.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist worksteal -m "not slow" $(TEST_ARGS)

test-all: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(TEST_ARGS)

# A tenth of those marked slow: another one every day and after every commit. TENTH=3 repeats one.
TENTH ?= $(shell echo $$(( ($$(date -u +%s) / 86400 + $$(git rev-list --count HEAD 2>/dev/null || echo 0)) % 10 )))
test-tenth: $(VENV)/.dev
	@echo "== A tenth of the slow tests. make test-tenth TENTH=$(TENTH) repeats it."
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --tenth $(TENTH) $(TEST_ARGS)

# The tests of checkpoints with the system's own Python, where that is another release.
test-system: $(VENV)/.dev
	scripts/test_system_python.sh $(BIN)/python build/venv-system $(TORCH)

test-torch:
	python3 scripts/test_torch.py --python $(PYTHON) $(TORCH) $(TEST_ARGS)

# A version whose environment takes longer than seven minutes to install is left out and named. VERSIONS_ARGS=--install only installs them.
# `make test-third` takes a third of the tests, another one every day and after every commit. THIRD=2 repeats one.
THIRD ?= $(shell echo $$(( ($$(date -u +%s) / 86400 + $$(git rev-list --count HEAD 2>/dev/null || echo 0)) % 3 )))
test-versions:
	python3 scripts/test_torch.py --python $(PYTHON) --seconds 420 $(VERSIONS_ARGS) --quick
test-third:
	@echo "== A third of the tests with other releases of torch. make test-third THIRD=$(THIRD) repeats it."
	$(MAKE) test-versions VERSIONS_ARGS="$(VERSIONS_ARGS) --third $(THIRD)"

# Elastic ranks need a newer torch than the pinned one.
NEWEST := $(shell sed -n 's/^torch==\([^ ;]*\).*/\1/p' requirements-newest.txt)
test-elastic:
	OMP_NUM_THREADS=1 python3 scripts/test_torch.py --python $(PYTHON) $(NEWEST) tests/elastic $(TEST_ARGS)

chaos-elastic:
	mkdir -p build
	OMP_NUM_THREADS=1 CHAOS_KILLS=$(N) CHAOS_REPORT=$(CURDIR)/build/chaos.txt \
		python3 scripts/test_torch.py --python $(PYTHON) $(NEWEST) tests/elastic/test_chaos.py -s

# dist/ has the files afterwards; README's program and `danling doctor` have run from the installed wheel.
release: $(VENV)/.dev
	scripts/release.sh $(BIN)/python dist

# N kills or more in all: half of them at random instants, and one at every system call of a restart and a save (where strace is installed).
# CHAOS=tests/guarantees/test_kill_ranks.py kills one rank of two or both, N times; CHAOS_SEED begins elsewhere.
N ?= 50
CHAOS := tests/guarantees/test_kill_at_every_call.py tests/guarantees/test_kill_anywhere.py tests/guarantees/test_kill_ranks.py tests/guarantees/test_lost_machines.py tests/guarantees/test_replica_groups.py tests/stream/test_processes.py
chaos: $(VENV)/.dev
	mkdir -p build && rm -f build/chaos.txt
	OMP_NUM_THREADS=1 CHAOS_KILLS=$(N) CHAOS_REPORT=$(CURDIR)/build/chaos.txt $(BIN)/python -m pytest $(CHAOS)
	awk '{ n = $$1; e = $$3; $$1 = $$2 = $$3 = $$4 = ""; kills[$$0] += n; ends[$$0] += e; all += n; ended += e } END { \
		for (what in kills) printf "%6d kills %5d ends %s\n", kills[what], ends[what], what; print all " kills, " ended " ends compared" }' build/chaos.txt

# N damaged checkpoints of every kind on every road; FUZZ_SEED begins elsewhere.
fuzz: $(VENV)/.dev
	OMP_NUM_THREADS=1 FUZZ_CASES=$(N) $(BIN)/python -m pytest tests/security/test_fuzz.py

# N random programs, each run in many ways and compared with a loop by hand; SEED repeats a search, BUDGET is in seconds.
# A finding is printed as a script with the command that replays it. STACKS=1 draws those of several processes too.
SEED ?=
BUDGET ?= 2400
STACKS ?=
explore: $(VENV)/.dev
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests $(BIN)/python -m explore.search --programs $(N) --budget $(BUDGET) \
		$(if $(SEED),--seed $(SEED)) $(if $(STACKS),--stacks)

bench: $(VENV)/.dev
	mkdir -p build/bench
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/peers.py --json build/bench/peers.json --plot build/bench/peers.png
	for name in step_cost distributed_cost accelerate_cost evaluation telemetry keyed_randomness checkpoints resume_time compile streams; do \
		echo "== $$name"; OMP_NUM_THREADS=1 $(BIN)/python benchmarks/$$name.py --json build/bench/$$name.json || failed=1; \
	done; exit $${failed:-0}

lint: $(VENV)/.dev docs
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# With --quiet, mkdocs would not count the warnings that --strict refuses.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python scripts/check_links.py site

clean:
	rm -rf $(VENV) build dist site experiments *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make a second call quick; a changed requirement installs again.
# venv writes pip last: without it, the environment was left half made.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: constraints.txt scripts/install_torch.sh | $(BIN)/pip
	scripts/install_torch.sh $(BIN)/python $(TORCH)
	touch $@

$(VENV)/.core: pyproject.toml constraints.txt $(VENV)/.torch
	$(INSTALL) -e '.[examples]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(VENV)/.core
	$(INSTALL) -e '.[dev]'
	touch $@

$(VENV)/.docs: pyproject.toml constraints.txt $(VENV)/.core
	$(INSTALL) -e '.[docs]'
	touch $@
