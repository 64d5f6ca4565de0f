# `make demo` and `make test` work as the first command on a fresh machine that has Python 3.11 to 3.13, a C++20 compiler
# and make: they install everything else into .venv. With .venv in place they start at once, and rebuild only what changed.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := python/fluxion_sglang/_native/libfluxion.so
SOURCES := CMakeLists.txt $(shell find csrc -type f 2>/dev/null)
CXX_FILES := $(filter %.h %.cc,$(SOURCES)) $(wildcard test/fuzz/*.h test/fuzz/*.cc)
# Of the families of models the one that asks most of a backend.
TESTS := $(wildcard test/unit test/engine test/gpu) "test/models/test_models.py::test_family[qwen3-moe]"
# What sanitizers watch: the unit tests of the native library. They reserve terabytes of addresses, which one test forbids.
SANITIZED := dispatcher hot_tiles calibration mailbox layer_server helping listed hgca lfps lfps_tables sharing families queue engine resident guard native attend kernels host_pool_native progressive executors measure features predictor_network probe device_kernels device_mailbox stream_device offload
SANITIZED_TESTS := $(SANITIZED:%=test/unit/test_%.py) --deselect \
  test/unit/test_engine.py::test_memory_that_runs_out_fails_a_layer_and_leaves_the_engine_whole
# Arguments for the program behind a target: make demo ARGS="--help", make test ARGS="-k config".
ARGS ?=

# An empty environment must do: some libraries read these two without asking whether they are there.
ifeq ($(origin PATH),undefined)
  export PATH := /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
endif
ifeq ($(origin HOME),undefined)
  export HOME := $(CURDIR)/$(VENV)/home
endif

.PHONY: help demo test test-models lint sanitize bench clean install

help:
	@echo "make demo     serve the bundled model with the flag and ask it about a long document"
	@echo "make test     ruff, mypy, unit tests, end-to-end tests"
	@echo "make test-models  families of models, grammars, penalties: the same with the flag as without (20 minutes)"
	@echo "make lint     style and types, C++ included"
	@echo "make sanitize native unit tests under ThreadSanitizer, then AddressSanitizer and UBSan"
	@echo "make bench    the benchmarks (see benchmark/)"
	@echo "make clean    remove build products and caches; keeps $(VENV)"

demo: install
	@$(BIN)/python -m fluxion_sglang.demo $(ARGS)

test: install
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(TESTS) $(ARGS)

# Every test starts SGLang twice, and what differs between families is above attention: so `test` has but one of them.
test-models: install
	$(BIN)/python -m pytest test/models $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

sanitize: sanitize-thread sanitize-address
sanitize-thread: RUNTIME := libtsan.so
sanitize-address: RUNTIME := libasan.so

# FLUXION_LIBRARY names the library, which is not the package's. Python knows nothing of sanitizers, so their runtime has
# to be there first; libstdc++ comes with it, for its exceptions to be seen. Leaks are not looked for: Python keeps what
# it keeps. Reports go to a file, because pytest drops what a test that passes has said.
sanitize-%: $(STAMP)
	@echo "Building the native library in build/$*"
	@mkdir -p build/$*; rm -f build/$*/report.*
	@export PATH="$(CURDIR)/$(BIN):$$PATH"; \
	(cmake -S . -B build/$* -GNinja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DFLUXION_SANITIZE=$* && cmake --build build/$*) \
	  > build/$*/build.log 2>&1 || { tail -n 60 build/$*/build.log >&2; exit 1; }
	@report=$(CURDIR)/build/$*/report; \
	LD_PRELOAD="$$($(CXX) -print-file-name=$(RUNTIME)) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	FLUXION_LIBRARY=$(CURDIR)/build/$*/libfluxion.so \
	TSAN_OPTIONS="suppressions=$(CURDIR)/test/tsan.supp log_path=$$report" \
	ASAN_OPTIONS="detect_leaks=0 log_path=$$report" UBSAN_OPTIONS="print_stacktrace=1 log_path=$$report" \
	  $(BIN)/python -m pytest -q $(SANITIZED_TESTS) $(ARGS); status=$$?; \
	cat $$report.* 2>/dev/null; exit $$status

bench: install
	@$(BIN)/python -c "import matplotlib" 2>/dev/null || $(BIN)/pip install -q --no-build-isolation -e ".[bench]"
	$(BIN)/python -m benchmark $(ARGS)

clean:
	rm -rf build dist python/*.egg-info python/fluxion_sglang/_native .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find python test benchmark -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

install: $(STAMP) $(NATIVE)
	@mkdir -p "$$HOME"

# The build requirements go into .venv first, so that the native library is built in place and rebuilt incrementally.
$(STAMP): pyproject.toml setup.py
	@set -e; \
	if [ ! -x $(BIN)/pip ]; then \
	  for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	    if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then \
	      found=$$python; break; \
	    fi; \
	  done; \
	  if [ -z "$${found:-}" ]; then echo "error: no Python 3.11 to 3.13 found; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; fi; \
	  $$found -m venv $(VENV) || { echo "error: $$found cannot make a virtual environment; install its venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }; \
	fi; \
	mkdir -p "$$HOME"; \
	$(BIN)/python -c "import importlib.metadata as m; m.version('sglang')" 2>/dev/null || \
	  echo "Installing SGLang and PyTorch into $(VENV): about 5 minutes and 11 GB of disk, once."; \
	log=$(VENV)/install.log; \
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'], sep='\n')" > $(VENV)/build-requirements.txt; \
	( $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -r $(VENV)/build-requirements.txt && \
	  $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-build-isolation -e ".[dev]" ) > $$log 2>&1 & \
	pid=$$!; waited=0; \
	while kill -0 $$pid 2>/dev/null; do \
	  sleep 1; waited=$$((waited + 1)); \
	  if [ $$((waited % 20)) -eq 0 ]; then printf '  %4d s  %s\n' $$waited "$$(tail -n 1 $$log | cut -c 1-100)"; fi; \
	done; \
	wait $$pid || { tail -n 30 $$log >&2; echo "error: the installation failed; the whole log is in $$log" >&2; exit 1; }; \
	touch $@

$(NATIVE): $(SOURCES) | $(STAMP)
	@echo "Building the native library"
	@$(BIN)/python setup.py -q build_ext --inplace > $(VENV)/build.log 2>&1 || { tail -n 60 $(VENV)/build.log >&2; exit 1; }
