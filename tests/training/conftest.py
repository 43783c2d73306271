"""Fixtures of several files."""

import pytest

from tests.training.calls import EVERYTHING, RUN, run_train
from tests.training.several_runs import Children
from training import children
from training.commands import train


@pytest.fixture(scope="session")
def run(once_per_run):
    """A run of 30 iterations: an epoch of 22 and one that stops after 8. Tests must not
    change it.
    """
    return once_per_run("trained", lambda folder: run_train(folder / "run", *RUN)) / "run"


@pytest.fixture(scope="session")
def everything(once_per_run):
    """A run of 24 steps with every kind of state that a checkpoint can hold: two epochs of
    10 steps and one of 4. All its checkpoints are kept.
    """
    return once_per_run("everything", lambda folder: run_train(folder / "run", *EVERYTHING)) / "run"


@pytest.fixture
def several_runs(tmp_path, monkeypatch):
    """Replace the processes of several runs, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    replaced = Children()
    monkeypatch.setattr(children, "statuses", replaced.statuses)
    return replaced


@pytest.fixture
def received(monkeypatch):
    """Return a function that takes a command line of `train` and returns its
    configuration.
    """
    found = []
    monkeypatch.setattr(train, "train", lambda config, recipe: found.append(config))

    def parse(*argv):
        train.main(list(argv))
        return found.pop()

    return parse
