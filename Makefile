# make test     install into .venv, lint, type check, run every test
# make demo     train, kill, resume, compare: examples/train_lm.py on real text
# make bench    saves, loads, validation, restarts, recovery, coordination, beside the limits of this machine, minutes;
#               make bench-full: comparison with other systems in all sizes, hours
# make docs     the site: guides, reference, decisions; build/site/index.html
# make wheel    the wheel and the sdist of a release, tried without a compiler; dist/
# make test-oldest   every test with the oldest versions that pyproject.toml allows
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST_ARGS ?=
# With `frameworks` too, the integrations are tested with all frameworks; without, with those that are there.
EXTRAS ?= test,tools
# So many tests at a time. Most of them wait for processes more than they compute: three for two cores.
TEST_JOBS ?= $(shell cores=$$(nproc); jobs=$$((cores + (cores + 1) / 2)); echo $$((jobs > 8 ? 8 : jobs)))
PYTEST := $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal
# Object stores that only tests use. Without npm, or if it fails, their tests are skipped.
SERVERS := build/servers
# What tests of background calls schedule; beside the environment, as it installs an `ft_launcher`, too. Without it they are skipped.
NVRX := build/nvrx

# Tests start hundreds of interpreters: without bytecode, each would compile the packages again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := test
.PHONY: test lint ruff mypy pytest test-faults demo demo-operations bench bench-full docs wheel test-oldest clean

# mypy takes half a minute, so it runs beside the tests; if it fails, they go on, and the exit status says so.
test: ruff
	$(MAKE) --no-print-directory --keep-going --jobs=2 mypy pytest

lint: ruff mypy

ruff: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: $(INSTALLED)
	$(BIN)/mypy

pytest: $(INSTALLED) $(SERVERS)/.installed $(NVRX)/.installed
	$(PYTEST) $(PYTEST_ARGS)

# The crash matrix, 64 real ranks, the fault matrix, the C code and the readers with random input, the laboratory of nodes, unchanged
# programs and frameworks, every benchmark once: all of each (`make test` runs some of it), verbose. Seeds and examples
# are random here, and always the same in `make test`: a test that fails prints how to replay it.
# tests/ckpt/crash has 380 jobs of several faults each, from seeds: 300 of them keep every step in memory; an hour.
# The fault matrix has about 480 jobs of 4 ranks, with time limits in seconds: on a busy machine it takes half an hour.
# The laboratory needs root, iproute2 and nftables; 300 random schedules of 12 s, two at a time, take half an hour.
NODES_SCHEDULES ?= 300
test-faults: export TESTS = full
test-faults: $(INSTALLED)
	$(PYTEST) -v tests/ckpt/crash tests/ckpt/storage tests/ckpt/shared_fs tests/ckpt/objects tests/ckpt/mirroring tests/ckpt/test_interrupted_anywhere.py tests/ckpt/test_many_ranks.py $(PYTEST_ARGS)
	CKPT_PORTABLE=1 $(PYTEST) tests/ckpt/native tests/ckpt/staging tests/ckpt/storage/test_chunk_reader.py tests/ckpt/test_state.py tests/ckpt/loading $(PYTEST_ARGS)
	$(PYTEST) -v tests/inprocess/faults $(PYTEST_ARGS)
	NODES_SCHEDULES=$(NODES_SCHEDULES) $(PYTEST) -v tests/inprocess/nodes $(PYTEST_ARGS)
	$(PYTEST) -v -rA tests/ckpt/native/test_sanitizers.py tests/ckpt/fuzz $(PYTEST_ARGS)
	$(PYTEST) -v tests/inprocess/fault_tolerance tests/inprocess/unchanged tests/examples tests/tools tests/docs $(PYTEST_ARGS)
	$(PYTEST) tests/ckpt/planning tests/ckpt/values tests/ckpt/interop tests/ckpt/replication tests/ckpt/keeper tests/ckpt/integrations tests/inprocess/rank_assignment tests/inprocess/test_agreement.py tests/test_plain_install.py $(PYTEST_ARGS)
	$(PYTEST) tests/ckpt/saving tests/ckpt/async_calls tests/ckpt/ranks tests/ckpt/test_preemption.py tests/ckpt/test_restart.py tests/ckpt/test_scale.py tests/inprocess/test_abort.py tests/inprocess/coordination $(PYTEST_ARGS)

# With ROOT=s3://BUCKET/PREFIX the checkpoints go there; the environment says how (docs/object_stores.md).
demo: $(INSTALLED)
	$(BIN)/python -m tools.demo $(if $(ROOT),--root $(ROOT))

# Needs Prometheus (Debian's package `prometheus`); a minute.
demo-operations: $(VENV)/.installed-prometheus
	$(BIN)/python -m tools.demo.operations

BENCH_ARGS ?=

bench: $(INSTALLED)
	$(BIN)/python -m tools.bench systems $(BENCH_ARGS)
	$(BIN)/python -m tools.bench save validate restart recover coordination

# With the other systems that are not installed yet, if they can be installed; without them otherwise.
bench-full: $(INSTALLED)
	-$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,tools,bench]'
	$(BIN)/python -m tools.bench systems --full $(BENCH_ARGS)

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --config-file docs/site/mkdocs.yml

wheel: $(VENV)/.installed-release
	$(BIN)/python -m tools.release.build_wheel

# PyPI has torch for x86-64 as the CUDA build only: a download of 3 GB with what it needs, which works without a GPU, too.
# UV_TORCH_BACKEND=cpu takes the CPU build from PyTorch's own index.
OLDEST := .venv-oldest

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -n $(TEST_JOBS) --dist worksteal $(PYTEST_ARGS)

$(OLDEST)/.installed: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/python -m uv venv --quiet --clear --seed --python $(BIN)/python $(OLDEST)
	$(BIN)/python -m uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct --editable '.[test,tools]'
	touch $@

$(VENV)/.installed-%: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$*]'
	touch $@

# The stamp is written last: an installation that was interrupted is done again.
$(INSTALLED): pyproject.toml constraints.txt Makefile $(wildcard ckpt/native/*.[ch] inprocess/unblock/*.c)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

$(SERVERS)/.installed: Makefile
	mkdir -p $(SERVERS)
	-timeout 300 npm install --silent --no-audit --no-fund --no-save --prefix $(SERVERS) azurite@3.35.0 s3rver@3.7.1 && touch $@

$(NVRX)/.installed: Makefile $(INSTALLED)
	mkdir -p $(NVRX)
	-$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(NVRX) nvidia-resiliency-ext==0.4.1 && touch $@

clean:
	rm -rf $(VENV) $(OLDEST) demo-out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f ckpt/native/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
