"""Runs that are killed, interrupted and damaged, and go on: they end as one that was
left alone, to the bit.
"""

import contextlib
import csv
import hashlib
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import pytest

from tests.training.commands import TINY, error_of, files, finish, run_train, start, words
from training import train

pytestmark = pytest.mark.backend

#: Dropout, batch normalisation, an average of the weights; 19 iterations an epoch, with a
#: validation that chooses the best.
OPTIONS = words(
    "--schedule.length 60 --model.dropout 0.2 --data.holdout 200 --seed 3",
    "--optimizer.ema 0.9 --checkpoint.every 3 --checkpoint.keep 2 --health 7",
)
#: Columns of history.csv that depend on the machine.
TIMES = ("images_per_second", "seconds")


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """JAX keeps what it has compiled: the processes here compile the same thing many
    times.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


class Moment(NamedTuple):
    """What a run has on the disk where a process may be killed: in front of each change
    of its directory.

    Attributes:
        event: Python's audit event of the change.
        path: What is changed, or put in another's place, relative to the run.
        target: In whose place it is put, None for other changes.
        flags: Of an opened file.
        contents: All files but TensorBoard's.
    """

    event: str
    path: str
    target: str | None
    flags: int
    contents: dict[str, bytes]


class Watch:
    """Python tells an audit hook of each change before it happens; a hook stays as long
    as the process, and is idle mostly.
    """

    def __init__(self):
        self.tell: Callable[[str, tuple], None] | None = None
        sys.addaudithook(self.hear)

    def hear(self, event: str, values: tuple) -> None:
        if self.tell is not None and event in (
            "open",
            "os.rename",
            "os.remove",
            "os.mkdir",
            "os.truncate",
        ):
            tell, self.tell = self.tell, None  # what is done to write a moment down is no change
            try:
                tell(event, values)
            finally:
                self.tell = tell

    @contextlib.contextmanager
    def moments(self, run: Path) -> Iterator[list[Moment]]:
        """Watch the directory `run`; the last moment is that of the end."""
        found: list[Moment] = []
        known: dict[bytes, bytes] = {}

        def contents() -> dict[str, bytes]:
            read = {
                name: (run / name).read_bytes()
                for name in files(run)
                if not name.startswith("tensorboard")
            }
            return {name: known.setdefault(content, content) for name, content in read.items()}

        def inside(path) -> str | None:
            absolute = Path(os.path.abspath(path))  # a link stays one
            return str(absolute.relative_to(run)) if absolute.is_relative_to(run) else None

        def tell(event: str, values: tuple) -> None:
            flags = values[2] if event == "open" else 0
            if not isinstance(values[0], str | Path) or (path := inside(values[0])) is None:
                return
            if event == "open" and flags & os.O_ACCMODE == os.O_RDONLY:
                return
            found.append(
                Moment(
                    event,
                    path,
                    inside(values[1]) if event == "os.rename" else None,
                    flags,
                    contents(),
                )
            )

        self.tell = tell
        try:
            yield found
        finally:
            self.tell = None
        found.append(Moment("end", "", None, 0, contents()))


@pytest.fixture(scope="module")
def watch():
    return Watch()


def go_on(run: Path, *options: str) -> None:
    """Begin or go on in this process."""
    run_train(run, *OPTIONS, *options, "--resume")


def contents(run: Path) -> dict:
    """Return all that a finished run has left, without times. The states of seeds are
    in its last checkpoint alone.
    """
    with open(run / "history.csv", newline="") as file:
        history = [
            {key: value for key, value in row.items() if key not in TIMES}
            for row in csv.DictReader(file)
        ]
    last = max((run / "checkpoints").glob("state-*.npz"))
    with np.load(last) as file:
        state = {name: file[name] for name in file.files}
    progress = json.loads(state.pop("description").tobytes())["progress"]
    models = {
        name: keras.saving.load_model(run / name)
        for name in ("model.keras", "checkpoints/best.keras")
    }
    arrays = {
        f"{name}: {i} {variable.path.rsplit('/', 1)[-1]}": np.array(
            keras.ops.convert_to_numpy(variable.value)
        )
        for name, model in models.items()
        for i, variable in enumerate([*model.weights, *model.optimizer.variables])
    }
    return {
        "history": history,
        "health": (run / "health.csv").read_text(),
        "steps": progress["step"],
        "arrays": arrays | state,
        "files": [
            re.sub(r"-[0-9a-f]{16}", "", name)
            for name in files(run)
            if not name.startswith("tensorboard")
        ],
    }


def assert_same(run: Path, reference: dict, trained: bool = True) -> None:
    """Compare what two runs have left; without the metrics where no step was left,
    which makes them.
    """
    found, expected = contents(run), dict(reference)
    arrays, expected_arrays = (
        {
            name: array
            for name, array in each.pop("arrays").items()
            if trained or "metrics/" not in name
        }
        for each in (found, expected)
    )
    assert found == expected
    assert arrays.keys() == expected_arrays.keys()
    for name, array in expected_arrays.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, watch):
    """The moments of a run that nothing happens to, and what it leaves."""
    run = tmp_path_factory.mktemp("whole") / "run"
    with watch.moments(run) as moments:
        go_on(run)
    found = contents(run)
    assert len(found["history"]) == 4
    assert found["steps"] == 60
    assert len(found["health"].splitlines()) == 1 + 60 // 7
    return moments, found


@pytest.fixture(scope="module")
def reference(whole):
    return whole[1]


def assert_never_half_written(moments: list[Moment]) -> None:
    """A file gets its name when it is whole. Only health.csv grows, by lines; half a
    one is dropped by who goes on.
    """
    opened = {
        (moment.path, moment.flags & os.O_APPEND) for moment in moments if moment.event == "open"
    }
    assert {(path, how) for path, how in opened if not Path(path).name.startswith(".")} <= {
        ("health.csv", os.O_APPEND)
    }
    assert not any(moment.event == "os.truncate" for moment in moments)
    for before, after in itertools.pairwise(moments):
        if before.target is not None:
            assert before.contents[before.path] == after.contents[before.target], before.target
            assert before.contents[before.path]
    for moment in moments:
        json.loads(moment.contents.get("config.json", b"{}"))
        states = [name for name in moment.contents if re.search("/state-", name)]
        for name in states:
            assert hashlib.sha256(moment.contents[name]).hexdigest()[:16] in name
        # the two that are kept, and the one that takes the place of the older
        assert len(states) <= 3


def newest(contents: dict[str, bytes]) -> int:
    return max((int(name[-30:-21]) for name in contents if re.search("/state-", name)), default=-1)


class TestKilledAtAnyMoment:
    def test_no_file_is_half_written_and_no_progress_is_lost(self, whole):
        moments, _ = whole
        assert_never_half_written(moments)
        steps = [newest(moment.contents) for moment in moments]
        assert steps == sorted(steps)
        assert sorted(set(steps)) == [-1, *range(0, 61, 3)]
        put = [
            re.sub(r"-[0-9a-f]{16}", "", moment.target)
            for moment in moments
            if moment.target is not None
        ]
        assert put[:3] == [
            "config.json",
            "checkpoints/network.json",
            "checkpoints/state-000000000.npz",
        ]
        assert put[-2:] == ["model.keras", "curves.png"]
        assert put.count("history.csv") == 4
        assert put.count("checkpoints/best.keras") > 1

    @pytest.mark.skipif(
        keras.backend.backend() != "tensorflow",
        reason="what is there to go on from depends on no backend",
    )
    @pytest.mark.parametrize(
        ("target", "step"),
        [
            # config.json is there, no checkpoint
            pytest.param("checkpoints/network.json", -1, marks=pytest.mark.soak),
            (
                "checkpoints/best.keras",
                18,
            ),  # the epoch is in history.csv, and is not in the checkpoint
            ("checkpoints/state-000000051", 48),  # health.csv is further than the checkpoint
            ("model.keras", 60),  # nothing is left but to write it
            ("curves.png", 60),
        ],
    )
    def test_goes_on(self, whole, watch, tmp_path, target, step):
        moments, reference = whole
        moment = next(each for each in moments if each.target and each.target.startswith(target))
        assert newest(moment.contents) == step
        assert moment.path in moment.contents  # what was about to get its name
        run = tmp_path / "run"
        for name, content in moment.contents.items():
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_bytes(content)
        if moment.target != "curves.png" and "health.csv" in moment.contents:
            # a line that was being written
            with open(run / "health.csv", "a") as file:
                file.write(moment.contents["health.csv"].decode().splitlines()[-1][:-3])
        with watch.moments(run) as others:
            go_on(run)
        assert_never_half_written(others)
        # it is in nobody's way, and has a name that does not come again
        (run / moment.path).unlink(missing_ok=True)
        assert_same(run, reference, trained=step < 60)


#: Sends itself a signal where a checkpoint is about to get its name.
CODE = """
import os, signal, sys

