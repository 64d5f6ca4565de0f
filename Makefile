# `make demo` and `make test` work as the first command on a fresh machine with Python 3.11 to 3.13, a C++20 compiler and
# make: they install everything else into .venv. Later they start at once, and rebuild only what changed.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
NATIVE := python/fluxion_sglang/_native/libfluxion.so
LAB := python/fluxion_lab/_native/libfluxion_lab.so
SOURCES := CMakeLists.txt $(shell find csrc -type f 2>/dev/null)
CXX_FILES := $(filter %.h %.cc %.cuh %.cu,$(SOURCES) $(shell find test/fuzz test/native -type f 2>/dev/null))
TESTS := test/engine test/soak test/faults test/models test/unit test/gpu test/docs test/wheel
# One process runs all tests of a file, because they share a server; files with servers come first. A process that dies
# ends the run: with a replacement pytest would wait for the lost tests forever.
PYTEST := $(BIN)/python -m pytest -n $(shell nproc) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Tests under sanitizers: unit tests of the native library. They reserve terabytes of addresses, which one test forbids.
SANITIZED := arguments operations canary prefill linear linear_quantised experts delta_rule mailbox layer_server helping listed sketch hgca lfps lfps_tables sharing families queue engine engine_failures resident native attend kernels int8 host_pool_native progressive executors measure features predictor_network probe device_kernels device_mailbox stream_device near offload
SANITIZED_TESTS := $(foreach name,$(SANITIZED),$(wildcard test/unit/*/test_$(name).py)) --deselect \
  test/unit/executor/test_engine_failures.py::test_memory_that_runs_out_fails_a_layer_and_leaves_the_engine_whole
# The file for a sanitizer's result. Default: the results of this machine, if all of those tests ran.
RECORD ?=
# Arguments for the program behind a target: make demo ARGS="--help", make test ARGS="-k config".
ARGS ?=

# Work in an empty environment: some libraries read these two variables without a check.
ifeq ($(origin PATH),undefined)
  export PATH := /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
endif
# HOME must also exist (users of services have none).
ifeq ($(if $(HOME),$(wildcard $(HOME)/.)),)
  export HOME := $(CURDIR)/$(VENV)/home
endif

# Enable Python's cache of compiled files: otherwise every process of a server compiles all of SGLang and PyTorch again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: every-isa help demo lab test test-all test-sglang lint sanitize soak fuzz fuzz-requests sbom audit checkpoints quality bench gpu docs wheel clean install native-tests

help:
	@echo "make demo      serve the bundled model with the flag and ask it about a long document"
	@echo "make lab       install the policies that Fluxion is compared with (fluxion-lab) beside it"
	@echo "make test      style, types and the quick tests (7 minutes on 2 cores)"
	@echo "make test-all  every test, the native unit tests under sanitizers, and make audit (two hours)"
	@echo "make test-sglang VERSION=0.5.24  the engine tests with another SGLang; ARGS=\"test/engine\" for all of them"
	@echo "make lint      style and types, C++ included"
	@echo "make sanitize  native unit tests under ThreadSanitizer, then AddressSanitizer and UBSan"
	@echo "make soak      ten minutes of mixed load on a server; ARGS=\"--minutes 480\" for hours"
	@echo "make fuzz      a million random operations on pool, tree and policies, under AddressSanitizer"
	@echo "make fuzz-requests  odd requests to a server in one process; ARGS=\"--seed 2 --bodies 9000\""
	@echo "make sbom      what the environment consists of, in dist/sbom.json; make audit: its known vulnerabilities"
	@echo "make checkpoints  two public models and two long texts, into ~/.cache/fluxion; ARGS=smollm2 for one of them"
	@echo "make quality   what policies cost on the public models, in hours; make bench: all benchmarks (see benchmark/)"
	@echo "make gpu       all that a machine with a GPU is to show; ARGS=--simulated tries the command on the CPU"
	@echo "make docs      the documentation as a site, in build/site"
	@echo "make wheel     a manylinux wheel, in dist"
	@echo "make clean     remove build products and caches; keeps $(VENV)"

demo: install
	@CUDA_VISIBLE_DEVICES= $(BIN)/python -m fluxion_sglang ask --demo $(ARGS)

lab: $(VENV)/.lab $(LAB)

test: $(VENV)/.dev native-tests
	$(BIN)/ruff check .
	$(BIN)/mypy
	FLUXION_TEST_EFFORT=$${FLUXION_TEST_EFFORT:-0.25} $(PYTEST) $(TESTS) $(ARGS)

test-all: lint every-isa native-tests $(VENV)/.docs
	@cmake=$(CURDIR)/$(BIN)/cmake; if $$cmake --build build/native --target help | grep -q fluxion_cuda; then $$cmake --build build/native --target fluxion_cuda; fi
	$(PYTEST) --full $(TESTS) $(ARGS)
	@$(MAKE) audit
	FLUXION_TEST_EFFORT=0.1 $(MAKE) sanitize RECORD=$(or $(RECORD),build/sanitizers.json)

# The native library with the kernels of every instruction set.
every-isa: install
	@FLUXION_CMAKE_ARGS="$$FLUXION_CMAKE_ARGS -DFLUXION_ISAS=all" $(BIN)/python tools/install.py --native

test-sglang: $(VENV)/.dev native-tests
	@OVERRIDE="$(OVERRIDE)" $(BIN)/python tools/test_sglang.py "$(VERSION)" $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

ifeq ($(origin SANITIZED)$(ARGS),file)
  recorded = PYTHONPATH=test:. $(BIN)/python tools/sanitized.py $* build/$* $(RECORD:%=--out %)
endif
sanitize: sanitize-thread sanitize-address
sanitize-thread: RUNTIME := libtsan.so
sanitize-address: RUNTIME := libasan.so

# FLUXION_LIBRARY names the sanitized library. Python is not sanitized, so the sanitizer's runtime must be preloaded, with
# libstdc++ so that it can intercept its exceptions. Leaks are not checked, because Python keeps memory. Reports go to a
# file, because pytest drops the output of passing tests.
sanitize-%: $(VENV)/.dev
	@echo "Building the native library in build/$*"
	@mkdir -p build/$*; rm -f build/$*/report.* build/$*/tests.xml
	@export PATH="$(CURDIR)/$(BIN):$$PATH"; \
	(cmake -S . -B build/$* -GNinja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DFLUXION_SANITIZE=$* -DFLUXION_ISAS=all && \
	  cmake --build build/$* --target fluxion fluxion_lab fluxion_tests) \
	  > build/$*/build.log 2>&1 || { tail -n 60 build/$*/build.log >&2; exit 1; }
	@report=$(CURDIR)/build/$*/report; \
	LD_PRELOAD="$$($(CXX) -print-file-name=$(RUNTIME)) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	FLUXION_LIBRARY=$(CURDIR)/build/$*/libfluxion.so \
	TSAN_OPTIONS="suppressions=$(CURDIR)/test/tsan.supp log_path=$$report" \
	ASAN_OPTIONS="detect_leaks=0 log_path=$$report" UBSAN_OPTIONS="print_stacktrace=1 log_path=$$report" \
	  $(PYTEST) -q --junitxml build/$*/tests.xml $(SANITIZED_TESTS) $(ARGS); status=$$?; \
	cat $$report.* 2>/dev/null && status=1; $(or $(recorded),:); exit $$status

soak: $(VENV)/.dev $(LAB)
	PYTHONPATH=test:. $(BIN)/python -m soak $(ARGS)

# `make sanitize-address` builds this library, too.
fuzz: RUNTIME := libasan.so
fuzz: $(VENV)/.dev
	@mkdir -p build/address
	@export PATH="$(CURDIR)/$(BIN):$$PATH"; \
	(cmake -S . -B build/address -GNinja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DFLUXION_SANITIZE=address && \
	  cmake --build build/address --target fluxion fluxion_lab) \
	  > build/address/build.log 2>&1 || { tail -n 60 build/address/build.log >&2; exit 1; }
	LD_PRELOAD="$$($(CXX) -print-file-name=$(RUNTIME)) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	FLUXION_LIBRARY=$(CURDIR)/build/address/libfluxion.so ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	PYTHONPATH=test $(BIN)/python -m fuzz.operations $(ARGS)

fuzz-requests: $(VENV)/.dev
	PYTHONPATH=test:. $(BIN)/python -m faults $(ARGS)

# The tool runs in an environment of its own, so that its dependencies are not listed.
sbom: $(VENV)/.installed
	@mkdir -p dist
	$(BIN)/uv tool run --from cyclonedx-bom cyclonedx-py environment --output-reproducible -o dist/sbom.json $(BIN)/python

audit: $(VENV)/.installed
	@$(BIN)/python tools/audit.py

checkpoints: $(VENV)/.checkpoints
	@$(BIN)/python tools/checkpoints.py $(ARGS)

quality: $(VENV)/.bench native-tests
	$(BIN)/python -m benchmark public $(ARGS)

bench: $(VENV)/.bench native-tests
	$(BIN)/python -m benchmark $(ARGS)

gpu: $(VENV)/.bench $(VENV)/.dev native-tests
	$(BIN)/python -m benchmark.gpu_day $(ARGS)

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict $(ARGS)

wheel: $(VENV)/.installed
	@$(BIN)/python tools/wheel.py

clean:
	rm -rf build dist python/*.egg-info python/fluxion_lab/*.egg-info python/fluxion_*/_native .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find python test benchmark -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

install: $(VENV)/.installed $(NATIVE)
	@mkdir -p "$$HOME"

$(VENV)/.installed: pyproject.toml setup.py tools/install.py
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	  if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then \
	    found=$$python; break; \
	  fi; \
	done; \
	if [ -z "$${found:-}" ]; then echo "error: no Python 3.11 to 3.13 found; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; fi; \
	mkdir -p "$$HOME"; $$found tools/install.py
	@touch $@

# Extras of pyproject.toml: .venv/.dev for the tests, .venv/.docs for the site. .venv/.lab is fluxion-lab.
$(VENV)/.dev $(VENV)/.bench: $(VENV)/.lab
$(VENV)/.lab: python/fluxion_lab/pyproject.toml
$(VENV)/.%: $(VENV)/.installed | $(NATIVE)
	@$(BIN)/python tools/install.py --extras $*
	@touch $@

$(NATIVE): $(SOURCES) | $(VENV)/.installed
	@$(BIN)/python tools/install.py --native

$(LAB): $(SOURCES) $(NATIVE)
	@[ -f build/native/build.ninja ] || $(BIN)/python tools/install.py --native
	@$(BIN)/cmake --build build/native --target fluxion_lab > build/native/lab.log 2>&1 || { tail -n 60 build/native/lab.log >&2; exit 1; }
	@grep ': warning: ' build/native/lab.log || true
	@mkdir -p $(@D); cp build/native/$(@F) $@

# Libraries for tests only: the simulated device, and a faulty one. Built beside the native library.
native-tests: install $(LAB)
	@[ -f build/native/build.ninja ] || $(BIN)/python tools/install.py --native
	@$(BIN)/cmake --build build/native --target fluxion_tests > build/native/tests.log 2>&1 || { tail -n 60 build/native/tests.log >&2; exit 1; }
	@grep ': warning: ' build/native/tests.log || true
