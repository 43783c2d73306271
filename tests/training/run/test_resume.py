"""Killed, stopped and damaged runs resume, and end like an uninterrupted run, to the bit."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.training.calls import (
    EVERYTHING,
    TINY,
    csv_rows,
    error_of,
    files,
    finish,
    run_train,
    start,
    words,
)
from tests.training.images import write_folder
from training.commands import train
from training.directory import models

#: Columns of history.csv that depend on the machine.
TIMES = ("images_per_second", "seconds")


def contents(run) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the contents of a finished run without times: its texts and names of files, and
    its arrays. Only its last checkpoint has the states of seeds.
    """
    history = [
        {key: value for key, value in row.items() if key not in TIMES}
        for row in csv_rows(run / "history.csv")
    ]
    with np.load(max((run / "checkpoints").glob("state-*.npz"))) as file:
        arrays = dict(file)
    progress = json.loads(arrays.pop("description").tobytes())["progress"]
    texts = {name: (run / name).read_text() for name in ("health.csv", "first_losses.csv")}
    names = [re.sub("-[0-9a-f]{16}", "", name) for name in files(run) if "events" not in name]
    for name in ("model.keras", "checkpoints/best.keras"):
        weights = models.load(run / name).get_weights()
        arrays |= {f"{name} {i}": weight for i, weight in enumerate(weights)}
    described = {"history": history, "files": names, "best": progress["best"]} | texts
    return described | {"step": progress["step"]}, arrays


def assert_same(run, reference) -> None:
    """Compare the contents of two runs."""
    (found, arrays), (expected, others) = contents(run), contents(reference)
    assert found == expected
    assert arrays.keys() == others.keys()
    for name, array in others.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)


def checkpoint(run, step: int):
    [path] = run.glob(f"checkpoints/state-{step:09d}-*")
    return path


def progress_at(run, step: int) -> dict:
    with np.load(checkpoint(run, step)) as file:
        return json.loads(file["description"].tobytes())["progress"]


def back_to(run, step: int) -> None:
    """Return a run to the state in which a process was killed some steps after the checkpoint
    of `step`: history.csv, health.csv and best.keras are from later steps.
    """
    (run / "model.keras").unlink()
    (run / "curves.png").unlink()
    for path in run.glob("checkpoints/state-*"):
        if int(path.name[6:15]) > step:
            path.unlink()


class Written:
    """Records the files that this process opens for writing, and whether it appends. Set
    `files` to None to stop: Python cannot remove an audit hook.
    """

    def __init__(self):
        self.files: set[tuple[str, bool]] | None = None
        sys.addaudithook(self.hear)

    def hear(self, event, values):
        if self.files is None or event != "open" or not isinstance(values[0], str | Path):
            return
        if values[2] & os.O_ACCMODE != os.O_RDONLY:
            self.files.add((os.path.abspath(values[0]), bool(values[2] & os.O_APPEND)))


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(8, marks=pytest.mark.backend),  # in the middle of the first epoch
        24,  # all steps are done; only the model is missing
    ],
)
def test_killed_and_resumed_to_the_bit(everything, tmp_path, step):
    """A file gets its name when it is complete. Only health.csv is appended to, line by line."""
    run = tmp_path / "run"
    shutil.copytree(everything, run)
    back_to(run, step)
    with open(run / "health.csv", "a") as file:
        file.write("7,0,0.1")  # a line that was being written
    written = Written()
    written.files = set()
    train.main(["--resume", str(run)])
    found, written.files = written.files, None
    names = {(path.removeprefix(f"{run}/"), appends) for path, appends in found}
    assert any(name.startswith("checkpoints/.state-") for name, _ in names) == (step < 24)
    shown = {(name, appends) for name, appends in names if (run / name).exists()}
    shown = {each for each in shown if not os.path.isabs(each[0]) and each[0] != ".lock"}
    assert shown <= {("health.csv", True)}
    assert_same(run, everything)


def within_an_update(folder):
    """Return a callback that stops the run after step 9. Its update is steps 9 and 10."""

    def stop(batch, logs):
        if batch == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    return keras.callbacks.LambdaCallback(on_train_batch_end=stop)


