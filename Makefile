# make demo   extend the bundled model without training and measure it before and after, into .demo/scaled: at most 3 minutes
# make train  fine-tune the bundled model at its longer context, into .demo/trained: 2 to 3 minutes of training on two cores
# make quick  run the tests of the mathematics, the settings, a plan, a patch and an extension: under a minute
# make test   run the tests that a newcomer needs to trust it: all but the markers slow and sweep
# make sweep  run every test, and every mutant; PART=1/10 leaves the mutants and nine tenths of what is marked slow or sweep out, as CI does in turn
# make mutants   change the package in each way that tests/mutants lists: named tests must fail; ROOMS="scaling model" runs some
# make ends   run those of the mathematics, patches, saving and measuring with the oldest and the newest transformers allowed
# make lint   format, lint, types, and whether all that is generated is up to date
# make documents   rewrite all that is generated: blocks and figures of the documents, schemas, headers of recipes
# make site   build the documentation into .site; open .site/index.html
# Each makes its own virtual environment from nothing but Python, with the tested set of versions.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
EXTRAS_demo := [plot,train]
EXTRAS_test := [dev]
EXTRAS_site := [docs]
EXTRAS_quick := [train]
TOOLS_quick := hypothesis pytest pytest-xdist

demo: .venv/demo/installed
	@rm -rf .demo/scaled
	.venv/demo/bin/ropepatch demo --out .demo/scaled

train: .venv/demo/installed
	@rm -rf .demo/trained
	.venv/demo/bin/ropepatch train tiny --recipe tiny --out .demo/trained
	.venv/demo/bin/ropepatch eval .demo/trained --suite demo

# The demo as CI runs it; tests/cli/test_demo.py checks the files that it writes.
.demo/done: .venv/demo/installed
	@rm -rf .demo
	@mkdir .demo
	cd .demo && OMP_NUM_THREADS=1 ../.venv/demo/bin/ropepatch demo --out out >stdout 2>stderr || { cat stderr; exit 1; }
	@touch $@

PYTEST := bin/pytest --numprocesses 2 --dist worksteal
QUICK := tests/scaling tests/test_settings.py tests/test_layers.py tests/extension/test_patching.py \
  tests/extension/test_contract.py -k "not test_contract or a_patched_model_equals_its_reload"

quick: .venv/quick/installed
	OMP_NUM_THREADS=1 .venv/quick/$(PYTEST) -m "not (slow or sweep)" $(QUICK)

test: .venv/test/installed
	OMP_NUM_THREADS=1 .venv/test/$(PYTEST) -m "not (slow or sweep)"

sweep: .venv/test/installed
	OMP_NUM_THREADS=1 .venv/test/$(PYTEST) $(if $(PART),--part $(PART))
	$(if $(PART),,OMP_NUM_THREADS=1 .venv/test/bin/python tests/mutants/run.py)

mutants: .venv/test/installed
	OMP_NUM_THREADS=1 .venv/test/bin/python tests/mutants/run.py $(ROOMS)

ENDS := tests/scaling/test_scaling.py tests/model/test_head.py tests/attention/test_remapped.py \
  $(addprefix tests/extension/test_,contract.py patching.py families.py forms.py remapping_code.py) \
  $(addprefix tests/evaluation/test_,retrieval.py perplexity.py)
TRANSFORMERS_oldest := $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/==\1/p' pyproject.toml)

ends: ends-oldest ends-newest

ends-%: .venv/test/installed .venv/%/installed
	PYTHONPATH="$(CURDIR)/.venv/$*" OMP_NUM_THREADS=1 .venv/test/$(PYTEST) -p no:cacheprovider -m "not (slow or sweep)" $(ENDS)

documents: .venv/test/installed
	.venv/test/bin/python docs/tables.py
	ROPEPATCH_UPDATE=1 .venv/test/bin/pytest -q tests/extension/test_families.py -k readme

site: .venv/site/installed
	.venv/site/bin/sphinx-build -W --keep-going --quiet -c docs . .site

lint: .venv/test/installed
	.venv/test/bin/ruff format --check .
	.venv/test/bin/ruff check .
	.venv/test/bin/mypy
	.venv/test/bin/python docs/tables.py --check

.venv/%/installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv --clear .venv/$*
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 .venv/$*/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint .ci/constraints.txt --editable ".$(EXTRAS_$*)" $(TOOLS_$*)
	@touch $@

# A folder to stand before the packages of .venv/test: another transformers, with what it wants in a version of its own.
.venv/oldest/installed .venv/newest/installed: .venv/%/installed: pyproject.toml .ci/constraints.txt
	rm -rf .venv/$* && mkdir -p .venv/$*
	grep -vE '^(transformers|huggingface_hub|tokenizers)==' .ci/constraints.txt >.venv/$*.txt
	$(PYTHON) -m pip install --quiet --no-compile --disable-pip-version-check --constraint .venv/$*.txt --target .venv/$* "transformers$(TRANSFORMERS_$*)"
	@touch $@

clean:
	rm -rf .venv .demo .site

.PHONY: demo train quick test sweep mutants ends documents site lint clean
