# make demo   extend a real checkpoint and measure it before and after
# make test   run the tests
# make lint   format, lint and types
# Each makes its own virtual environment from nothing but Python, with the tested set of versions.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
MODEL ?= ../shared/checkpoints/babyllama-361
TEXT ?= ../shared/texts/tinystories
TO ?= 1k
EXTRAS_test := [dev]

demo: .venv/demo/installed
	@test -d "$(MODEL)" -a -e "$(TEXT)" || { \
	  echo "no checkpoint $(MODEL) or no text $(TEXT): make demo MODEL=FOLDER TEXT=FILE TO=32k" >&2; exit 2; }
	@rm -rf .demo
	.venv/demo/bin/ropepatch extend $(MODEL) --to $(TO) --method yarn --out .demo/extended
	.venv/demo/bin/ropepatch eval $(MODEL) --text $(TEXT) --to $(TO) --windows 64 \
	  --method linear --method ntk --method ntk-by-parts --method yarn

test: .venv/test/installed
	OMP_NUM_THREADS=1 .venv/test/bin/pytest --numprocesses 2 --dist worksteal

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

.PHONY: demo test lint clean
