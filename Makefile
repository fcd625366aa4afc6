# Short names for the commands of CONTRIBUTING.md. CEPO_PYTHON names the Python to use; without it the
# environment of scripts/test.sh (.venv) is used.
PYTHON := $(or $(CEPO_PYTHON),.venv/bin/python)

.PHONY: help fmt check fast test nightly docs audit release verl gpu-dry gpu

help:    ## list the targets
	@grep -E '^[a-z-]+: ' $(MAKEFILE_LIST) | sed -E 's/: +##/\t/'

fmt:     ## format the code and mend what ruff can mend
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

check:   ## lint and type-check
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

fast:    ## check, and run the tests that start no engine and train nothing
	bash scripts/test.sh -m "not heavy"

test:    ## everything that continuous integration runs
	bash scripts/test.sh

nightly: ## what takes long: 2000 random examples of each fuzz test, mutants, kills, pauses, and the tests of lab/ and lab/studies/
	CEPO_FUZZ_EXAMPLES=2000 bash scripts/test.sh tests/*/test_*_fuzz.py
	bash scripts/test.sh -m nightly
	bash scripts/test.sh lab/tests lab/studies/tests

docs:    ## write the generated pages, and build the site into build/site, with the extra docs
	$(PYTHON) -m pip install --quiet -e '.[docs]'
	$(PYTHON) scripts/generate_docs.py
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict -f scripts/mkdocs.yml

audit:   ## known vulnerabilities of the pinned packages; exit code 3 where no database is reached
	$(PYTHON) -m pip install --quiet pip-audit
	$(PYTHON) scripts/audit.py

release: ## build wheel and source archive, and resolve every extra with its constraints from the public index
	$(PYTHON) -m build
	$(PYTHON) scripts/constraints.py --check

verl:    ## cepo's methods inside verl on a CPU, against cepo's own advantages, in an environment of its own
	bash scripts/verl_check.sh

gpu-dry: ## what a GPU would find, as far as it can be found without one
	bash scripts/gpu_dry.sh

gpu:     ## what only a GPU can show
	bash scripts/gpu_check.sh
