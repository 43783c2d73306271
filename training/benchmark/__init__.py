"""Benchmarks, side by side in one run: `keras-preact benchmark`.

For networks: candidates.py lists what can be measured, child.py measures one candidate
in its own process, rounds.py runs the children in turn, report.py turns their figures
into a table, comparison.py puts these together.
"""
