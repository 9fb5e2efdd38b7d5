"""Measurements of Fencepost. Each module is a script of its own; `python -m benchmarks` runs all.

Figures depend on the machine: compare ratios taken in one run.
"""
