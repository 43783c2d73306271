"""Benchmarks, side by side in one run: `keras-preact benchmark`.

A module per question, such as step_time.py. Questions about networks share
comparison.py, which measures candidates.py, each in a process of its own (child.py), in
turn (rounds.py). report.py turns the figures into medians, ratios and a table.
"""
