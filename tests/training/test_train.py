"""Training runs: what they leave behind, that options reach the network, and how they
end when something happens.
"""

import contextlib
import csv
import dataclasses
import errno
import json
import os
import re
import signal
import time

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.training import images as pictures
from tests.training.commands import (
    RUN,
    TINY,
    error_of,
    files,
    finish,
    run_evaluate,
    run_train,
    scalars,
    start,
    words,
)
from training import backends, networks, runs, train
from training.checkpoints import Saved
from training.config import Config, Data, Model
from training.data import evaluation_batches, load
from training.recipes import RECIPES

EVENTS = r"tensorboard/train/events\.out\.tfevents\..+\.v2"
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
    """Return the files of a run but for TensorBoard's; a checkpoint's name without its
    hash.
    """
    found = [re.sub(r"(state-\d+)-[0-9a-f]{16}\.npz", r"\1", name) for name in files(run)]
    return [name for name in found if not name.startswith("tensorboard")]


def checkpoints(*iterations: int) -> list[str]:
    return [f"checkpoints/state-{iteration:09d}" for iteration in iterations]


def loaded(path) -> keras.Model:
    return keras.saving.load_model(path)


def weights(path) -> list[np.ndarray]:
    return [np.array(weight) for weight in networks.load(path).weights]


def history(run) -> list[dict[str, str]]:
    with open(run / "history.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.backend
class TestRunDirectory:
    def test_holds_exactly_what_is_documented(self, run):
        assert names(run) == sorted([*FILES, *checkpoints(0, 30)])
        events = [name for name in files(run) if name.startswith("tensorboard")]
        assert len(events) == 1
        assert re.fullmatch(EVENTS, events[0])

    def test_config_is_the_configuration_and_what_a_later_command_needs(self, run):
        described = json.loads((run / "config.json").read_text())
        assert described["recipe"] == "digits"
        expected = json.loads(json.dumps(dataclasses.asdict(RECIPES["digits"]())))
        changed = described["config"]["model"]
        assert changed["name"] == "digits_resnet8_preact"
        assert changed == expected["model"] | {"name": changed["name"], "width_factor": 0.25}
        changes = {"learning_rate": 0.05, "nesterov": True}
        assert described["config"]["optimizer"] == expected["optimizer"] | changes
        assert described["config"]["schedule"]["drops"] == [20]
        assert (described["config"]["batch_size"], described["config"]["seed"]) == (64, 3)
        assert described["config"]["output"].endswith("/run")
        assert described["classes"] == list("0123456789")
        assert described["images"] == {"train": 1437, "holdout": 0, "test": 360}
        assert described["preprocessing"] == load(Data("digits")).preprocessing.to_dict()
        assert described["iterations"] == 30
        assert described["trainable_parameters"] == 4934
        versions = described["versions"]
        assert (versions["keras"], versions["backend"]) == (
            keras.__version__,
            keras.backend.backend(),
        )
        assert {"python", "tensorflow", "numpy"} <= set(versions)
        assert described["code"] == runs.code()

    def test_history_and_tensorboard_have_every_epoch(self, run):
        rows = history(run)
        assert [row["epoch"] for row in rows] == ["0", "1"]
        logged = scalars(run / "tensorboard" / "train")
        for metric in ("loss", "accuracy"):
            values = [float(row[metric]) for row in rows]
            assert np.isfinite(values).all()
            assert [step for step, _ in logged[f"epoch_{metric}"]] == [0, 1]
            np.testing.assert_allclose(
                [value for _, value in logged[f"epoch_{metric}"]], values, rtol=1e-5
            )
        assert float(rows[1]["loss"]) < float(rows[0]["loss"])

    def test_checkpoints(self, run):
        """The loss falls from epoch to epoch, so the last epoch's network is the final
        one and the best.
        """
        final = weights(run / "model.keras")
        for checkpoint in ("last", "best"):
            model, _ = networks.open_run(run, checkpoint)
            for ours, theirs in zip(model.weights, final, strict=True):
                np.testing.assert_array_equal(np.array(ours), theirs)

    def test_number_of_iterations_is_exact(self, run):
        assert int(loaded(run / "model.keras").optimizer.iterations) == 30

    def test_optimizer_is_the_papers_with_the_configured_schedule(self, run):
        optimizer = loaded(run / "model.keras").optimizer
        assert isinstance(optimizer, kp.optimizers.CoupledSGD)
        config = optimizer.get_config()
        assert (config["momentum"], config["nesterov"]) == (0.9, True)
        assert (config["coupled_weight_decay"], config["exclude_from_decay"]) == (5e-3, [])
        assert config["weight_decay"] is None
        rate = optimizer._learning_rate
        expected = {0: 0.01, 3: 0.01, 4: 0.05, 19: 0.05, 20: 0.005, 29: 0.005}
        assert {step: round(float(rate(step)), 7) for step in expected} == expected

    def test_network_takes_raw_pixels(self, run):
        model = loaded(run / "model.keras")
        layer = model.get_layer("preprocessing")
        statistics = load(Data("digits")).preprocessing  # of the training images
        np.testing.assert_allclose(np.ravel(layer.mean), statistics.mean, rtol=1e-5)
        np.testing.assert_allclose(np.ravel(layer.variance), [statistics.std[0] ** 2], rtol=1e-5)
        # the same weights behind normalised pixels
        bare = kp.create_model("digits_resnet8_preact", width_factor=0.25)
        trained = {weight.path: np.array(weight) for weight in model.weights}
        for weight in bare.weights:
            weight.assign(trained[weight.path])
        pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1)).astype("float32")
        normalised = (pixels - statistics.mean[0]) / statistics.std[0]
        np.testing.assert_allclose(
            model.predict_on_batch(pixels),
            bare.predict_on_batch(normalised.astype("float32")),
            atol=1e-4,
        )


