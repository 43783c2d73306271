"""Several runs of one command whose files are written in place of a training."""

import dataclasses
import functools
import json
from collections.abc import Callable

from training import cli
from training.commands import sweep
from training.config import Config, from_json
from training.run import check


def write_run(config: Config, recipe: str, loss: float = 1.0, error: float = 10.0) -> None:
    """Write the files of a finished run."""
    check(config)
    config.output.mkdir(parents=True, exist_ok=True)
    described = {"recipe": recipe, "config": dataclasses.asdict(config), "iterations": 5}
    described |= {"device": {"name": "CPU", "cpu": "Xeon"}, "code": {"commit": "0123abc"}}
    described |= {"versions": {"backend": "jax"}, "images": {"train": 9}, "hashes": {"train": "a"}}
    (config.output / "config.json").write_text(json.dumps(described, default=str))
    rows = f"epoch,loss,val_accuracy,iteration,seconds\n0,{loss},{1 - error / 100},5,2\n"
    (config.output / "history.csv").write_text(rows)
    (config.output / "model.keras").touch()


def diverge(config: Config, recipe: str) -> None:
    """Write the files of a run that diverged in its first epoch."""
    write_run(config, recipe)
    for name in ("model.keras", "history.csv"):
        (config.output / name).unlink()
    (config.output / "diverged.json").write_text('{"iteration": 4}')
    cli.fail(ValueError("diverged"))


class Children:
    """Replaces `children.statuses`. Each child calls `act` with its configuration and the
    name of the recipe.

    Attributes:
        act: What a child does.
        started: Configurations of the children.
        together: Number of children of each call.
        checked: Number of checks of networks, which run in this process.
    """

    def __init__(self):
        self.act: Callable[[Config, str], None] = write_run
        self.started: list[Config] = []
        self.checked = 0
        self.together: list[int] = []

    def statuses(self, module: str, jobs: list[str], parallel: int = 1, *_) -> list[int]:
        assert len(jobs) <= parallel or json.loads(jobs[0])[1]["dry_run"]
        self.together.append(len(jobs))
        return [self._status(module, json.loads(job)) for job in jobs]

    def _status(self, module: str, job) -> int:
        if module == "training.commands.sweep":
            self.checked += 1
            do = functools.partial(sweep.check, [from_json(Config, each) for each in job])
        else:
            assert module == "training.commands.train"
            recipe, config = job[0], from_json(Config, job[1])
            self.started.append(config)
            do = functools.partial(self.act, config, recipe)
        try:
            cli.guard(do)
        except SystemExit as ended:
            if ended.code == 130:  # as `children.statuses` does
                raise KeyboardInterrupt from ended
            return ended.code
        return 0
