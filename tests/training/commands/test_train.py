"""Training runs: their files, options that reach the network, and how they end if they are
interrupted or fail.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import sys
import types

import keras
import numpy as np
import pytest

from tests.keras_preact.export.image_files import png
from tests.training import images as pictures
from tests.training.calls import (
    RUN,
    TINY,
    assert_same_weights,
    csv_rows,
    error_of,
    files,
    run_train,
    scalars,
    weights,
    words,
)
from training import backends
from training.commands import train
from training.config import Config, Data, Model, from_json
from training.data import evaluation_batches, load
from training.directory import models, runs
from training.directory.checkpoints import Saved
from training.directory.histories import read_table
from training.recipes import RECIPES
from training.run import fit
from training.run.signals import Stop

FILES = [
    "checkpoints/best.keras",
    "checkpoints/network.json",
    "config.json",
    "curves.png",
    "first_losses.csv",
    "history.csv",
    "model.keras",
]


def names(run) -> list[str]:
    """Return the files of a run except TensorBoard's. Names of checkpoints are without
    their hash.
    """
    found = [re.sub(r"(state-\d+)-[0-9a-f]{16}\.npz", r"\1", name) for name in files(run)]
    return [name for name in found if not name.startswith("tensorboard")]


def checkpoints(*iterations: int) -> list[str]:
    return [f"checkpoints/state-{iteration:09d}" for iteration in iterations]


def checkpoint(run, step: int) -> Saved:
    [path] = run.glob(f"checkpoints/state-{step:09d}-*")
    return Saved(path)


def accuracy(model: keras.Model, data, split) -> float:
    [(images, labels)] = evaluation_batches(data, split, split.size, None).as_numpy_iterator()
    return float((model.predict_on_batch(images).argmax(axis=1) == labels).mean())


@pytest.mark.backend
class TestRunDirectory:
    def test_holds_exactly_what_is_documented(self, run):
        assert names(run) == sorted([*FILES, *checkpoints(0, 30)])
        [events] = (name for name in files(run) if name.startswith("tensorboard"))
        assert re.fullmatch(r"tensorboard/train/events\.out\.tfevents\..+\.v2", events)

    def test_config_is_the_configuration_and_what_a_later_command_needs(self, run):
        described = json.loads((run / "config.json").read_text())
        config = described["config"]
        assert described["recipe"] == "digits"
        expected = json.loads(json.dumps(dataclasses.asdict(RECIPES["digits"]())))
        changes = {"name": "digits_resnet8_preact", "width_factor": 0.25}
        assert config["model"] == expected["model"] | changes
        changes = {"learning_rate": 0.05, "nesterov": True}
        assert config["optimizer"] == expected["optimizer"] | changes
        assert (config["schedule"]["drops"], config["batch_size"], config["seed"]) == ([20], 64, 3)
        assert described["classes"] == list("0123456789")
        assert described["images"] == {"train": 1437, "holdout": 0, "test": 360}
        assert described["preprocessing"] == load(Data("digits")).preprocessing.to_dict()
        assert (described["iterations"], described["trainable_parameters"]) == (30, 4934)
        versions = described["versions"]
        assert versions["keras"] == keras.__version__
        assert versions["backend"] == keras.backend.backend()
        assert described["code"] == backends.code()

    def test_history_and_tensorboard_have_every_epoch(self, run):
        history = csv_rows(run / "history.csv")
        assert [row["epoch"] for row in history] == ["0", "1"]
        logged = scalars(run / "tensorboard" / "train")
        for metric in ("loss", "accuracy"):
            values = [float(row[metric]) for row in history]
            assert np.isfinite(values).all()
            assert [step for step, _ in logged[f"epoch_{metric}"]] == [0, 1]
            found = [value for _, value in logged[f"epoch_{metric}"]]
            np.testing.assert_allclose(found, values, rtol=1e-5)
        assert float(history[1]["loss"]) < float(history[0]["loss"])

    def test_the_last_checkpoint_and_the_best_are_of_the_final_network(self, run):
        """The loss falls from epoch to epoch."""
        for name in ("last", "best"):
            assert_same_weights(models.open_run(run, name)[0], run / "model.keras")


def test_holdout_chooses_the_best_checkpoint(everything):
    """The checkpoint has the average of the weights."""
    described = json.loads((everything / "config.json").read_text())
    assert described["images"] == {"train": 1237, "holdout": 200, "test": 360}
    data = load(Data("digits", holdout=200))
    measured = [float(row["val_accuracy"]) for row in csv_rows(everything / "history.csv")]
    assert len(measured) == 3  # epochs of 5 iterations
    best = keras.saving.load_model(everything / "checkpoints" / "best.keras")
    assert accuracy(best, data, data.holdout) == pytest.approx(max(measured), abs=1e-6)
    first = measured.index(max(measured))  # the first of equal epochs
    assert int(best.optimizer.iterations) == min(12, 5 * (first + 1))
    final = models.load(everything / "model.keras")
    assert accuracy(final, data, data.holdout) == pytest.approx(measured[-1], abs=1e-6)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["cat", "dog"], r"2 classes \(training images\): cat \(1\), dog \(1\)\n"),
        (
            [f"c{i}" for i in range(11, 23)],
            r"12 classes \(training images\): c11 \(1\), .*, c20 \(1\) and 2 more\n"
            r"Training images of a class: from 1 \(c11\) to 1 \(c11\), median 1\.\n",
        ),
    ],
)
def test_the_first_lines_name_the_classes(names, words, tmp_path, capsys, monkeypatch):
    pictures.write_folder(tmp_path / "pictures", classes=names, images=1, size=(8, 8))
    printed = first_lines(tmp_path, capsys, monkeypatch)
    assert re.search(f"^{words}Run directory: ", printed, re.MULTILINE)


def test_options_are_checked_before_the_images(tmp_path, capsys):
    pictures.write_folder(tmp_path, images=1, size=(8, 8))
    (tmp_path / "test/dog/text.png").write_text("text")
    options = words(f"--data.dir {tmp_path} --data.size 8")
    for wrong in ("--batch-size 9", "--schedule.kind cosine --schedule.warmup 99"):
        arguments = ["folder_small", *TINY, *options, "--batch-size", "2", *words(wrong)]
        message = error_of(capsys, train.main, arguments)
        assert "broken" not in message
        assert re.search("--batch-size|warm-up", message)
    assert "1 broken image" in error_of(
        capsys, train.main, ["folder_small", *TINY, *options, "--batch-size", "2"]
    )


def first_lines(folder, capsys, monkeypatch, options="") -> str:
    """Return what a run in a folder prints before it trains on the images in `pictures`."""

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(fit.Fit, "train", interrupted)
    monkeypatch.chdir(folder)
    options = f"--data.dir pictures --data.size 8 --batch-size 2 --health 0 --output run {options}"
    with pytest.raises(SystemExit):
        train.main(["folder_small", *TINY, *options.split()])
    return capsys.readouterr().out


def test_the_first_lines_name_classes_without_training_images(tmp_path, capsys, monkeypatch):
    """The labels 0 and 2 of arrays are three classes."""
    images, labels = np.zeros((8, 8, 8, 1), "uint8"), np.arange(8) % 2 * 2
    np.savez(tmp_path / "a.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    printed = first_lines(tmp_path, capsys, monkeypatch, "--data.name npz --data.dir a.npz")
    assert "3 classes (training images): 0 (4), 1 (0), 2 (4)" in printed
    assert "1 of 3 classes have no training images: 1." in printed


def test_the_first_lines_say_what_a_person_may_not_expect(tmp_path, capsys, monkeypatch):
    """Classes of different sizes, a share of the images for the test, subfolders, broken files:
    the run directory lists those.
    """
    pictures.write_folder(tmp_path / "all", classes=("cat", "dog"), images=8, size=(8, 8))
    (tmp_path / "all" / "train").rename(tmp_path / "pictures")
    for i in range(2, 8):
        (tmp_path / f"pictures/dog/{i}.png").unlink()
    (tmp_path / "pictures/cat/album").mkdir()
    (tmp_path / "pictures/cat/7.png").rename(tmp_path / "pictures/cat/album/7.png")
    (tmp_path / "pictures/cat/broken.jpg").write_text("text")
    printed = first_lines(tmp_path, capsys, monkeypatch, "--data.test 0.25 --data.skip-broken")
    for line in (
        "Warning: Left out 1 broken image: pictures/cat/broken.jpg: it is not an image.",
        "2 classes (training images): cat (6), dog (1)",
        "cat has 6 times the training images of dog: --data.class-weights balanced makes all "
        "classes count alike.",
        "Test images: 3 of 10, a share of 0.25 of each class, the same in every run (--data.test).",
        "1 image is in a subfolder of its class.",
        "Images that were left out: run/broken.txt",
    ):
        assert f"{line}\n" in printed
    assert (
        tmp_path / "run/broken.txt"
    ).read_text() == "pictures/cat/broken.jpg\tit is not an image\n"
    shutil.rmtree("run")
    shutil.rmtree("pictures/cat/album")
    (tmp_path / "pictures/cat/broken.jpg").unlink()
    balanced = "--data.test 0.25 --data.class-weights balanced"
    assert "count alike" not in first_lines(tmp_path, capsys, monkeypatch, balanced)
    assert not (tmp_path / "run/broken.txt").exists()


class Zeros(keras.callbacks.Callback):
    """Sets the weights to 0 after 24 updates, so that the network knows one class."""

    def zero(self, *args):
        if self.model.optimizer.iterations >= 24:
            self.model.set_weights([np.zeros_like(weight) for weight in self.model.get_weights()])

    def __init__(self, when):
        super().__init__()
        setattr(self, when, self.zero)


HELD_OUT, WATCHED = "--data.holdout 200 --health 0", "--data.watch-test --health 0"
ENDS = {
    "restored": lambda folder: keras.callbacks.EarlyStopping(
        "val_loss", mode="max", patience=5, restore_best_weights=True
    ),
    "train_end": lambda folder: Zeros("on_train_end"),
    "epoch_end": lambda folder: Zeros("on_epoch_end"),
}


@pytest.mark.parametrize(
    ("images", "end"),
    [
        (HELD_OUT, "restored"),
        *(
            pytest.param(*pair, marks=pytest.mark.soak)
            for pair in itertools.product((HELD_OUT, WATCHED), ENDS)
            if pair != (HELD_OUT, "restored")
        ),
    ],
)
def test_the_accuracy_of_a_run_is_that_of_its_saved_network(
    images, end, tmp_path, monkeypatch, capsys
):
    module = types.ModuleType("callbacks_of_a_test")
    module.made = ENDS[end]
    monkeypatch.setitem(sys.modules, "callbacks_of_a_test", module)
    options = "--schedule.length 24 --steps-per-epoch 8 --callbacks callbacks_of_a_test:made"
    run = run_train(tmp_path / "run", options, images)
    out = capsys.readouterr().out
    data = load(Data("digits", holdout=200 if "holdout" in images else 0))
    split = data.holdout or data.test
    measured = 100 * accuracy(models.load(run / "model.keras"), data, split)
    last = 100 * float(csv_rows(run / "history.csv")[-1]["val_accuracy"])
    assert measured != pytest.approx(last, abs=0.1)
    name = "held-out" if data.holdout else "test"
    words = f"of the {split.size} {name} images. After the last epoch it was {last:.2f} %.\n"
    assert f"Accuracy: {measured:.2f} % {words}" in out
    train.main(["--resume", str(run), "--trust"])  # a finished run says the same again
    assert f"Accuracy: {measured:.2f} % {words}" in capsys.readouterr().out


def test_another_seed_gives_other_weights():
    networks_of = []
    for seed in (3, 4):
        config = Config(model=Model("digits_resnet8_preact"), data=Data("digits"), seed=seed)
        with train.started(config, "digits") as begun:
            networks_of.append(weights(begun.network))
    ours, theirs = networks_of
    for path in (path for path in ours if path.endswith("kernel")):
        assert np.abs(ours[path] - theirs[path]).max() > 1e-2


@pytest.mark.backend
def test_watching_the_test_set_and_the_health_changes_nothing(run, tmp_path, capsys):
    watched = run_train(tmp_path / "run", *RUN, "--data.watch-test --health 7")
    out = capsys.readouterr().out
    model = models.load(watched / "model.keras")
    assert_same_weights(model, run / "model.keras")
    assert names(watched) == sorted([*FILES, "health.csv", *checkpoints(0, 30)])
    data = load(Data("digits"))
    measured = accuracy(model, data, data.test)
    history = csv_rows(watched / "history.csv")
    assert float(history[-1]["val_accuracy"]) == pytest.approx(measured, abs=1e-6)
    assert f"Accuracy: {100 * measured:.2f} % of the 360 test images." in out
    # the test images do not choose the best epoch
    lowest = min(float(row["loss"]) for row in history)
    assert checkpoint(watched, 30).progress["best"]["best"] == pytest.approx(-lowest)
    health = csv_rows(watched / "health.csv")
    assert [row["step"] for row in health] == ["7", "14", "21", "28"]
    for figure in ("gradient_norm", "weight_norm", "update_norm", "activation_std"):
        values = [float(row[f"{figure}/stage2_unit1/branch/conv_1/kernel"]) for row in health]
        assert np.isfinite(values).all()
        assert min(values) > 0
    logged = dict(scalars(watched / "tensorboard" / "health")["health/gradient_norm"])
    expected = {int(row["step"]): float(row["gradient_norm"]) for row in health}
    assert logged == pytest.approx(expected, rel=1e-5)


class TestEndings:
    """Runs that are interrupted, diverge, fail, or find their directory in use."""

    def test_interruption(self, tmp_path, capsys, monkeypatch):
        """It ends after its step, saves, and says how to resume."""

        class Interrupted(Stop):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 6:
                    signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(fit, "Stop", Interrupted)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(SystemExit) as ended:
                run_train(run := tmp_path / "run", "--schedule.length 22 --health 0")
        finally:
            signal.signal(signal.SIGINT, before)
        assert ended.value.code == 130
        message = "Interrupted after iteration 7 of 22; the checkpoint is saved. Resume: "
        assert capsys.readouterr().out.endswith(f"{message}keras-preact resume {run}\n")
        unfinished = ["checkpoints/network.json", "config.json", "first_losses.csv"]
        assert names(run) == sorted([*unfinished, *checkpoints(0, 7)])

    def test_divergence(self, tmp_path, capsys):
        options = "--optimizer.learning-rate 1e8 --schedule.length 100 --health 1"
        message = error_of(capsys, run_train, tmp_path / "run", options)
        cause = r"error: Learning rate 1e\+08 is probably too high: the loss is (nan|inf) in "
        assert re.match(cause + r"iteration \d+ \(epoch 1\)\. ", message)
        assert "Lower --optimizer.learning-rate or lengthen --schedule.warmup. " in message
        assert re.search(r"pdate \d+.* (stem|stage|head)\S+/\w+ (changed most|is not)", message)
        unfinished = ["checkpoints/network.json", "config.json", "first_losses.csv", "health.csv"]
        unfinished += ["diverged.json", *checkpoints(0)]
        assert names(tmp_path / "run") == sorted(unfinished)
        iteration = re.search(r"iteration (\d+)", message)[1]
        assert runs.diverged_at(tmp_path / "run") == int(iteration)

    def test_a_loss_above_guessing(self, run, tmp_path, capsys):
        """A finished run prints its last messages again. Here its last loss is changed."""
        shutil.copytree(run, tmp_path / "run")
        history = tmp_path / "run" / "history.csv"
        last = csv_rows(history)[-1]["loss"]
        history.write_text(history.read_text().replace(last, "1e4"))
        train.main(["--resume", str(tmp_path / "run")])
        data = load(Data("digits"))
        measured = accuracy(models.load(run / "model.keras"), data, data.test)
        warning, finished, accurate, following = capsys.readouterr().out.splitlines()[-4:]
        assert warning.startswith("Warning: learning rate 0.05 is probably too high")
        assert warning.endswith("Try 0.005.")
        assert finished.startswith("Already finished after ")
        assert accurate == f"Accuracy: {100 * measured:.2f} % of the 360 test images."
        assert following == f"Next: keras-preact evaluate {tmp_path / 'run'}"

    @pytest.mark.parametrize("resume", [[], ["--resume"]])
    def test_another_process_trains_in_the_directory(self, tmp_path, capsys, resume):
        run = tmp_path / "run"
        run.mkdir()
        with runs.locked(run):
            message = error_of(capsys, run_train, run, *resume)
        assert f"error: {run} is in use by process {os.getpid()} on " in message
        assert names(run) == []

    def test_another_process_has_begun_a_run_in_the_directory(self, tmp_path, capsys, monkeypatch):
        """The other process started after this one had found the directory empty, and has
        already finished.
        """

        @contextlib.contextmanager
        def locked(run):
            (run / "config.json").write_text("{}")
            yield

        monkeypatch.setattr(runs, "locked", locked)
        message = error_of(capsys, run_train, tmp_path / "run")
        assert f"{tmp_path / 'run'} exists and is not empty" in message
        assert names(tmp_path / "run") == ["config.json"]

    @pytest.mark.parametrize(
        ("length", "fault", "begins"),
        [
            (None, "it cannot be decoded", True),
            (1500, "it cannot be decoded", False),
            (2, "it is not an image", False),
        ],
    )
    def test_image_that_breaks_off(self, tmp_path, capsys, length, fault, begins):
        """A test image that breaks off is found before the run begins. One whose header is
        right is found when it is decoded, after the first epoch.
        """
        pictures.write_folder(tmp_path / "pictures", images=2, size=(64, 64))
        bad = tmp_path / "pictures" / "test" / "dog" / "cut.jpg"
        with pictures.Image.open(bad.with_name("0.png")) as image:
            image.save(bad)
        bad.write_bytes(bad.read_bytes()[:length] if length else png(64, 64, 8, 2, b""))
        options = "--data.dir pictures --data.size 8 --data.watch-test --batch-size 2 --output run"
        with contextlib.chdir(tmp_path):
            message = error_of(
                capsys, train.main, ["folder_small", *TINY, *words(options, "--health 0")]
            )
        name = "pictures/test/dog/cut.jpg"
        assert f"error: Found 1 broken image: {name}: {fault}. Repair" in message
        assert (tmp_path / "run").exists() == begins


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("digits --resume", "--resume needs --output"),
        ("digits --distribution multi_worker", "multi_worker needs --output"),
        ("digits --data.class-weights balanced --data.mixup 1", "remove --data.mixup"),
        (
            "digits --model.name digits_resnet8_preact --optimizer.exclude-from-decay norm gama",
            "no trained weight has gama in its path. The paths: stem_conv/kernel, ",
        ),
        ("digits --accumulate 7 --batch 9", "--accumulate 7 --batch 9"),
        ("digits --lr=0", "--lr must be positive"),
        ("digits --optimizer.learning-rate 0 --batch 9", "--optimizer.learning-rate must be"),
    ],
)
def test_errors(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in error_of(capsys, train.main, words(arguments))
    assert files(tmp_path) == []


@pytest.mark.parametrize(("short", "errors"), [("--health", 1), ("--lr", 2)])
def test_verbose_shows_an_error_again_only_if_its_words_change(short, errors, capsys):
    with pytest.raises(SystemExit):
        train.main(["digits", f"{short}=-1", "--verbose"])
    assert capsys.readouterr().err.count("training.errors.UserError: ") == errors


def test_another_option_than_the_run_was_begun_with(run, capsys):
    message = error_of(capsys, run_train, run, *RUN, "--resume --seed 4 --optimizer.ema 0.9")
    assert "was started with another value of --optimizer.ema, --seed." in message
    assert f"keras-preact resume {run}" in message


class TestOptionsOfARun:
    """`train --config RUN`."""

    @pytest.mark.parametrize("file", ["{run}", "{run}/config.json"])
    @pytest.mark.parametrize("equals", [False, True])
    def test_they_are_the_options_of_a_new_run(self, file, equals, run, received):
        own = from_json(Config, json.loads((run / "config.json").read_text())["config"])
        name = file.format(run=run)
        words = [f"--config={name}"] if equals else ["--config", name]
        assert own.output is not None
        assert received(*words) == dataclasses.replace(own, output=None)
        changes = {"seed": 4, "schedule": own.schedule.over(60), "output": run.parent / "new"}
        given = ["--seed", "4", "--epochs", "60", "--output", str(changes["output"])]
        assert received(*words, *given) == dataclasses.replace(own, **changes)

    def test_a_new_run_keeps_the_name_of_the_recipe(self, run, tmp_path, capsys):
        train.main(
            [
                "--config",
                str(run),
                "--schedule.length",
                "5",
                "--schedule.warmup",
                "0",
                "--output",
                str(tmp_path / "new"),
            ]
        )
        before, now = map(runs.read_config, (run, tmp_path / "new"))
        assert (now["recipe"], now["config"]["seed"]) == (before["recipe"], 3)
        assert (now["config"]["resume"], now["iterations"]) == (False, 5)

    @pytest.mark.parametrize(
        ("line", "content", "message"),
        [
            ("", None, "--config takes a run directory or its config.json. Received: nothing"),
            ("--seed 4", None, "--config takes a run directory or its config.json. Received: --s"),
            ("a", None, "a does not exist"),
            (".", None, "is not a run directory: it has no config.json"),
            ("a", '{"config": {', "a is damaged: JSONDecodeError"),
            ("a", "[]", "a was not written by keras-preact train"),
            ("a", '{"config": []}', "a is damaged or of another version"),
            ("a", '{"config": {"warp": 9}}', "its option warp is unknown here"),
            ("a", '{"config": {"seed": "x"}}', "The option seed cannot be 'x'"),
            ("a", '{"config": {"seed": true}}', "The option seed cannot be True"),
            ("a", '{"config": {"model": {"width_factor": [1]}}}', "option width_factor cannot be"),
            ("a", '{"config": {"data": {"flip": "up"}}}', "The option flip cannot be 'up'"),
            ("a", '{"config": {"schedule": {"drops": [1, "b"]}}}', "The option drops cannot be"),
            ("a", '{"config": {"batch_size": 0}}', "--batch-size must be at least 1"),
        ],
    )
    def test_errors(self, line, content, message, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        if content is not None:
            (tmp_path / "a").write_text(content)
        before = files(tmp_path)
        assert message in error_of(capsys, train.main, ["--config", *words(line)])
        assert files(tmp_path) == before


@pytest.mark.backend
def test_rare_classes_weigh_more(tmp_path):
    """Compute the loss of the first step from the logits of the initial network."""
    images = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 1), "uint8")
    labels = np.array([0, 1, 1, 2] * 4)
    part = {"x_test": images[:4], "y_test": labels[:4]}
    np.savez(tmp_path / "a.npz", x_train=images, y_train=labels, **part)
    options = f"--data.name npz --data.dir {tmp_path / 'a.npz'} --batch-size 16 --health 0"
    run = run_train(
        tmp_path / "run",
        options,
        "--data.class-weights balanced --schedule.length 1 --data.augmentation none",
    )
    network = models.open_run(run)[0]
    checkpoint(run, 0).restore(network)
    logits = np.asarray(
        keras.ops.convert_to_numpy(network(images.astype("float32"), training=True))
    )
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(16), labels]
    weights = np.array([4 / 3, 2 / 3, 4 / 3])[labels]
    assert np.mean(weights) == pytest.approx(1)
    [loss] = read_table(run / "first_losses.csv")["loss"]
    assert loss == pytest.approx(np.mean(weights * losses), rel=1e-4)
    assert loss != pytest.approx(np.mean(losses), rel=1e-3)
