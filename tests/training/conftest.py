"""What several files use."""

import pytest

from tests.training.commands import EVERYTHING, RUN, run_train
from training import train


@pytest.fixture(scope="session")
def run(once_per_run):
    """A run of 30 iterations: an epoch of 22, and one cut short after 8. Tests must not
    change it.
    """
    return once_per_run("trained", lambda folder: run_train(folder / "run", *RUN)) / "run"


@pytest.fixture(scope="session")
def everything(once_per_run):
    """A run of 24 steps with all that a checkpoint has to hold: two epochs of 10 and one of 4.
    All its checkpoints are kept.
    """
    return once_per_run("everything", lambda folder: run_train(folder / "run", *EVERYTHING)) / "run"


@pytest.fixture
def received(monkeypatch):
    """Return a function from a command line of `train` to the configuration it makes."""
    found = []
    monkeypatch.setattr(train, "train", lambda config, recipe: found.append(config))

    def parse(*argv):
        train.main(list(argv))
        return found.pop()

    return parse
