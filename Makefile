# make demo | test | test-oldest | test-torch | lint | docs | test-gpu | test-sanitized | bench |
#      wheel | wheels | test-wheels | release-check | clean
# (see CONTRIBUTING.md)
#
# An existing .venv is used. Without one, if the python on PATH has torch (for example on a GPU
# machine without a network), that python is used and the build goes to build/site. Otherwise .venv
# is set up.
SHELL := /bin/bash
SYSTEM_PYTHON ?= python3
HAS_TORCH := $(shell $(SYSTEM_PYTHON) -c 'import importlib.util as u; print(int(u.find_spec("torch") is not None))' 2>/dev/null)
JOBS ?= $(shell nproc)
# Processes that share the Python tests, one more than processors, since some tests wait; with 0 a
# single process runs them all, for a debugger.
TEST_PROCESSES ?= $(shell expr $(JOBS) + 1)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
# Bytecode is kept, whatever the environment says: without it, each process compiles the tests anew,
# and pytest rewrites their assertions.
unexport PYTHONDONTWRITEBYTECODE

ifneq ($(wildcard .venv/bin/python),)
  MODE := venv
else ifeq ($(HAS_TORCH),1)
  MODE := system
else
  MODE := venv
endif

ifeq ($(MODE),venv)
  PY := .venv/bin/python
  # What a target needs (a dependency group of pyproject.toml) is installed when it is first made.
  HAS := .venv/.has-
  INSTALL := $(PY) -m pip install -q --no-build-isolation --no-deps -e . -C cmake.define.TDCOPIER_WERROR=ON
  RUN := PATH="$(CURDIR)/.venv/bin:$$PATH"
  PYTEST := $(RUN) $(PY) -m pytest -n $(TEST_PROCESSES) --dist worksteal
else
  PY := $(SYSTEM_PYTHON)
  HAS := build/.system-has-
  INSTALL := $(PY) -m pip install -q --no-build-isolation --no-deps --upgrade --target build/site . -C cmake.define.TDCOPIER_WERROR=ON
  RUN := PYTHONPATH="$(CURDIR)/build/site$${PYTHONPATH:+:$$PYTHONPATH}"
  # Not from here: python would find the package without its native module first.
  PYTEST := cd build/site && $(RUN) $(PY) -m pytest -n $(TEST_PROCESSES) --dist worksteal -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) $(CURDIR)/tests
endif

.PHONY: demo test built-test-py built-test-cpp test-cpp test-py test-oldest test-torch test-gpu test-sanitized broken-engines bench lint format docs wheel wheels test-wheels release-check build check-tools clean

demo: build $(HAS)demo
	$(RUN) $(PY) tools/demo.py $(if $(filter venv,$(MODE)),--complete)

# The C++ tests take what the Python tests, some of which wait, leave of the processors.
test: build
	@$(MAKE) --no-print-directory BUILT=1 -j2 $(HAS)test broken-engines
	@$(MAKE) --no-print-directory BUILT=1 -j2 built-test-py built-test-cpp

built-test-py:
	$(TEST_PY)

built-test-cpp:
	@nice -n 19 $(MAKE) --no-print-directory test-cpp >build/test-cpp.log 2>&1 || \
	  { cat build/test-cpp.log; exit 1; }
	@echo; echo "C++ tests: passed, see build/test-cpp.log"

test-py: build broken-engines $(HAS)test
	$(TEST_PY)

TEST_PY = export TDCOPIER_TEST_DEVICE=sim; $(PYTEST)

# Tests with the oldest tensordict that is supported, and the torchrl that goes with it, ahead of
# the installed ones on the path.
OLDEST := $(CURDIR)/build/oldest
test-oldest: build broken-engines $(HAS)test
	@test -d $(OLDEST)/torchrl || \
	  $(PY) -m pip install -q --no-deps --upgrade --target $(OLDEST) 'tensordict>=0.14.3,<0.15' 'torchrl>=0.14.1,<0.15'
	export TDCOPIER_TEST_TENSORDICT=0.14 TDCOPIER_TEST_DEVICE=sim \
	  PYTHONPATH="$(OLDEST)$${PYTHONPATH:+:$$PYTHONPATH}"; $(PYTEST)

# Tutorials and tests with another torch: TORCH=2.12.1, or with some tests only,
# TESTS="tests/rows tests/copy". The first time takes 4 GB and a complete build.
TORCH ?= 2.12.1
TESTS ?=
test-torch: $(HAS)build $(HAS)test
	export TEST_PROCESSES=$(TEST_PROCESSES); $(RUN) $(PY) tests/other_torch/run.py $(TORCH) $(TESTS)

test-gpu: build broken-engines $(HAS)test
	export FAIL_WITHOUT_CUDA=1 TDCOPIER_TEST_DEVICE=cuda; $(PYTEST)
	export TDCOPIER_TEST_DEVICE=sim TDCOPIER_TEST_SCHEDULES=2000; $(PYTEST)

# Builds engines whose defects are chosen at run time, for tests/schedules/test_broken_engines.py.
broken-engines: build
	@$(RUN) $(PY) tests/support/build_broken_engines.py

bench: build $(HAS)test
	FAIL_WITHOUT_CUDA=1 $(RUN) $(PY) benchmarks/run.py