@pytest.mark.backend
def test_stopped_within_an_update_and_resumed(everything, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(everything, run)
    back_to(run, 8)
    stopping = words(f"--resume --callbacks {__name__}:{within_an_update.__name__}")
    with pytest.raises(SystemExit) as stopped:
        run_train(run, *EVERYTHING, *stopping)
    assert stopped.value.code == 75
    assert checkpoint(run, 9)
    run_train(run, *EVERYTHING, "--resume")
    found, expected = contents(run)[0], contents(everything)[0]
    assert found | {"files": expected["files"]} == expected  # checkpoints of other steps


def at_once(folder):
    """Return a callback that stops the run after a step."""
    stop = lambda batch, logs: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    return keras.callbacks.LambdaCallback(on_train_batch_end=stop)


def test_options_of_a_resume_are_those_of_the_next(everything, tmp_path):
    """What is off meanwhile keeps its state, such as the accuracy of the best epoch."""
    run = tmp_path / "run"
    shutil.copytree(everything, run)
    back_to(run, 12)
    name = f"{__name__}:{at_once.__name__}"
    others = words(f"--health 0 --checkpoint.no-best --callbacks {name}")
    with pytest.raises(SystemExit):
        run_train(run, *EVERYTHING, *others, "--resume")
    config = json.loads((run / "config.json").read_text())["config"]
    assert config["callbacks"] == [name]
    assert config["health"] == 0
    assert not config["checkpoint"]["best"]
    assert not config["resume"]
    before, after = (progress_at(run, step) for step in (12, 13))
    assert after["best"]["best"] > 0
    assert [after[name] for name in ("best", "health")] == [before["best"], before["health"]]
    with pytest.raises(SystemExit):
        train.main(["--resume", str(run), "--trust"])
    assert progress_at(run, 14)["best"] == before["best"]
    with pytest.raises(SystemExit):
        run_train(run, *EVERYTHING, "--callbacks", name, "--resume")
    assert progress_at(run, 15)["best"] == before["best"]


@pytest.mark.backend
def test_the_last_checkpoint_has_the_trained_weights_and_the_model_their_averages(everything):
    last, final = (models.open_run(everything, name)[0] for name in ("last", "final"))
    for trained, average in zip(last.trainable_weights, final.trainable_weights, strict=True):
        trained, average = map(keras.ops.convert_to_numpy, (trained, average))
        assert 1e-7 < np.abs(trained - average).max() < 0.5, average.shape


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path):
    options = words("--schedule.length 1 --health 0")
    run = run_train(tmp_path / "run", *options)
    for path in [run / "model.keras", *(run / "checkpoints").iterdir()]:
        path.unlink()
    (run / "diverged.json").write_text('{"iteration": 1}')  # as an earlier attempt did
    run_train(run, *options, "--resume")
    assert (run / "model.keras").is_file()
    assert not (run / "diverged.json").exists()
    assert checkpoint(run, 1)


def test_images_that_changed_since_the_start(tmp_path, monkeypatch, capsys):
    """Nothing of the run changes. With the images as before, it resumes."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "photos", size=(8, 8))
    options = "--data.dir photos --data.size 8 --batch-size 4 --health 0 --checkpoint.every 1"
    train.main(["folder_small", *TINY, *words(options, "--data.holdout 4 --output run")])
    back_to(tmp_path / "run", 2)
    before = {name: (tmp_path / "run" / name).read_bytes() for name in files(tmp_path / "run")}
    image = tmp_path / "photos/train/cat/0.png"
    pixels, added = image.read_bytes(), image.with_name("9.png")
    shutil.copy(image, added)
    message = error_of(capsys, train.main, ["--resume", "run"])
    assert "8 training images, now 9; other held-out images; mean of the pixels" in message
    assert "restore them; to train on the images as they are now, start a new run" in message
    added.unlink()
    image.write_bytes(image.with_name("1.png").read_bytes())
    assert "other training images" in error_of(capsys, train.main, ["--resume", "run"])
    assert before == {name: (tmp_path / "run" / name).read_bytes() for name in before}
    image.write_bytes(pixels)
    train.main(["--resume", "run"])
    assert (tmp_path / "run/model.keras").is_file()


#: Kills itself just before a checkpoint gets its name.
KILLED = """
import os, signal, sys

def kill(event, values):
    if event == "os.rename" and sys.argv[1] in str(values[1]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
from training.commands import train
train.main(sys.argv[2:])
"""


@pytest.mark.process
def test_a_killed_process_resumes_to_the_bit(everything, tmp_path, monkeypatch):
    """The killed run was trained in another process, from the same seed."""
    arguments = ("digits", *TINY, *EVERYTHING, "--output", "run")
    process = start("-c", KILLED, "state-000000012", *arguments, cwd=tmp_path)
    assert finish(process)[0] == -signal.SIGKILL
    names = [path.name[:16] for path in (tmp_path / "run/checkpoints").glob("*state-*")]
    expected = [".state-000000012", *(f"state-{step:09d}-" for step in (0, 4, 8))]
    assert sorted(names) == expected
    monkeypatch.chdir(tmp_path)
    train.main(["--resume", "run"])
    assert_same(tmp_path / "run", everything)


@pytest.mark.process
def test_a_stopped_process_saves_and_says_how_to_resume(tmp_path):
    options = words("--schedule.length 1000000 --health 0 --output run")
    process = start("-m", "training", "train", "digits", *TINY, *options, cwd=tmp_path)
    try:
        for line in process.stdout:
            if line.startswith("Epoch 1/"):
                break
        process.send_signal(signal.SIGTERM)
        status, out, _ = finish(process)
    finally:
        process.kill()
    assert status == 75
    message = re.search(r"Stopped by SIGTERM after iteration ([\d,]+) of 1,000,000; (.*)\n$", out)
    assert message[2] == "the checkpoint is saved. Resume: keras-preact resume run"
    assert checkpoint(tmp_path / "run", int(message[1].replace(",", "")))
    assert not (tmp_path / "run/model.keras").exists()
