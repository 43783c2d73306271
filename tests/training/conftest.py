"""A run that several files look at."""

import pytest

from tests.training.commands import RUN, run_train


@pytest.fixture(scope="session")
def run(once_per_run):
    """A run of 30 iterations: an epoch of 22, and one cut short after 8. Tests must not
    change it.
    """
    return once_per_run("trained", lambda folder: run_train(folder / "run", *RUN)) / "run"