# Tests the layer without torch three times: under the address and undefined-behaviour sanitizers,
# those with threads under the thread sanitizer, and as it is shipped, with the library of the real build.
SANITIZED := address,undefined thread none
test-cpp: build
	@set -e; for kind in $(SANITIZED); do \
	  flags="$$kind"; level=-Og; library=; \
	  [ "$$kind" != none ] || { flags=; level="-O2 -DNDEBUG"; \
	    library=$$($(RUN) $(PY) tests/support/build_broken_engines.py --base); }; \
	  $(RUN) cmake -S . -B build/cpp-$$kind -G Ninja -DTDCOPIER_CPP_TESTS=ON -DTDCOPIER_WERROR=ON \
	    -DTDCOPIER_SANITIZE="$$flags" -DTDCOPIER_BASE_LIBRARY="$$library" \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="$$level -g1" >/dev/null; \
	  $(RUN) cmake --build build/cpp-$$kind; \
	  echo "C++ tests, sanitizer: $$kind"; \
	  $(RUN) ctest --test-dir build/cpp-$$kind --output-on-failure -j $(JOBS); \
	done

# Tests everything on the simulated device, with the modules under the thread sanitizer and then
# under the address and undefined-behaviour sanitizers, which also find leaks. Each has a build of
# its own.
test-sanitized: $(HAS)build $(HAS)test
	@set -e; for kind in thread address; do \
	  name=tsan; flags=thread; [ $$kind = thread ] || { name=asan; flags=address,undefined; }; \
	  $(RUN) $(PY) -m pip install -q --no-build-isolation --no-deps --upgrade \
	    --target build/$$name/site . -C build-dir=build/$$name/{wheel_tag} \
	    -C cmake.build-type=RelWithDebInfo -C cmake.define.TDCOPIER_WERROR=ON \
	    -C cmake.define.TDCOPIER_SANITIZE="$$flags" -C cmake.define.CMAKE_UNITY_BUILD=OFF; \
	  $(RUN) $(PY) tests/sanitizers/run.py $$kind build/$$name/site; \
	done

lint: build $(HAS)test $(HAS)lint
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(PY) tools/check_layers.py
	$(PY) tools/check_words.py
	$(RUN) mypy
	$(RUN) $(PY) -m mypy.stubtest --allowlist tools/stubtest_allowlist.txt tdcopier._C tdcopier._testing tdcopier._sim
	$(RUN) clang-tidy --quiet csrc/base/*.cpp -- -std=c++20 -Icsrc
	$(RUN) clang-format --dry-run --Werror $$(git ls-files -co --exclude-standard 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'tests/cpp/*.h' 'tests/cpp/*.cpp')

format: $(HAS)lint
	$(RUN) ruff check --fix .
	$(RUN) ruff format .
	$(RUN) clang-format -i $$(git ls-files -co --exclude-standard 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'tests/cpp/*.h' 'tests/cpp/*.cpp')

docs: build $(HAS)test $(HAS)docs
	$(RUN) $(PY) -m sphinx -W --keep-going -b html docs docs/_build/html
	$(RUN) $(PY) -m pytest -q docs/test_api_page.py

# A wheel in dist/ for the Python and the torch that are installed.
wheel: $(HAS)build
	$(PY) -m pip wheel -q --no-build-isolation --no-deps --wheel-dir dist .
	@echo "dist: $$(ls -t dist | head -1)"

# Wheels in dist/, with modules for these versions of torch, for the Pythons that are found; and a
# run of each pair without a compiler (4 GB for each torch, then 1 GB for each pair, while it runs).
TORCHES ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
PYTHONS ?= 3.10 3.11 3.12 3.13
wheels: $(HAS)build
	$(PY) tools/build_wheels.py --torch $(TORCHES) --python $(PYTHONS) --out dist

test-wheels: $(HAS)build
	$(PY) tests/other_torch/pairs.py --dist dist --torch $(TORCHES) --python $(PYTHONS) --json docs/design/wheels.json

# What a release still lacks.
release-check: $(HAS)release
	$(PY) tools/release_check.py

# BUILT: another make has done so, and has started this one.
build: $(HAS)build
	@$(if $(filter command,$(origin BUILT)),,$(INSTALL))

# ---- set-up -------------------------------------------------------------------------------------
check-tools:
	@$(SYSTEM_PYTHON) tools/check_tools.py

.venv/bin/python: | check-tools
	@test -x $@ || $(SYSTEM_PYTHON) -m venv .venv
	@$@ -m pip install -q --upgrade 'pip>=25.1'

# Of the many packages for tests, few modules are used: those are compiled when they are imported.
COMPILE :=
.venv/.has-test: COMPILE := --no-compile
.venv/.has-%: pyproject.toml | .venv/bin/python
	@echo "setting up .venv for: $* (the first time this may take minutes)"
	@.venv/bin/python -m pip install -q $(COMPILE) --group build --group $*
	@if [ $* = test ]; then .venv/bin/python -m pip install -q --no-deps --upgrade \
	  --target .venv/torchvision --group torchvision; fi
	@touch $@

# Without a network, tests and benchmarks say themselves what they lack.
build/.system-has-%: | check-tools
	@$(PY) -c 'import torch, numpy, pybind11, scikit_build_core' || { \
	  echo "this python has torch but not all that the build needs: numpy, pybind11, scikit-build-core" >&2; exit 1; }
	@mkdir -p build && touch $@

clean:
	rm -rf build dist docs/_build docs/tutorials .venv
