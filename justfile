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

# Tests side by side, then those that must be alone. Arguments go to pytest, which exits with 5 where it has no test.
[positional-arguments]
test *ARGS:
    #!/usr/bin/env bash
    pytest -n 3 -m "not alone" "$@"
    together=$?
    pytest -m alone "$@"
    alone=$?
    case "$together $alone" in
        "0 0" | "0 5" | "5 0") ;;
        *) exit 1 ;;
    esac

# A verdict in a minute: the tests that need no model, with few examples.
test-fast:
    pytest -n 3 -q -m "not alone" --hypothesis-profile fast tests/unit tests/property tests/docs/test_mentions.py \
        --ignore tests/property/test_seam.py --ignore tests/property/test_constraints.py

# Measure a running server, also beside others; docs/benchmarks.md.
bench *ARGS:
    python -m bench {{ARGS}}
