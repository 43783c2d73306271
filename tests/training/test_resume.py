"""Real runs that are killed, interrupted and damaged, and go on: they end as one that was left alone, to the bit."""

import csv
import json
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.training.commands import TINY, error_of, finish, run_train, start
from training import train

BACKEND = keras.backend.backend()

#: Dropout, batch normalisation, an average of the weights; 19 iterations an epoch, with a validation that chooses the best.
OPTIONS = (
    *(*TINY, "--schedule.length", "60", "--model.dropout", "0.2", "--data.holdout", "200", "--seed", "3"),
    *("--optimizer.ema", "0.9", "--checkpoint.every", "3", "--checkpoint.keep", "2", "--health", "7"),
)
#: Columns of history.csv that depend on the machine.
TIMES = ("images_per_second", "seconds")


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """JAX keeps what it has compiled: the runs here compile the same thing many times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


# a process started in the background may inherit that it ignores the signal
CODE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from training import train; train.main(sys.argv[1:])"
)


def begin(folder: Path, *options: str) -> subprocess.Popen:
    return start("-c", CODE, "digits", *OPTIONS, *options, "--resume", "--output", "run", cwd=folder)


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[6:15]) for path in (run / "checkpoints").glob("state-*.npz"))


def newest(run: Path) -> int:
    return max(steps(run), default=-1)


def wait_for(run: Path, step: int, process: subprocess.Popen) -> bool:
    """Wait until there is a checkpoint of this step or a later one, or until the process has ended."""
    deadline = time.monotonic() + 240
    while newest(run) < step and process.poll() is None:
        assert time.monotonic() < deadline, (process.kill(), finish(process))
        time.sleep(0.002)
    return process.poll() is None


def kill_at(folder: Path, step: int, pause: float) -> None:
    """Start or go on, and kill the process as soon as a checkpoint of this step is there and `pause` seconds are over."""
    process = begin(folder)
    if wait_for(folder / "run", step, process):
        time.sleep(pause)
    process.kill()
    _, _, err = finish(process)
    assert "Traceback" not in err


def contents(run: Path) -> dict:
    """Return all that a finished run has left, without times. The states of seeds are in its last checkpoint alone."""
    with open(run / "history.csv", newline="") as file:
        history = [{key: value for key, value in row.items() if key not in TIMES} for row in csv.DictReader(file)]
    last = max((run / "checkpoints").glob("state-*.npz"))
    with np.load(last) as file:
        state = {name: file[name] for name in file.files}
    progress = json.loads(state.pop("description").tobytes())["progress"]
    models = {name: keras.saving.load_model(run / name) for name in ("model.keras", "checkpoints/best.keras")}
    arrays = {
        f"{name}: {i} {variable.path.rsplit('/', 1)[-1]}": np.array(keras.ops.convert_to_numpy(variable.value))
        for name, model in models.items()
        for i, variable in enumerate([*model.weights, *model.optimizer.variables])
    }
    return {
        "history": history,
        "health": (run / "health.csv").read_text(),
        "steps": progress["step"],
        "arrays": arrays | state,
    }


def assert_same(run: Path, reference: dict) -> None:
    found = contents(run)
    arrays, expected = found.pop("arrays"), dict(reference)
    expected_arrays = expected.pop("arrays")
    assert found == expected
    assert arrays.keys() == expected_arrays.keys()
    for name, array in expected_arrays.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What a run leaves that nothing happens to."""
    folder = tmp_path_factory.mktemp("reference")
    status, out, err = finish(begin(folder))
    assert (status, err) == (0, "")
    assert "Finished: run/model.keras" in out
    found = contents(folder / "run")
    assert len(found["history"]) == 4
    assert found["steps"] == 60
    assert len(found["health"].splitlines()) == 1 + 60 // 7
    return found


def end(folder: Path) -> str:
    """Go on to the end and return what was said."""
    status, out, err = finish(begin(folder))
    assert (status, err) == (0, "")
    assert "Finished: run/model.keras" in out
    return out


class TestKilled:
    def test_twice(self, reference, tmp_path):
        """In the first epoch and, at the earliest, in the second; the last checkpoint before is all that is needed."""
        kill_at(tmp_path, 6, 0.01)
        first = newest(tmp_path / "run")
        kill_at(tmp_path, max(24, first + 3), 0.03)
        assert first < newest(tmp_path / "run") < 60
        assert len(steps(tmp_path / "run")) <= 2
        assert "Going on behind iteration" in end(tmp_path)
        assert_same(tmp_path / "run", reference)

    @pytest.mark.slow
    def test_many_times(self, reference, tmp_path):
        """At random moments, 20 on one backend: while it starts, compiles, trains, saves or validates."""
        chosen = random.Random(BACKEND)
        kills = 0
        while kills < (20 if BACKEND == "tensorflow" else 5):
            before = newest(tmp_path / "run")
            if before > 50:  # too near to the end for another
                assert "Finished" in end(tmp_path)
                assert_same(tmp_path / "run", reference)
                shutil.rmtree(tmp_path / "run")
                continue
            kill_at(tmp_path, before + chosen.choice([0, 1, 1, 1, 4, 7]), chosen.uniform(0, 0.3))
            assert newest(tmp_path / "run") >= before
            kills += 1
        end(tmp_path)
        assert_same(tmp_path / "run", reference)


class TestStopped:
    def test_by_a_machine_that_is_taken_away_then_by_hand_then_damaged(self, reference, tmp_path, capsys, monkeypatch):
        """Three processes, and what the third goes on from is not what it finds first."""
        run = tmp_path / "run"
        process = begin(tmp_path)
        assert wait_for(run, 6, process)
        process.send_signal(signal.SIGTERM)
        status, _, err = finish(process)
        assert (status, err) == (75, "")
        stopped = newest(run)
        assert 6 <= stopped < 60
        assert not (run / "model.keras").exists()

        process = begin(tmp_path)
        assert wait_for(run, stopped + 3, process)
        process.send_signal(signal.SIGINT)
        status, out, err = finish(process)
        assert (status, err) == (130, "")
        interrupted = newest(run)
        assert f"Going on behind iteration {stopped}." in out
        assert f"Interrupted behind iteration {interrupted} of 60" in out
        assert stopped < interrupted < 60

        [damaged] = (run / "checkpoints").glob(f"state-{interrupted:09d}-*.npz")
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
        [before] = [step for step in steps(run) if step < interrupted]
        out = end(tmp_path)
        assert re.search(rf"warning: run/checkpoints/{damaged.name} is damaged and passed over", out)
        assert f"Going on behind iteration {before}." in out
        assert_same(run, reference)

        untouched = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
        capsys.readouterr()
        monkeypatch.chdir(tmp_path)
        train.main(["--resume", "run"])
        assert capsys.readouterr().out.startswith("Finished already: run/model.keras.")
        message = error_of(capsys, run_train, Path("run"), *OPTIONS[len(TINY) :], "--resume", "--batch-size", "32")
        assert "run is a run with other options: --batch-size. " in message
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == untouched
