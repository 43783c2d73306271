"""Benchmarks, side by side in one run: `keras-preact benchmark`.

In the order of a run: questions.py has what is asked, candidates.py which networks are
asked. rounds.py starts a process for each of them in turn (child.py), which builds the
network (subjects.py) and measures it. report.py turns the figures into medians, ratios
and a table; comparison.py leads through all of this. very_deep.py is a command of its
own.
"""