@pytest.mark.backend
@pytest.mark.soak
def test_same_seed_same_weights_in_another_process(run, tmp_path, capsys, monkeypatch):
    status, out, err = finish(
        start("-m", "training", "train", "digits", *TINY, *RUN, "--output", "run", cwd=tmp_path)
    )
    assert (status, err) == (0, "")
    name, length = (
        "digits_resnet8_preact (4,934 parameters)",
        "30 iterations (1.36 epochs), batch 64",
    )
    assert (
        f"Training {name} on 1,437 images of digits for {length} ({keras.backend.backend()}).\n"
        in out
    )
    data = load(Data("digits"))
    images, labels = next(evaluation_batches(data, data.test, 360, None).as_numpy_iterator())
    correct = (
        loaded(tmp_path / "run" / "model.keras").predict_on_batch(images).argmax(axis=1) == labels
    ).mean()
    end = r"after \d+ s of training: run/model.keras\n"
    end += rf"Accuracy: {100 * correct:.2f} % of the 360 test images\.\n"
    end += "Next: keras-preact evaluate run\n"
    assert re.search(f"\nFinished {end}$", out)
    monkeypatch.chdir(tmp_path)
    train.main(["--resume", "run"])
    assert re.fullmatch(f"Already finished {end}", capsys.readouterr().out)
    for ours, theirs in zip(
        weights(run / "model.keras"), weights(tmp_path / "run" / "model.keras"), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture(scope="session")
def step(once_per_run):
    """A run of one iteration, of another seed, with other images and a decay that is
    strong.
    """
    options = words(
        "--seed 4 --data.augmentation resized_crop_flip --schedule.length 1 --schedule.kind steps",
        "--optimizer.learning-rate 0.01 --optimizer.weight-decay 99",
        "--optimizer.exclude-from-decay norm bias",
    )
    return once_per_run("step", lambda folder: run_train(folder / "run", *options)) / "run"


@pytest.mark.backend
def test_another_seed_other_weights(run, step):
    """From the beginning on, where nothing but the seed makes a difference."""
    beginnings = []
    for each in (run, step):
        model = networks.architecture(each)
        [path] = each.glob("checkpoints/state-000000000-*")
        Saved(path).restore(model)
        beginnings.append([np.array(weight) for weight in model.weights])
    for ours, theirs in zip(*beginnings, strict=True):
        if ours.ndim > 1:  # kernels
            assert np.abs(ours - theirs).max() > 1e-2


def built(**options) -> dict:
    """Return what a network of these options of --model is."""
    model = Model("digits_resnet8_preact", **options)
    config = networks.build(Config(model=model), load(Data("digits")), 8).get_config()
    return config | {"shortcut": config["shortcut"]["class_name"]}


@pytest.fixture(scope="module")
def plain():
    return built()


@pytest.mark.backend
class TestOptionsOfTheModel:
    @pytest.mark.parametrize(
        ("option", "value", "expected"),
        [
            ("arrangement", "relu_before_addition", "relu_before_addition"),
            ("shortcut", "dropout", "Dropout"),
            ("normalization", "layer", "layer"),
            ("activation", "elu", "elu"),
            ("block", "single", "single"),
            ("dropout", 0.25, 0.25),
            ("width_factor", 0.5, None),
        ],
    )
    def test_reaches_the_network_alone(self, plain, option, value, expected):
        changed = built(**{option: value})
        others = {"width_factor": {"stem_filters", "stages"}, "block": {"block", "stages"}}
        assert {key for key in plain if plain[key] != changed[key]} == others.get(option, {option})
        assert changed.get(option) == expected
        assert changed["stem_filters"] == (8 if option == "width_factor" else 16)

    def test_whitening_stem_is_computed_from_the_training_images(self, tmp_path):
        run = run_train(
            tmp_path / "run",
            "--model.name cifar_fast_resnet8 --optimizer.learning-rate 0.01",
        )
        model, data = loaded(run / "model.keras"), load(Data("digits"))
        stem = keras.Model(model.input, model.get_layer("stem_conv").output)
        components = stem.predict(data.held.images, verbose=0).astype("float64")[..., :4]
        covariance = np.cov(components.reshape(-1, 4).T)
        # of 2 x 2 pixels with a mean of 0 and a variance of 1: none is flat
        np.testing.assert_allclose(covariance, np.eye(4), atol=0.02)

    def test_reaches_the_network_of_a_run(self, tmp_path, capsys):
        options = (
            "--model.arrangement original --model.shortcut exclusive_gating --model.gate-bias -6",
            "--model.dtype mixed_bfloat16 --schedule.kind steps --schedule.length 2",
        )
        run = run_train(tmp_path / "run", *options, "--schedule.warmup 2")
        assert "Warning: The warm-up (2 iterations) is not shorter" in capsys.readouterr().out
        model = loaded(run / "model.keras")
        config = model.get_config()
        assert (config["arrangement"], config["shortcut"]["class_name"]) == (
            "original",
            "ExclusiveGating",
        )
        gates = [
            np.array(weight)
            for weight in model.weights
            if "gate" in weight.path and weight.path.endswith("bias")
        ]
        assert len(gates) == 3
        # two small steps from where they start
        np.testing.assert_allclose(np.concatenate(gates), -6, atol=0.1)
        assert model.units[0].compute_dtype == "bfloat16"
        assert {weight.dtype for weight in model.trainable_weights} == {"float32"}
        assert keras.backend.standardize_dtype(model.output.dtype) == "float32"
        assert np.isfinite(float(history(run)[0]["loss"]))
        assert int(model.optimizer.iterations) == 2


@pytest.mark.backend
def test_holdout_chooses_the_best_checkpoint(tmp_path, capsys):
    # at this rate the accuracy on the images set aside goes up and down
    options = "--data.holdout 200 --schedule.length 80 --optimizer.learning-rate 0.5"
    run = run_train(tmp_path / "run", options)
    described = json.loads((run / "config.json").read_text())
    assert described["images"] == {"train": 1237, "holdout": 200, "test": 360}
    rows = history(run)
    assert len(rows) == 5  # 19 iterations an epoch
    data = load(Data("digits", holdout=200))
    batches = evaluation_batches(data, data.holdout, 200, None)
    images, labels = next(batches.as_numpy_iterator())
    accuracies = {
        name: float(
            (
                networks.open_run(run, name)[0].predict_on_batch(images).argmax(axis=1) == labels
            ).mean()
        )
        for name in ("best", "last")
    }
    measured = [float(row["val_accuracy"]) for row in rows]
    assert accuracies == pytest.approx({"best": max(measured), "last": measured[-1]}, abs=1e-6)
    out = capsys.readouterr().out
    assert (
        len(re.findall(r"\nEpoch \d/5: .*; held-out loss \d+\.\d{4}, accuracy \d\.\d{4}", out)) == 5
    )
    assert f"Accuracy: {100 * measured[-1]:.2f} % of the 200 held-out images.\n" in out
    assert "test images" not in out


def test_watched_test_images_choose_nothing(tmp_path):
    # at this rate the loss falls, and the accuracy on the test images goes up and down
    options = "--data.watch-test --schedule.length 60 --schedule.kind steps --lr 1 --seed 2"
    run = run_train(tmp_path / "run", options)
    rows = history(run)
    by_loss = min(rows, key=lambda row: float(row["loss"]))
    assert by_loss is not max(rows, key=lambda row: float(row["val_accuracy"]))
    best = loaded(run / "checkpoints" / "best.keras")
    assert int(best.optimizer.iterations) == int(by_loss["iteration"])


@pytest.mark.backend
def test_weights_that_are_spared_from_the_decay(step):
    """At a decay so strong, a step leaves hardly anything of a weight that is not
    spared.
    """
    for weight in loaded(step / "model.keras").trainable_weights:
        if weight.path.endswith("gamma"):
            assert np.array(weight).min() > 0.5
        if weight.path.endswith("kernel"):
            assert np.abs(np.array(weight)).max() < 0.05


@pytest.mark.backend
def test_watching_the_test_set_and_the_health_changes_nothing(run, tmp_path, capsys):
    watched = run_train(tmp_path / "run", *RUN, "--data.watch-test --health 7")
    for ours, theirs in zip(
        weights(run / "model.keras"), weights(watched / "model.keras"), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert names(watched) == sorted([*FILES, "health.csv", *checkpoints(0, 30)])
    data = load(Data("digits"))
    images, labels = next(evaluation_batches(data, data.test, 360, None).as_numpy_iterator())
    accuracy = (
        loaded(watched / "model.keras").predict_on_batch(images).argmax(axis=1) == labels
    ).mean()
    assert float(history(watched)[-1]["val_accuracy"]) == pytest.approx(accuracy, abs=1e-6)
    assert "val_accuracy" not in history(run)[-1]
    with open(watched / "health.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["epoch"]) for row in rows] == [
        ("7", "0"),
        ("14", "0"),
        ("21", "0"),
        ("28", "1"),
    ]
    for figure in (
        "gradient_norm",
        "weight_norm",
        "update_norm",
        "activation_mean",
        "activation_std",
    ):
        values = [float(row[f"{figure}/stage2_unit1/branch/conv_1/kernel"]) for row in rows]
        assert np.isfinite(values).all()
        assert min(values) > 0
    logged = scalars(watched / "tensorboard" / "health")
    assert [step for step, _ in logged["health/gradient_norm"]] == [7, 14, 21, 28]
    np.testing.assert_allclose(
        [value for _, value in logged["health/gradient_norm"]],
        [float(row["gradient_norm"]) for row in rows],
        rtol=1e-5,
    )
    out = capsys.readouterr().out
    assert re.search(
        r"Epoch 1/2: loss \d\.\d{4}, accuracy \d\.\d{4}; test loss \d\.\d{4}, accuracy \d\.\d{4}; ",
        out,
    )
    assert f"Accuracy: {100 * accuracy:.2f} % of the 360 test images." in out
    assert "Health: " not in out  # of a healthy run


@pytest.mark.backend
def test_resized_crop_keeps_the_size_of_a_data_set_that_has_one(step):
    assert networks.load(step / "model.keras").input_shape == (None, 8, 8, 1)


@pytest.mark.backend
@pytest.mark.parametrize(("choice", "expected"), [("on", True), ("off", False), ("auto", None)])
def test_compilation(choice, expected, monkeypatch):
    import tensorflow as tf

    for devices in ([], ["GPU:0"]):
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda _, devices=devices: devices)
        automatic = False if keras.backend.backend() == "tensorflow" and not devices else "auto"
        assert backends.jit_compile(choice) == (automatic if expected is None else expected)


class TestEndings:
    """Runs that are interrupted, diverge, or find no room: real processes where these
    end them.
    """

    LONG = words("--schedule.length 1000000 --health 0")

    @pytest.mark.backend
    def test_interruption(self, tmp_path, capsys):
        # a process started in the background may inherit that it ignores the signal
        code = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from training import train; train.main(sys.argv[1:])"
        )
        options = [*TINY, *self.LONG, *words("--checkpoint.every 1 --output run")]
        process = start("-c", code, "digits", *options, cwd=tmp_path)
        run = tmp_path / "run"
        deadline = time.monotonic() + 240
        while not ((run / "history.csv").exists() and list(run.glob("checkpoints/.state-*"))):
            assert process.poll() is None, finish(process)
            assert time.monotonic() < deadline, (process.kill(), finish(process))
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        status, out, err = finish(process)
        assert (status, err) == (130, "")
        assert (
            "\nStopping after this step; checkpoint follows. Press again to stop at once.\n" in out
        )
        said = re.search(
            r"\nInterrupted after iteration ([\d,]+) of 1,000,000; the checkpoint is saved\. "
            r"Resume: (.*)\n$",
            out,
        )
        step = int(said[1].replace(",", ""))
        assert said[2] == "keras-preact train --resume run"
        unfinished = [name for name in FILES if name not in ("model.keras", "curves.png")]
        assert names(run) == sorted([*unfinished, *checkpoints(step - 2, step - 1, step)])
        assert len(history(run)) == step // 22

        message = error_of(capsys, run_evaluate, run)
        assert f"The run {run} was not finished" in message
        assert "It has: --checkpoint best, --checkpoint last." in message
        assert not (run / "metrics.json").exists()
        run_evaluate(run, "--checkpoint", "last")
        [last] = run.glob(f"checkpoints/state-{step:09d}-*")
        assert json.loads((run / "metrics-last.json").read_text())["model"] == str(last)
        assert not (run / "metrics.json").exists()

    @pytest.mark.backend
    def test_divergence(self, tmp_path, capsys):
        options = "--optimizer.learning-rate 1e8 --schedule.length 100 --health 0"
        message = error_of(capsys, run_train, tmp_path / "run", options)
        assert re.search(
            r"error: Learning rate 1e\+08 is probably too high: the loss is (nan|inf) in "
            r"iteration \d+ \(epoch 1\)\. ",
            message,
        )
        assert re.search(r"(stem|stage|head)\w+/\w+", message)
        for part in ("--optimizer.learning-rate", "checkpoints/state-000000000"):
            assert part in message
        assert names(tmp_path / "run") == [
            "checkpoints/network.json",
            *checkpoints(0),
            "config.json",
            "first_losses.csv",
        ]

    @pytest.mark.parametrize("resume", [[], ["--resume"]])
    def test_another_process_trains_in_the_directory(self, tmp_path, capsys, resume):
        run = tmp_path / "run"
        run.mkdir()
        with runs.held(run):
            message = error_of(capsys, run_train, run, *resume)
            assert f"error: {run} is in use by process {os.getpid()} on " in message
            assert names(run) == []
        if not resume:
            assert run_train(run).joinpath("model.keras").is_file()

    def test_another_process_has_begun_a_run_in_the_directory(self, tmp_path, capsys, monkeypatch):
        """It did so after this one had found the directory empty, and has ended since."""

        @contextlib.contextmanager
        def held(run):
            (run / "config.json").write_text("{}")
            yield

        monkeypatch.setattr(runs, "held", held)
        message = error_of(capsys, run_train, tmp_path / "run")
        assert f"{tmp_path / 'run'} exists and is not empty" in message
        assert names(tmp_path / "run") == ["config.json"]

    def test_image_that_breaks_off(self, tmp_path, capsys):
        """It is found where it is decoded, after the first epoch."""
        pictures.write_folder(tmp_path / "pictures", images=2, size=(64, 64))
        bad = tmp_path / "pictures" / "test" / "dog" / "cut.jpg"
        with pictures.Image.open(bad.with_name("0.png")) as image:
            image.save(bad)
        bad.write_bytes(bad.read_bytes()[:1500])
        options = "--data.dir pictures --data.size 8 --data.watch-test --batch-size 2 --output run"
        with contextlib.chdir(tmp_path):
            message = error_of(
                capsys, train.main, ["folder_small", *TINY, *words(options, "--health 0")]
            )
        name = "pictures/test/dog/cut.jpg"
        assert f"error: Found 1 broken image: {name}: it cannot be decoded. Mend" in message

    def test_full_disk(self, tmp_path, capsys, monkeypatch):
        """There is room for config.json, and none for a checkpoint."""

        def fail(*arguments, **options):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(np, "savez", fail)
        message = error_of(capsys, run_train, tmp_path / "run")
        assert "error: Cannot write a checkpoint to" in message
        assert "No space left on device" in message
        assert names(tmp_path / "run") == ["checkpoints/network.json", "config.json"]
        json.loads((tmp_path / "run" / "config.json").read_text())


