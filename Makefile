# `make bench` measures and prints the tables, `make test` runs every test. Both make .venv first, and both may be called
# again after an interruption. QUICK=1 is a shorter bench without verdicts; FRESH=1 measures sweeps again that are already there;
# DRAFT= another draft, PYTHON= another interpreter, RESULTS= another folder.
# `make results` measures everything that is committed, by the scripts' default commands, and refills README, RESULTS and card.
PYTHON ?= python3
RESULTS ?= speculative-decoding/results/local
DRAFT ?= draft-s
SCRIPTS := speculative-decoding
PY := .venv/bin/python
ifdef QUICK
SIZES := --ks 1,2,3,5,8 --n-tokens 32 --repeats 2
COST_SIZES := --tokens 1,2,4,8 --repeats 10
endif
RESUME := $(if $(FRESH),,--resume auto)
COMMITTED := $(SCRIPTS)/results

.PHONY: bench results figures test lint clean
.DELETE_ON_ERROR:

bench: .venv/ready
	cd $(SCRIPTS) && ../$(PY) -m spec_models.embedded
	$(PY) $(SCRIPTS)/spec_precondition.py --draft "$(DRAFT)" $(COST_SIZES) --results "$(RESULTS)/spec_precondition.json"
	$(PY) $(SCRIPTS)/spec_bench.py --draft "$(DRAFT)" $(SIZES) $(RESUME) --results "$(RESULTS)/spec_bench.json"
	$(PY) $(SCRIPTS)/spec_plot.py --results "$(RESULTS)"

results: .venv/ready
	cd $(SCRIPTS) && ../$(PY) -m spec_models.embedded
	cd $(SCRIPTS) && ../$(PY) spec_one_pass.py --results results/spec_one_pass.json
	cd $(SCRIPTS) && ../$(PY) spec_precondition.py --draft "$(DRAFT)" --compare-passes --results results/spec_precondition.json
	cd $(SCRIPTS) && ../$(PY) spec_precondition.py --dtype bfloat16 --draft "$(DRAFT)" --results results/spec_precondition_bfloat16.json
	cd $(SCRIPTS) && ../$(PY) spec_decode.py --vs-transformers $(RESUME) --results results/spec_decode.json
	cd $(SCRIPTS) && ../$(PY) spec_decode.py --tree 8 $(RESUME) --results results/spec_decode_tree.json
	cd $(SCRIPTS) && ../$(PY) spec_bench.py $(RESUME) --results results/spec_bench.json
	cd $(SCRIPTS) && ../$(PY) spec_drafts.py $(RESUME) --results results/spec_drafts.json
	cd $(SCRIPTS) && ../$(PY) spec_drafts.py --dtype bfloat16 --allow-near-ties $(RESUME) --results results/spec_drafts_bfloat16.json
	cd $(SCRIPTS) && ../$(PY) spec_sampling.py $(RESUME) --results results/spec_sampling.json
	cd $(SCRIPTS) && ../$(PY) spec_sampling.py --verify block --temperatures 0.7,1 --seeds 12 $(RESUME) --results results/spec_sampling_block.json
	cd $(SCRIPTS) && ../$(PY) spec_lookup.py $(RESUME) --results results/spec_lookup.json
	cd $(SCRIPTS) && ../$(PY) spec_lookup.py --match suffix --methods lookup $(RESUME) --results results/spec_lookup_suffix.json
	cd $(SCRIPTS) && ../$(PY) spec_adaptive.py $(RESUME) --results results/spec_adaptive.json
	for dtype in bfloat16 float16; do (cd $(SCRIPTS) && ../$(PY) -m spec_harness.rounding --dtype $$dtype --results results/spec_rounding_$$dtype.json) || exit 1; done
	cd $(SCRIPTS) && ../$(PY) spec_batch.py $(RESUME) --results results/spec_batch.json
	cd $(SCRIPTS) && ../$(PY) spec_heads.py --tree 8 $(RESUME) --results results/spec_heads.json
	cd $(SCRIPTS) && ../$(PY) spec_overlap.py --overlap process $(RESUME) --results results/spec_overlap.json
	$(MAKE) figures

figures: .venv/ready
	$(PY) $(SCRIPTS)/spec_report.py
	$(PY) $(SCRIPTS)/spec_plot.py --results $(COMMITTED)

test: .venv/ready-dev
	$(PY) -m ruff check .
	$(PY) -m pytest -q

lint: .venv/ready-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

.venv/ready: requirements.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "error: PYTHON=$(PYTHON): no such command; call make PYTHON=python3.11"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is older than 3.11, which transformers needs; call make PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv .venv || { echo "error: no virtual environment could be made; on Debian install python3-venv"; exit 2; }
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt || { echo "error: requirements.txt could not be installed; check the network and call make again"; exit 2; }
	@touch $@

.venv/ready-dev: .venv/ready requirements-dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt || { echo "error: requirements-dev.txt could not be installed; check the network and call make again"; exit 2; }
	@touch $@

clean:
	rm -rf .venv
