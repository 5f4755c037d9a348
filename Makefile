# Everything a developer runs. Needs Python 3.11, 3.12 or 3.13, and nothing else: environments are
# made in .venv*, and a Java comes from the machine or, where it has none, from a Python package.

.DEFAULT_GOAL := help
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check

# The first of the names that is a Python 3.11 to 3.13 able to make environments. `make PYTHON=…` overrides.
find_python = $(shell for name in $(1); do \
	"$$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, $(2)))' \
	2>/dev/null && command -v "$$name" && break; done)
PYTHON = $(call find_python,python3 python3.13 python3.12 python3.11,14)
OLDEST_PYTHON = $(call find_python,python3.11 python3,12)
NEWEST_PYTHON = $(call find_python,python3.13 python3.12 python3.11 python3,14)

# What a Spark job of environment $(1) is run with: a Java, and that environment's Python in the executors.
# For `$(call spark,ENVIRONMENT) command`; $(2) are options of tools/find_java.py.
spark = JAVA_HOME="$$($(1)/bin/python tools/find_java.py $(2))" && export JAVA_HOME && \
	PATH="$(CURDIR)/$(1)/bin:$$PATH" \
	PYSPARK_PYTHON="$(CURDIR)/$(1)/bin/python" PYSPARK_DRIVER_PYTHON="$(CURDIR)/$(1)/bin/python"

# Make environment $(1) with Python $(2), or say which Python is missing.
make_environment = @test -n "$(2)" || { \
	echo "Expected Python 3.11 to 3.13 with its venv module on PATH (the lowest versions: 3.11), but found none. Name one with 'make PYTHON=...'." >&2; \
	exit 1; }; \
	test -x $(1)/bin/python || { echo "Making $(1) with $(2)"; "$(2)" -m venv $(1); }

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*##/\t/'

# -- environments: a stamp file says that one is made; a changed setup.cfg makes it anew ----------

.venv/.made: setup.cfg
	$(call make_environment,.venv,$(PYTHON))
	@echo "Installing the package and what it needs in .venv (some minutes the first time)"
	.venv/bin/python $(PIP_INSTALL) --editable '.[spark,tensorflow-cpu,examples,test]'
	@touch $@

.venv/.made-dev: .venv/.made
	.venv/bin/python $(PIP_INSTALL) --editable '.[spark,tensorflow-cpu,dev]'
	@touch $@

.venv/.made-fuzz: .venv/.made
	.venv/bin/python $(PIP_INSTALL) --editable '.[spark,tensorflow-cpu,fuzz]'
	@touch $@

.venv-lowest/.made: setup.cfg requirements/lowest.txt
	$(call make_environment,.venv-lowest,$(OLDEST_PYTHON))
	.venv-lowest/bin/python $(PIP_INSTALL) --constraint requirements/lowest.txt --editable '.[spark,tensorflow-cpu,examples,test]'
	@touch $@

.venv-highest/.made: setup.cfg requirements/highest.txt
	$(call make_environment,.venv-highest,$(NEWEST_PYTHON))
	.venv-highest/bin/python $(PIP_INSTALL) --constraint requirements/highest.txt --editable '.[spark,tensorflow-cpu,examples,test]'
	@touch $@

.venv-backends/.made: setup.cfg requirements/backends.txt
	$(call make_environment,.venv-backends,$(PYTHON))
	.venv-backends/bin/python $(PIP_INSTALL) --constraint requirements/backends.txt --editable '.[spark,jax,torch,test]'
	@touch $@

# -- what a user sees first -----------------------------------------------------------------------

.PHONY: demo
demo: .venv/.made ## train on separate executor processes and compare with plain Keras
	@$(call spark,.venv) .venv/bin/python examples/demo.py

# -- tests: `make test ARGS="-k coordinator -x"` passes arguments on to pytest -----------------------

# Two at a time: those of one kind of Spark cluster in one process, the others by their files.
abreast = -n 2 --dist loadgroup

.PHONY: test test-fast fuzz examples docs-run test-lowest test-highest test-backends test-all
test: .venv/.made ## the tests
	@$(call spark,.venv) .venv/bin/python -m pytest $(abreast) $(call whole,installed) $(ARGS)

test-fast: .venv/.made ## only the tests that need no JVM
	.venv/bin/python -m pytest $(abreast) -m "not spark and not cluster" $(ARGS)

fuzz: .venv/.made-fuzz ## a million inputs each for the wire and for the endpoint; ARGS="--inputs N" for others
	@for target in wire http; do .venv/bin/python -W error tests/fuzz.py $$target $(ARGS) || exit 1; done

examples: .venv/.made ## run the examples, except those of demo and packed-job
	@$(call spark,.venv) .venv/bin/python -m pytest tests/spark/test_examples.py --all $(ARGS)

docs-run: .venv/.made ## run every Python block of the documentation
	@$(call spark,.venv) .venv/bin/python -m pytest tests/spark/test_docs_run.py --all $(ARGS)

# What every supported version has to do.
acceptance = tests/unit tests/keras tests/spark/test_acceptance.py

# Spark 3.5 leaves the sockets of its own collect() to the garbage collector, and knows no Java after 21.
test-lowest: .venv-lowest/.made ## the acceptance tests on the oldest versions that are supported
	@$(call spark,.venv-lowest,--newest 21) .venv-lowest/bin/python -m pytest $(abreast) $(acceptance) \
		-W 'ignore:unclosed <socket:ResourceWarning' $(call whole,lowest) $(ARGS)

test-highest: .venv-highest/.made ## the acceptance tests on the newest versions that are supported
	@$(call spark,.venv-highest) .venv-highest/bin/python -m pytest $(abreast) $(acceptance) $(call whole,highest) $(ARGS)

# What every backend has to do. TensorFlow does it in `make test`.
test-backends: .venv-backends/.made ## what every backend has to do, on JAX and on torch
	@for backend in jax torch; do \
		echo "On $$backend"; \
		$(call spark,.venv-backends) KERAS_BACKEND=$$backend .venv-backends/bin/python -m pytest \
			tests/keras/test_contract.py tests/keras/test_proof.py tests/spark/test_backends.py tests/spark/test_string_inputs.py \
			$(call whole,$$backend) $(ARGS) || exit 1; \
	done

# Each test on threads, on executor processes and on a standalone cluster, of which `make test` takes turns.
test-all: whole = --all --record $(1)
test-all: test test-lowest test-highest test-backends packed-job ## the whole product: all version sets and backends

# -- checks of the text ---------------------------------------------------------------------------

.PHONY: lint types docs pictures notebooks
lint: .venv/.made-dev ## ruff: rules and layout; import-linter: layers; sizes and docstrings
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/lint-imports --no-cache
	.venv/bin/python tools/check_style.py sparkdl --docstrings tests benchmarks examples tools docs

types: .venv/.made-dev ## mypy, strict
	.venv/bin/python -m mypy

docs: .venv/.made-dev ## build docs/ into build/docs, a warning is an error
	.venv/bin/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet docs build/docs

pictures: .venv/.made-dev ## draw the pictures of docs/ again, with Graphviz and matplotlib
	.venv/bin/python docs/pictures/speed.py
	@for picture in docs/pictures/*.dot; do dot -Tsvg "$$picture" -o "$${picture%.dot}.svg" || exit 1; done

notebooks: .venv/.made-dev ## execute notebooks/*.ipynb into build/notebooks, and check their outputs
	@for notebook in notebooks/*.ipynb; do \
		test -e "$$notebook" || { echo "There are no notebooks."; exit 0; }; \
		echo "Executing $$notebook"; \
		$(call spark,.venv) .venv/bin/python -m nbconvert --to notebook --execute \
			--config tools/nbconvert_config.py --log-level WARN --output-dir build/notebooks "$$notebook" || exit 1; \
	done
	.venv/bin/python tools/check_notebooks.py build/notebooks

# -- an environment that travels with a job: see docs/how-to/spark-submit.md ----------------------

# venv-pack refuses an editable install, and executors get pyspark from Spark itself.
build/packed/environment.tar.gz: .venv/.made-dev $(shell find sparkdl -name '*.py' -o -name '*.json' -o -name 'page.*')
	rm -rf build/packed build/lib build/bdist.*
	mkdir -p build/packed
	.venv/bin/python -m venv build/packed/environment
	build/packed/environment/bin/python $(PIP_INSTALL) 'pandas<3' '.[tensorflow-cpu]'
	.venv/bin/venv-pack --prefix build/packed/environment --compress-level 1 --output $@ --quiet

.PHONY: packed packed-job
packed: build/packed/environment.tar.gz ## pack an environment for spark-submit --archives

# Its Spark home is links to pyspark, because local-cluster leaves the unpacked environments in it.
packed-job: packed ## run examples/spark_submit_job.py on executors that have only the packed environment
	@rm -rf build/spark && mkdir -p build/spark
	@ln -s $(CURDIR)/.venv/lib/python3*/site-packages/pyspark/* build/spark && rm -f build/spark/work
	@$(call spark,.venv) SPARK_HOME=$(CURDIR)/build/spark PYSPARK_PYTHON=./environment/bin/python \
		build/spark/bin/spark-submit --master 'local-cluster[2,1,1024]' \
		--archives 'build/packed/environment.tar.gz#environment' examples/spark_submit_job.py $(ARGS)
	@rm -rf build/spark

# -- a release: see docs/reference/versions.md -----------------------------------------------------

# An old build/lib would put removed modules into the wheel.
.PHONY: dist dist-check
dist: .venv/.made-dev ## build the wheel and the source distribution into dist
	rm -rf dist build/lib build/bdist.*
	.venv/bin/python -m build --outdir dist .

# The script comes from the README, and runs outside the clone, where only the wheel has sparkdl. It runs once:
# the source distribution has to install the same files, for which it needs no dependencies.
dist-check: dist ## install the wheel, and the source distribution, into empty environments; run the script of the README
	rm -rf build/dist-check && mkdir -p build/dist-check/empty
	.venv/bin/python -m venv build/dist-check/environment
	build/dist-check/environment/bin/python $(PIP_INSTALL) "$$(echo dist/*.whl)[spark,tensorflow-cpu]"
	@JAVA_HOME="$$(.venv/bin/python tools/find_java.py)" && export JAVA_HOME && cd build/dist-check/empty && \
		env -u PYTHONPATH -u PYSPARK_PYTHON ../environment/bin/python $(CURDIR)/tests/pages.py README.md
	@cd build/dist-check/empty && ../environment/bin/python -c \
		'from sparkdl.server.monitoring import document; [document.live(kind, csrf="", nonce="") for kind in ("run", "overview")]'
	@echo "The script of the README runs with $$(echo dist/*.whl)."
	.venv/bin/python -m venv build/dist-check/source
	build/dist-check/source/bin/python $(PIP_INSTALL) --no-deps dist/*.tar.gz
	@cd build/dist-check && for part in sparkdl sparkdl_keras-*.dist-info/METADATA; do \
		diff --recursive --exclude=__pycache__ environment/lib/python3*/site-packages/$$part \
			source/lib/python3*/site-packages/$$part || exit 1; done
	@echo "$$(echo dist/*.tar.gz) installs the same files."

.PHONY: clean
clean: ## remove every environment and everything built
	rm -rf .venv .venv-lowest .venv-highest .venv-backends build dist *.egg-info artifacts spark-warehouse metastore_db
	rm -rf docs/tutorials/notebooks .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
