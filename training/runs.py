"""The run directory: config.json, history.csv, health.csv, tensorboard/, checkpoints/,
model.keras, metrics.json.
"""

import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .cli import UserError, check_utf8, command, reading, writing
from .config import Config, differences, from_json

#: File of a run directory that names the process that trains in it. The file stays; its lock ends
#: with the process.
LOCK = ".lock"


def new_directory(output: Path | None, recipe: str) -> Path:
    """Return the directory for a new run, without making it. Raise a UserError if it is
    not empty.
    """
    run = output or Path("runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    check_utf8(run, "--output")
    # hidden files are left over by a process that was killed while it wrote
    if run.exists() and (
        not run.is_dir() or any(not path.name.startswith(".") for path in run.iterdir())
    ):
        resume = (
            f" To resume the run in it: {command('train', '--resume', run)}"
            if (run / "config.json").is_file()
            else ""
        )
        raise UserError(
            f"{run} exists and is not empty. Give another --output, or delete the folder.{resume}"
        )
    return run


@contextlib.contextmanager
def held(run: Path) -> Iterator[None]:
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
            f"To resume it with its own options: {command('train', '--resume', run)}"
        )
    changes = _changes(described, data)
    if changes:
        raise UserError(
            f"The images of {run} in {config.data.dir or config.data.name} have changed since it "
            f"was started: {'; '.join(changes)}. To resume it, restore them; to train on the "
            "images as they are now, start a new run with another --output."
        )


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


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` afterwards: `path` is
    never half-written.

    Raises:
        UserError: if it cannot be written, with the reason.
    """
    from keras_preact import atomic  # brings Keras, which a help text must not

    with writing(path), atomic.replacing(path) as temporary:
        yield temporary


def make(folder: Path) -> None:
    """Make a folder, and those that it is in, if they do not exist.

    Raises:
        UserError: if that is not possible, with the reason.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


@functools.cache
def code() -> dict[str, Any]:
    """Return the git `commit` of this code, None if it is unknown, and whether the code
    was `modified` since.
    """

    file = Path(__file__).resolve()  # a link to the package is in no repository

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(file.parents[1]), *arguments],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        if not git("ls-files", "--", str(file)):  # installed inside another repository
            return {"commit": None, "modified": False}
        changes = git(
            "status", "--porcelain", "--untracked-files=no", "--", "keras_preact", "training"
        )
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(changes)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "modified": False}


def plain(value: Any, digits: int | None = None) -> Any:
    """Convert numbers, arrays, dataclasses and collections of them to JSON's types. Floats
    that are not finite become None; with `digits`, others are rounded to so many
    significant digits.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name), digits)
            for field in dataclasses.fields(value)
        }
    if hasattr(value, "tolist"):  # NumPy
        return plain(value.tolist(), digits)
    if hasattr(value, "items"):
        return {str(key): plain(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, digits) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if digits is None else float(f"{value:.{digits}g}")
    return value


def write_json(path: Path, value: dict, indent: int | None = 2) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=indent, default=str) + "\n")


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
    with reading(f"{path} is damaged"):
        described = json.loads(path.read_text())
    if not isinstance(described, dict) or "config" not in described:
        raise UserError(
            f"{run} is not a run directory: its config.json was not written by {command('train')}."
        )
    return described
