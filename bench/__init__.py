"""Measurements of a running server, also beside others: `python -m bench URL --beside NAME=URL`.

docs/benchmarks.md says what each measure is. Nothing here is part of the installed package.
"""
