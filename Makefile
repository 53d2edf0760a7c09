# Needs Python 3.11 or later, make and a package index; everything else is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test verify samples golden notebooks screenshots clean

demo: $(VENV)/core
	$(BIN)/kvsim replay --trace traces/samples/smollm2-needle-512 \
		--policy ema:0.8 --policy ema:0.8,over=step --policy ema:0.8/refresh=4 --policy ema:0.8/refresh=first \
		--policy cumulative --policy single --policy tova --policy h2o --policy streaming:4 --policy random:7

test: $(VENV)/test $(VENV)/chromium
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

# Closed loop against live decoding, 216 cases on the samples; downloads SmolLM2 (98 MB) and takes minutes.
verify: $(VENV)/test
	$(BIN)/kvsim bench closed-loop --trace 'traces/samples/*' \
		--model "$$($(BIN)/python traces/make_samples.py --fetch $(VENV)/cache)"

samples: $(VENV)/test
	$(BIN)/python traces/make_samples.py

golden: $(VENV)/test
	PYTHONPATH=tests/shared $(BIN)/python tests/kvsim/test_golden.py

notebooks: $(VENV)/test
	$(BIN)/python notebooks/rerun.py

screenshots: $(VENV)/test $(VENV)/chromium
	PYTHONPATH=tests/shared $(BIN)/python tests/apps/screenshots.py

# The explorer's tests drive a real browser; KVSIM_CHROMIUM names one that is not on the path.
$(VENV)/chromium: $(BIN)/python
	.ci/chromium
	touch $@

clean:
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/core: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/test: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@
