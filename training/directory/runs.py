"""The run directory: config.json, history.csv, health.csv, tensorboard/, checkpoints/,
model.keras, metrics.json; diverged.json if the loss was not finite.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import disk
from ..config import FREE, Config, differences, from_json, own_parts
from ..errors import UserError, check_utf8, command, reading, writing

#: File of a run directory that names the process that trains in it. The file stays; its lock ends
#: with the process.
LOCK = ".lock"
#: File of a run directory that lists image files that `--data.skip-broken` left out.
BROKEN = "broken.txt"
#: Where several runs of one command are in their folder.
SEVERAL = ("seed-*", "rate-*/seed-*", "depth-*/rate-*/seed-*")
#: File of a run directory that says in which iteration the loss became infinite or NaN.
DIVERGED = "diverged.json"


def default_directory(recipe: str) -> Path:
    """Return the directory of a run without `--output`. A recipe of a person is
    MODULE:RECIPE.
    """
    name = re.sub(r"[^\w.-]+", "-", recipe)
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def new_directory(output: Path | None, recipe: str) -> Path:
    """Return the directory for a new run, without making it. Raise a UserError if it is
    not empty.
    """
    run = output or default_directory(recipe)
    check_utf8(run, "--output")
    # hidden files are left over by a process that was killed while it wrote
    if run.exists() and (
        not run.is_dir() or any(not path.name.startswith(".") for path in run.iterdir())
    ):
        resume = (
            f" To resume the run in it: {resuming(run)}" if (run / "config.json").is_file() else ""
        )
        raise UserError(
            f"{run} exists and is not empty. Give another --output, or delete the folder.{resume}"
        )
    return run


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold a run directory for this process, until the block or the process ends, also
    if it is killed. Networks that killed processes wrote to a part are removed from it.

    Raises:
        UserError: if another process holds it; nothing has changed then.
    """
    with contextlib.ExitStack() as opened:
        with writing(run / LOCK):
            file = opened.enter_context((run / LOCK).open("a+"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise UserError(
                f"{run} is in use by {file.read().strip() or 'another process'}. Wait for its end, "
                "or give another --output."
            ) from error
        except OSError:
            pass  # some file systems of clusters have no locks
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
        file.flush()
        for left in run.glob(".*.keras"):
            left.unlink(missing_ok=True)
        yield


def check_same(run: Path, config: Config, data: Mapping[str, Any]) -> None:
    """Check that the run was started with `config` and the same images, so that it can be
    resumed.

    Args:
        run: The run directory.
        config: Configuration of the resumed run.
        data: `Run.described_data` of the resumed run.

    Raises:
        UserError: for a run with other options, other images or another backend.
    """
    import keras

    described = read_config(run)
    before = described["versions"]["backend"]
    if before != keras.backend.backend():
        raise UserError(
            f"{run} was trained on {before}: set KERAS_BACKEND={before} to resume it. Received: "
            f"{keras.backend.backend()}"
        )
    different = differences(from_json(Config, described["config"]), config)
    if different:
        raise UserError(
            f"{run} was started with another value of {', '.join(different)}. "
            f"To resume it with its own options: {resuming(run)}"
        )
    changes = _changes(described, data)
    if changes:
        raise UserError(
            f"The images of {run} in {config.data.dir or config.data.name} have changed since it "
            f"was started: {'; '.join(changes)}. To resume it, restore them; to train on the "
            "images as they are now, start a new run with another --output."
        )


def keep_free_options(run: Path, config: Config) -> None:
    """Write the options that may change when a run is resumed to its config.json, so that
    `keras-preact resume` takes them next time.
    """
    described, options = read_config(run), dataclasses.asdict(config)
    described["config"] |= {name: options[name] for name in FREE}
    disk.write_json(run / "config.json", described)


#: Names of the splits for a person.
SPLITS = {"train": "training", "holdout": "held-out", "test": "test"}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in words how the data of a run has changed. What `before` does not have, as of
    an older version, counts as the same.
    """
    changes = []
    old, new = before.get("classes", now["classes"]), now["classes"]
    if old != new:
        gone, added = (
            ", ".join([name for name in one if name not in other][:5])
            for one, other in ((old, new), (new, old))
        )
        changes.append(
            f"{len(old)} classes, now {len(new)} (gone: {gone or 'none'}; new: {added or 'none'})"
        )
    for split, name in SPLITS.items():
        count, size = before.get("images", {}).get(split), now["images"][split]
        if count not in (None, size):
            changes.append(f"{count:,} {name} images, now {size:,}")
        elif before.get("hashes", now["hashes"])[split] != now["hashes"][split]:
            changes.append(f"other {name} images")
    for what in ("mean", "std"):
        measured = now["preprocessing"][what]
        trained = before.get("preprocessing", {}).get(what, measured)
        # sums differ in the last bits between machines
        if len(trained) != len(measured) or not all(map(_close, trained, measured)):
            changes.append(f"{what} of the pixels {trained}, now {measured}")
    return changes


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5)


def portable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the directories of the machine that it ran on."""
    return {**config, "data": {**config["data"], "dir": None}, "output": None}


def read_config(run: Path) -> dict:
    """Return config.json of a run directory."""
    path = run / "config.json"
    if not run.exists():
        raise UserError(f"The run directory {run} does not exist.")
    if not path.is_file():
        raise UserError(f"{run} is not a run directory: it has no config.json.")
    return read_description(path)


def check_no_checkpoint(subject: str | Path, checkpoint: str) -> None:
    """Check that no network of a run is asked for where there is no run."""
    if checkpoint != "final":
        raise UserError(
            f"--checkpoint chooses a network of a run, and {subject} is not a run directory. "
            f"Received: {checkpoint}"
        )


def resuming(run: Path) -> str:
    """Return the command that resumes a run, with the code that its config.json names."""
    trusting = []
    with contextlib.suppress(UserError):  # of a damaged file, the command says more
        trusting = ["--trust"] * bool(config_of(run / "config.json", read_config(run)).functions)
    return command("resume", run, *trusting)


def read_description(path: Path) -> dict:
    """Return the content of a config.json, which may have another name and place."""
    with reading(f"{path} is damaged"):
        described = json.loads(path.read_text())
    if not isinstance(described, dict) or "config" not in described:
        raise UserError(f"{path} was not written by {command('train')}.")
    return described


def several(folder: Path) -> list[Path]:
    """Return the directories of the runs that one command has begun in a folder: with
    several seeds, rates or depths, in the order of these numbers.
    """
    found = (path for pattern in SEVERAL for path in folder.glob(pattern))
    runs = [path for path in found if path.is_dir()]  # not the files of --parallel

    def numbers(path: Path) -> list[tuple[float, str]]:
        return [(_number(part), part) for part in path.relative_to(folder).parts]

    return sorted(runs, key=numbers)


def _number(part: str) -> float:
    """Return the number in a name such as `rate-0.1`; of another name, infinity."""
    try:
        return float(part.partition("-")[2])
    except ValueError:
        return math.inf


def diverged_at(run: Path) -> int | None:
    """Return the iteration in which the loss of a run became infinite or NaN; None if it
    did not.
    """
    path = run / DIVERGED
    if not path.is_file():
        return None
    with reading(f"{path} is damaged"):
        return int(json.loads(path.read_text())["iteration"])


def parts_of(run: Path) -> list[str]:
    """Return the objects of a person in the network of a run, each as MODULE:OBJECT."""
    if not (run / "config.json").is_file():
        return []
    described = read_config(run)
    with reading(f"{run / 'config.json'} is damaged"):
        return own_parts(described["config"].get("model", {}))


def config_of(path: Path, described: Mapping[str, Any]) -> Config:
    """Return the configuration in the content of a config.json.

    Args:
        path: The file, for the error.
        described: Its content.

    Raises:
        UserError: for a configuration that is damaged or of another version.
    """
    with reading(f"{path} is damaged or of another version"):
        return from_json(Config, described["config"])
