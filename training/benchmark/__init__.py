"""Benchmarks, side by side in one run: `keras-preact benchmark`.

In the order of a run: questions.py defines what is measured, candidates.py on which
networks. rounds.py starts a process (child.py) for each network in turn. The process
builds the network (subjects.py) and measures it. report.py turns the figures into
medians, ratios and a table. comparison.py runs all of this. very_deep.py is a separate
command.
"""
