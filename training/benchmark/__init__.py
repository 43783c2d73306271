"""Benchmarks, side by side in one run: `python -m training.benchmark COMMAND [--option ...]`.

candidates.py names what can be measured, child.py measures one candidate in a process of its own, rounds.py runs the children
in turn, report.py turns their figures into medians, ratios and a table, __main__.py is the command line.
"""
