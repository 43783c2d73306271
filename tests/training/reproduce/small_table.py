"""A table of the trials in `tiny`, and the command line of a worker that knows them."""

import sys
from collections.abc import Callable

import keras_preact as kp
from training.reproduce import trials


def tables() -> dict[str, trials.Table]:
    """Return a table whose rows are the tiny trials, which must be installed."""
    published = kp.published.results(table="1")[0]
    rows = tuple(
        trials.Row(name, published, trial)
        for name, trial in trials.TRIALS.items()
        if "tiny" in name
    )
    return {"tiny": trials.Table("tiny", rows, small=True)}


def worker_command(program: str) -> Callable[[str, str], list[str]]:
    """Return what stands in for `children.command`: the worker is another process of
    this program.
    """
    return lambda module, argument: [sys.executable, program, "worker", argument]
