# make demo   extend the bundled checkpoint without and with training, and measure it; figures in .demo
# make test   run the tests
# make lint   format, lint and types
# make documents   rewrite the tables and figures of the documents from eval/results
# Each makes its own virtual environment from nothing but Python, with the tested set of versions.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
EXTRAS_demo := [plot,train]
EXTRAS_test := [dev]

demo: .venv/demo/installed
	@rm -rf .demo
	.venv/demo/bin/ropepatch demo --out .demo
	.venv/demo/bin/ropepatch extend tiny --recipe tiny --eval demo --out .demo/adapted

test: .venv/test/installed
	OMP_NUM_THREADS=1 .venv/test/bin/pytest --numprocesses 2 --dist worksteal

documents: .venv/test/installed
	ROPEPATCH_UPDATE=1 .venv/test/bin/pytest tests/test_readme.py tests/recipes tests/extension/test_engines.py

lint: .venv/test/installed
	.venv/test/bin/ruff format --check .
	.venv/test/bin/ruff check .
	.venv/test/bin/mypy

.venv/%/installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv --clear .venv/$*
	.venv/$*/bin/pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --editable ".$(EXTRAS_$*)"
	@touch $@

clean:
	rm -rf .venv .demo

.PHONY: demo test documents lint clean