name, number, *arguments = sys.argv[1:]
# a process started in the background may inherit that it ignores the signal
signal.signal(signal.SIGINT, signal.default_int_handler)

def send(event, values):
    global name
    if event == "os.rename" and name and name in str(values[1]):
        name = None
        os.kill(os.getpid(), int(number))

sys.addaudithook(send)
from training import train
train.main(arguments)
"""


def ended(folder: Path, step: int, number: signal.Signals) -> tuple[int, str, str]:
    """Begin or go on in a process that gets a signal while it saves the checkpoint of
    this step.
    """
    arguments = (f"state-{step:09d}", int(number), "digits", *TINY, *OPTIONS)
    arguments += ("--resume", "--output", "run")
    return finish(start("-c", CODE, *arguments, cwd=folder))


def checkpoints(run: Path) -> list[str]:
    return [
        re.sub(r"-[0-9a-f]{16}", "", path.name)
        for path in sorted((run / "checkpoints").glob("*state-*"))
    ]


@pytest.mark.soak
def test_killed_taken_away_interrupted_damaged_and_killed_again(
    reference, tmp_path, capsys, monkeypatch
):
    """Five processes, each of which goes on from what the one before has left: to the
    bit as one alone.
    """
    run = tmp_path / "run"
    status, _, err = ended(tmp_path, 6, signal.SIGKILL)
    assert (status, err) == (-signal.SIGKILL, "")
    assert checkpoints(run) == [
        ".state-000000006.npz",
        "state-000000000.npz",
        "state-000000003.npz",
    ]
    # would not be written again, as that of step 6 is
    (run / "checkpoints" / ".state-000000007.npz").touch()

    status, out, err = ended(tmp_path, 21, signal.SIGTERM)
    assert (status, err) == (75, "")
    assert "Resuming after iteration 3." in out
    assert (
        "Stopped by SIGTERM after iteration 21 of 60; the checkpoint is saved. Resume: "
        "keras-preact train --res" in out
    )
    assert checkpoints(run) == ["state-000000018.npz", "state-000000021.npz"]
    assert not (run / "model.keras").exists()

    status, out, err = ended(tmp_path, 30, signal.SIGINT)
    assert (status, err) == (130, "")
    assert "Resuming after iteration 21." in out
    assert "Interrupted after iteration 30 of 60; the checkpoint is saved." in out
    assert checkpoints(run) == ["state-000000027.npz", "state-000000030.npz"]

    [damaged] = (run / "checkpoints").glob("state-000000030-*.npz")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    status, out, err = ended(tmp_path, 42, signal.SIGKILL)
    assert (status, err) == (-signal.SIGKILL, "")
    assert (
        f"Warning: run/checkpoints/{damaged.name} is damaged, so an older checkpoint is used: its "
        "content does not match" in out
    )
    assert "Resuming after iteration 27." in out
    assert checkpoints(run) == [
        ".state-000000042.npz",
        "state-000000036.npz",
        "state-000000039.npz",
    ]

    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    train.main(["--resume", "run"])
    out = capsys.readouterr().out
    assert "Resuming after iteration 39." in out
    assert re.search("Finished after .* of training: run/model.keras", out)
    assert_same(run, reference)

    untouched = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    train.main(["--resume", "run"])
    assert capsys.readouterr().out.startswith("Already finished after ")
    message = error_of(capsys, go_on, Path("run"), "--batch-size", "32")
    assert "run was started with another value of --batch-size. " in message
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == untouched
