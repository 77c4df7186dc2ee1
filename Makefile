# make demo          the main job from start to end, offline, in a few minutes
# make test          the test suite
# make long          the tests that it leaves out, as they take long or are of kinds like others
# make long SHARD=3   the third of SHARDS parts that take equally long, by tests/long_durations.json
# make zoo           every architecture of transformers on every placement: outputs, memory, weights; a table at the end
# make zoo ONLY=kept  only those whose table the guide keeps; ended runs are taken up where they were
# make zoo SHARD=3   the third of SHARDS parts that take equally long, by tests/zoo/durations.json; without a table
# make zoo RECORD=1  also records how long each takes; make long likewise
# make compat        the names of accelerate's modules, counted; its own tests and scripts and peft's of offloading, fetched,
#                    with bigmodel in accelerate's place,
#                    and transformers' own of a checkout that TRANSFORMERS_SOURCE names; then those here that need
#                    diffusers, trl, lm-eval and sentence-transformers
# make clients       the server's tests with clients of other projects (litellm, langchain, guidellm and others), fetched
# make lint          ruff, mypy --strict, import-linter
# make docs          the guide and the API, built strictly into site/
# make test-oldest   the fast tests of planning and dispatching with the oldest PyTorch allowed, make test-newest the newest

PYTHON ?= python3
# One more than the cores of a small machine: some tests wait.
WORKERS ?= 3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test long zoo compat clients lint docs test-oldest test-newest clean
.DELETE_ON_ERROR:

# The stamps are written last: an interrupted environment has none. One that was broken later is found here.
FIND := import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, ("torch", "bigmodel"))))
ifneq ($(wildcard $(VENV)/.ready),)
$(shell $(BIN)/python -c '$(FIND)' >/dev/null 2>&1 || rm -rf $(VENV))
endif

demo: $(VENV)/.ready
	$(BIN)/python -m examples.demo

test: $(VENV)/.ready-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

SHARDS ?= 8
PART := $(if $(SHARD),--splits $(SHARDS) --group $(SHARD) --splitting-algorithm least_duration)

long: $(VENV)/.ready-test
	$(BIN)/python -m pytest -m "long and not zoo" -n $(WORKERS) --dist worksteal \
		--durations-path tests/long_durations.json $(PART) $(if $(RECORD),--store-durations)

# What a commit has kept is not run again, so that a run may be ended and taken up later; changed files begin anew.
zoo: COMMIT := $(shell git describe --always --exclude '*' --abbrev=40 --dirty)
zoo: $(VENV)/.ready-test
	rm -rf build/zoo/*-dirty
	BIGMODEL_ZOO=build/zoo/$(COMMIT) $(BIN)/python -m pytest tests/zoo -m "$(ONLY)" -n $(WORKERS) --dist worksteal \
		--durations-path tests/zoo/durations.json $(PART) $(if $(RECORD),--store-durations); found=$$?; \
	test $$found -gt 1 || test -n "$(SHARD)" || $(BIN)/python -m tests.zoo.table build/zoo/$(COMMIT) benchmarks/results/zoo-virtual.json; exit $$found

compat: $(VENV)/.ready-test
	$(PIP) install --quiet --constraint constraints.txt parameterized datasets evaluate timeout-decorator
	$(BIN)/python -m tests.compat.peers.names
	$(BIN)/python -m tests.compat.peers.accelerate
	$(BIN)/python -m tests.compat.peers.scripts
	$(BIN)/python -m tests.compat.peers.peft
	$(BIN)/python -m tests.compat.peers.transformers
	-$(PIP) install --quiet --constraint constraints.txt diffusers trl lm-eval sentence-transformers
	$(BIN)/python -m pytest tests/compat/test_other_libraries.py -m "" -v -rs

clients: $(VENV)/.ready-test
	$(PYTHON) tests/clients.py

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test-oldest test-newest: test-%: $(VENV)/.ready-test
	$(PYTHON) tests/torch_versions.py $*

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.ready-test: $(VENV)/.ready
	$(PIP) install --quiet --constraint constraints.txt --editable '.[test,lint]'
	# DeepSpeed asks for more than its CPU path needs: it comes without, and its few needs beside it.
	DS_BUILD_OPS=0 $(PIP) install --quiet --no-deps --constraint constraints.txt deepspeed
	$(PIP) install --quiet --constraint constraints.txt einops hjson msgpack ninja py-cpuinfo
	touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	$(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-clients .venv-clients-llama-index build site *.egg-info
