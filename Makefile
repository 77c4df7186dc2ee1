# make demo   the main job from start to end, offline, in a few minutes
# make test   the whole test suite
# make lint   ruff, mypy --strict, import-linter

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test lint clean venv-check
.DELETE_ON_ERROR:

demo: $(VENV)/.ready
	$(BIN)/python -m examples.demo

test: $(VENV)/.ready-test
	$(BIN)/python -m pytest

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The stamp is written last: an interrupted or broken environment has none, or fails the check, and is made anew.
$(VENV)/.ready: pyproject.toml constraints.txt | venv-check
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

venv-check:
	@if [ -e $(VENV)/.ready ] && ! $(BIN)/python -c 'import bigmodel, torch' >/dev/null 2>&1; then \
		echo "$(VENV) is broken; making it anew" >&2; rm -rf $(VENV); fi

clean:
	rm -rf $(VENV) build *.egg-info
