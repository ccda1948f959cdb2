# `make demo` and `make test` are all that a visitor needs: both set up what they use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DOCS   := $(VENV)/.docs
BROWSER := $(VENV)/.browser

.PHONY: setup demo test test-torch test-share test-slow test-cuda test-browser bench-cuda zoo faults resume elastic fuzz lint bench figures docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]' -c constraints.txt
	@touch $(READY)

demo: $(READY)
	@$(BIN)/python examples/train_gpt2.py

# Without bytecode, each of a thousand processes would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# Two files of tests at a time: many of them wait for processes that they start.
TESTS := $(BIN)/pytest -n 2 --dist loadfile

test: lint
	$(TESTS)

# The tests with another torch, such as TORCH=2.14.1, in an environment of its own.
OTHER := .venv-torch-$(TORCH)
test-torch:
	@test -n "$(TORCH)" || { echo "say which torch: make test-torch TORCH=2.14.1"; exit 2; }
	$(PYTHON) -m venv $(OTHER)
	@grep -v '^torch' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/pip install --quiet --disable-pip-version-check torch==$(TORCH)+cpu 2>/dev/null \
		|| $(OTHER)/bin/pip install --quiet --disable-pip-version-check torch==$(TORCH)
	@$(OTHER)/bin/pip freeze --disable-pip-version-check | grep '^torch==' >> $(OTHER)/constraints.txt
	$(OTHER)/bin/pip install --quiet --disable-pip-version-check -e '.[test]' -c $(OTHER)/constraints.txt
	$(OTHER)/bin/pytest -n 2 --dist loadfile

# A share of the slow tests, such as SHARE=3/8, and the core that every share has.
test-share: $(READY)
	$(TESTS) -m slow --share $(SHARE) --timeout 1200

test-slow: $(READY)
	$(TESTS) -m slow --timeout 1200

# On this machine's GPUs; what needs more of them than there are is skipped, and says so.
test-cuda: $(READY)
	$(BIN)/pytest -m cuda --timeout 600

# Reports and traces in Chromium, which has to be there already.
test-browser: $(BROWSER)
	$(BIN)/pytest tests/observe/test_report_page.py tests/observe/test_trace_page.py

$(BROWSER): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[browser]' -c constraints.txt
	@touch $(BROWSER)

# What Penstock costs on this machine's GPUs, and what stages and replicas gain there.
bench-cuda: $(READY)
	@mkdir -p out
	$(BIN)/python -W ignore -m penstock.bench gpus --json out/gpus.json

zoo: $(READY)
	$(BIN)/python -W ignore -m tests.zoo --output docs/zoo

faults: $(READY)
	$(BIN)/python -m tests.faults --runs 200 --output docs/faults.md

resume: $(READY)
	$(BIN)/python -m tests.resume --runs 50 --output docs/resume.md

elastic: $(READY)
	$(BIN)/python -W ignore -m tests.elastic --output out/elastic.md

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --messages 10000 --output out/fuzz.md

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	@mkdir -p out
	$(BIN)/penstock bench
	$(BIN)/penstock bench rpc
	$(BIN)/penstock bench data-parallel
	$(BIN)/python -W ignore -m penstock.bench compare --json out/compare.json
	$(BIN)/python -W ignore -m penstock.bench links --json out/links.json
	$(BIN)/python -W ignore -m penstock.bench sleeping --json out/sleeping.json
	$(BIN)/python -W ignore -m penstock.bench capture_time --json out/capture.json
	$(BIN)/python -W ignore -m penstock.bench large --json out/large.json
	$(BIN)/python -m penstock.bench partition --large --json out/partition.json
	$(BIN)/python -W ignore -m penstock.bench halves --json out/halves.json
	$(BIN)/python -W ignore -m penstock.bench truth --json out/truth.json
	$(BIN)/python -W ignore -m penstock.bench sums --json out/sums.json
	$(BIN)/python -W ignore -m penstock.bench generation --json out/generation.json

# What README shows: measured, kept in docs/data, and written into the page. Take a quiet machine.
figures: $(READY) $(BROWSER)
	@mkdir -p docs/data
	$(BIN)/python -m penstock.bench pictures
	$(BIN)/penstock bench --quick --output out/figures
	$(BIN)/python -m penstock.bench record out/figures/bench.json bench
	cp out/figures/bars.png out/figures/sweep.png docs/images/
	$(BIN)/penstock bench rpc --quick --output out/figures
	$(BIN)/python -m penstock.bench record out/figures/rpc.json rpc
	$(BIN)/python -W ignore -m penstock.bench compare --record
	$(BIN)/python -W ignore -m penstock.bench capture_time --record
	$(BIN)/python -W ignore -m penstock.bench sums --record
	$(BIN)/python -W ignore -m penstock.bench starting --record
	$(BIN)/python -W ignore -m penstock.bench frameworks --record
	$(BIN)/python -m penstock.bench tables

# The site, into out/site. Building it and reading it need no network.
docs: $(DOCS)
	@mkdir -p out
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict > out/site.log 2>&1 \
		|| { cat out/site.log; exit 1; } # with --quiet, warnings are not counted
	@echo "out/site/index.html; with the search: $(BIN)/python -m http.server -d out/site"

$(DOCS): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]' -c constraints.txt
	@touch $(DOCS)

clean:
	rm -rf $(VENV) .venv-torch-* .mypy_cache .ruff_cache .pytest_cache