class TestHealth:
    OPTIONS = words("--schedule.length 40 --schedule.kind cosine --health 4 --data.holdout 0.1")

    @pytest.mark.backend
    def test_learning_rate_that_is_too_high(self, tmp_path, capsys):
        run_train(tmp_path / "run", *self.OPTIONS, "--optimizer.learning-rate", "50")
        told = [
            line for line in capsys.readouterr().out.splitlines() if line.startswith("Health: ")
        ]
        assert re.match(
            r"Health: Learning rate 50 is too high: weights change by [\d,.]+ % per update \(",
            told[0],
        )
        assert len(told) <= 2

    def test_a_rate_that_is_too_high_for_a_run_without_a_record(self, tmp_path, capsys):
        """`--health` is longer than the run."""
        run = run_train(tmp_path / "run", "--schedule.length 22 --lr 50")
        [loss] = (float(row["loss"]) for row in history(run))
        assert (
            "\nWarning: learning rate 50 is probably too high: the last loss is "
            f"{loss:.3g}, and that of guessing is 2.3. Try 5.\nFinished after "
        ) in capsys.readouterr().out

    @pytest.mark.backend
    @pytest.mark.soak
    def test_healthy_run_to_the_end_of_its_cosine(self, tmp_path, capsys):
        run_train(
            tmp_path / "run", *self.OPTIONS, "--schedule.warmup", "8", "--schedule.length", "200"
        )
        assert "Health" not in capsys.readouterr().out


@pytest.mark.backend
class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("--resume", "takes a run directory and no other option"),
            ("--resume a --seed 3", "Received: a --seed 3"),
            ("--resume a", "The run directory a does not exist"),
            ("digits --resume", "--resume needs --output"),
            (
                "digits --distribution multi_worker",
                "--distribution multi_worker needs --output",
            ),
            ("digits --health -1", "--health must not be negative"),
            ("digits --accumulate 7", "--accumulate must divide --batch-size"),
        ],
    )
    def test_errors(self, arguments, message, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert message in error_of(capsys, train.main, words(arguments))
        assert files(tmp_path) == []

    def test_another_option_than_the_run_was_begun_with(self, run, capsys):
        message = error_of(capsys, run_train, run, *RUN, "--resume --seed 4 --optimizer.ema 0.9")
        assert "was started with another value of --optimizer.ema, --seed." in message
        assert f"keras-preact train --resume {run}" in message
