# What contributors and CI run. `just` alone lists the recipes.

default:
    @just --list

# Everything that CI checks.
ci: lint types layers docs models test

# Style and formatting.
lint:
    ruff check .
    ruff format --check .

# Rewrite what can be rewritten.
format:
    ruff check --fix .
    ruff format .

types:
    mypy

# The layers of docs/architecture.md.
layers:
    lint-imports

# The pages as a site, which `legato serve` shows below `/docs/`. A broken link or anchor fails.
docs:
    sphinx-build -q -W --keep-going -b html -d build/doctrees docs src/legato/site

# The weights that tests use.
models:
    legato pull smollm2-135m qwen2.5-coder-0.5b

test *ARGS:
    pytest {{ARGS}}

# A verdict in a minute: the tests that need no model, with few examples.
test-fast:
    pytest -n 3 -q -m "not alone" --hypothesis-profile fast tests/unit tests/property tests/docs/test_mentions.py \
        --ignore tests/property/test_seam.py --ignore tests/property/test_constraints.py

# Measure a running server, also beside others; docs/benchmarks.md.
bench *ARGS:
    python -m bench {{ARGS}}
