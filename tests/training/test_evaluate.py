"""Evaluation: its figures against hand-computed ones, and its files against the data
and the network they speak of.
"""

import json
import re
import shutil

import keras
import numpy as np
import pytest
from PIL import Image

import keras_preact as kp
from tests.training import images as pictures
from tests.training.commands import RUN, files, run_evaluate, run_train, words
from training import cli
from training import export as export_command
from training.config import Data
from training.data import load
from training.evaluate import draw_confusion, draw_reliability, measure, reliability, report


def scores(rows) -> np.ndarray:
    return np.array(rows, "float32")


@pytest.mark.backend
class TestMeasure:
    #: Two images of a, two of b, none of c; the second a is taken for b.
    LOGITS = scores([[2, 1, 0], [1, 3, 0], [0, 1, 0], [-1, 0, -2]])
    LABELS = np.array([0, 0, 1, 1])

    def test_by_hand(self):
        metrics = measure(self.LOGITS, self.LABELS, ["a", "b", "c"])
        assert metrics["images"] == 4
        assert (metrics["accuracy"], metrics["error"]) == (0.75, 0.25)
        assert metrics["confusion_matrix"] == [[1, 1, 0], [0, 2, 0], [0, 0, 0]]
        assert metrics["per_class"] == {
            "a": {"precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3), "images": 2},
            "b": {
                "precision": pytest.approx(2 / 3),
                "recall": 1.0,
                "f1": pytest.approx(0.8),
                "images": 2,
            },
            "c": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "images": 0},
        }

    def test_loss_is_the_mean_cross_entropy_in_nats(self):
        exponentials = np.exp(self.LOGITS.astype("float64"))
        probabilities = exponentials[np.arange(4), self.LABELS] / exponentials.sum(axis=1)
        loss = measure(self.LOGITS, self.LABELS, ["a", "b", "c"])["loss"]
        assert loss == pytest.approx(-np.log(probabilities).mean(), rel=1e-12)
        assert measure(scores([[0, 0, 0]]), np.array([1]), ["a", "b", "c"])[
            "loss"
        ] == pytest.approx(1.0986122886681098)

    def test_loss_of_large_logits(self):
        # e^1000 is no number: the first is right beyond doubt, the second wrong by 2000 nats
        assert (
            measure(scores([[1000, -1000], [1000, -1000]]), np.array([0, 1]), ["a", "b"])["loss"]
            == 1000
        )

    def test_calibration_error(self):
        random = np.random.default_rng(0)
        logits, labels = 2 * random.normal(size=(500, 3)), random.integers(0, 3, 500)
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        want = 0.0
        for i in range(15):  # as in Eq. 3 of arXiv 1706.04599
            inside = (shares.max(1) > i / 15) & (shares.max(1) <= (i + 1) / 15)
            if inside.any():
                accuracy = (shares.argmax(1) == labels)[inside].mean()
                want += inside.mean() * abs(accuracy - shares.max(1)[inside].mean())
        got = measure(logits, labels, ["a", "b", "c"])["calibration_error"]
        assert got == pytest.approx(want, rel=1e-9)
        assert want > 0.1
        certain = scores([[1000, 0], [0, 1000]])  # all of it, and right: none
        assert measure(certain, np.array([0, 1]), ["a", "b"])["calibration_error"] == 0
        assert measure(certain, np.array([1, 0]), ["a", "b"])["calibration_error"] == 1

    @pytest.mark.parametrize(("right", "images"), [(0, 5), (3, 4), (356, 360), (5, 5)])
    def test_accuracy_interval(self, right, images):
        """Its ends are the accuracies p at which the measured one is 1.96 deviations away:
        (accuracy - p)^2 = 1.96^2 p (1 - p) / images.
        """
        logits = scores([[1, 0]] * right + [[0, 1]] * (images - right))
        got = measure(logits, np.zeros(images, int), ["a", "b"])["accuracy_interval"]
        accuracy, square = right / images, 1.959964**2 / images
        ends = np.roots([1 + square, -2 * accuracy - square, accuracy**2])
        assert got == pytest.approx(sorted(ends), abs=1e-6)

    def test_top5(self):
        logits = scores([[7, 6, 5, 4, 3, 2, 1]] * 4)
        # first, fifth, sixth and seventh
        metrics = measure(logits, np.array([0, 4, 5, 6]), list("abcdefg"))
        assert (metrics["top5_accuracy"], metrics["accuracy"]) == (0.5, 0.25)

    def test_top5_is_left_out_where_it_says_nothing(self):
        assert "top5_accuracy" not in measure(
            scores([[0, 1, 2, 3, 4]]), np.array([0]), list("abcde")
        )
        assert (
            measure(scores([[0, 1, 2, 3, 4, 5]]), np.array([0]), list("abcdef"))["top5_accuracy"]
            == 0
        )

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_outputs_that_are_no_numbers(self, value):
        logits = self.LOGITS.copy()
        logits[2, 0] = value
        with pytest.raises(cli.UserError, match="outputs are not finite: training diverged"):
            measure(logits, self.LABELS, ["a", "b", "c"])

    def test_report(self):
        metrics = {"model": "runs/a/model.keras", "data": "letters"} | measure(
            self.LOGITS, self.LABELS, ["a", "b", "class c"]
        )
        assert report(metrics).split("\n") == [
            "runs/a/model.keras on 4 test images of letters:",
            "  accuracy 75.00 % (95 % interval 30.06 to 95.44 %), error 25.00 %, "
            f"loss {metrics['loss']:.4f}, calibration error "
            f"{100 * metrics['calibration_error']:.2f} %",
            "  class    precision  recall      f1  images",
            "  a           1.0000  0.5000  0.6667       2",
            "  b           0.6667  1.0000  0.8000       2",
            "  class c     0.0000  0.0000  0.0000       0",
        ]
        assert ", top-5 accuracy 12.50 %" in report(metrics | {"top5_accuracy": 0.125})


@pytest.mark.backend
@pytest.mark.parametrize("classes", [2, 60])
def test_confusion_matrix_is_drawn(tmp_path, classes):
    matrix = np.zeros((classes, classes), int)
    matrix[0, 1] = 3  # a class without any image right, and classes without images
    draw_confusion(matrix, [f"class {i}" for i in range(classes)], tmp_path / "matrix.png")
    with Image.open(tmp_path / "matrix.png") as image:
        image.load()
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("RGB")).astype(int)
    if classes == 2:
        # the one dark square is that of true class 0 and predicted class 1: right of the middle,
        # above it
        rows, columns = np.nonzero(
            (np.abs(pixels - (8, 48, 107)) < 3).all(axis=-1)[:, : int(0.8 * pixels.shape[1])]
        )
        assert rows.mean() < pixels.shape[0] / 2
        assert columns.mean() > pixels.shape[1] / 2


@pytest.fixture
def copied(run, tmp_path, monkeypatch):
    """A copy of a trained run, `run` in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def test_images():
    rows = list(load(Data("digits")).test.open().as_numpy_iterator())
    return np.stack([image for image, _ in rows]), np.array([label for _, label in rows])


def metrics_of(folder) -> dict:
    return json.loads((folder / "metrics.json").read_text())


@pytest.fixture(scope="module")
def expected(run, tmp_path_factory):
    """The metrics of the trained run."""
    output = tmp_path_factory.mktemp("expected")
    run_evaluate(run, "--output", output)
    return metrics_of(output)


@pytest.mark.backend
class TestRun:
    def test_metrics_are_those_of_the_network_on_the_test_images(self, copied, test_images, capsys):
        images, labels = test_images
        run_evaluate("run")
        metrics = metrics_of(copied)
        logits = keras.saving.load_model(copied / "model.keras").predict_on_batch(
            images.astype("float32")
        )
        predicted = logits.argmax(axis=1)
        assert (metrics["model"], metrics["data"], metrics["split"]) == (
            "run/model.keras",
            "digits",
            "test",
        )
        assert metrics["images"] == 360
        assert metrics["accuracy"] == pytest.approx((predicted == labels).mean())
        assert metrics["accuracy"] > 0.3  # chance is 0.1
        for true, row in enumerate(metrics["confusion_matrix"]):
            assert row == [int((predicted[labels == true] == guess).sum()) for guess in range(10)]
        assert list(metrics["per_class"]) == list("0123456789")
        top5 = (np.argsort(-logits, axis=1)[:, :5] == labels[:, None]).any(axis=1).mean()
        assert metrics["top5_accuracy"] == pytest.approx(top5)

        printed = capsys.readouterr().out
        assert report(metrics) in printed
        wrote = "Wrote run/metrics.json, confusion_matrix.png and reliability.png.\n"
        assert wrote in printed
        with Image.open(copied / "confusion_matrix.png") as image:
            image.load()
            assert image.format == "PNG"
            assert min(image.size) > 300

    def test_again_replaces_the_files_and_leaves_no_others(self, copied):
        before = files(copied)
        run_evaluate("run")
        run_evaluate("run", "--batch-size", "7")
        written = ["metrics.json", "confusion_matrix.png", "reliability.png"]
        assert files(copied) == sorted([*before, *written])

    def test_checkpoint_and_output(self, copied):
        run_evaluate("run", "--checkpoint", "best", "--output", "elsewhere/here")
        assert files(copied.parent / "elsewhere") == [
            "here/confusion_matrix-best.png",
            "here/metrics-best.json",
            "here/reliability-best.png",
        ]
        metrics = json.loads(
            (copied.parent / "elsewhere" / "here" / "metrics-best.json").read_text()
        )
        assert metrics["model"] == "run/checkpoints/best.keras"
        assert not (copied / "metrics.json").exists()

    def test_views(self, copied, test_images, capsys):
        """Each view cut out by hand: by the index of every pixel that it has."""
        images, labels = test_images
        model = keras.saving.load_model(copied / "model.keras")
        ahead = np.arange(8)
        reflected = [1, *ahead[:-1]], [*ahead[1:], 6]  # down right by a pixel, up left
        logits = {
            (move, flipped): model.predict_on_batch(
                images[:, rows][:, :, rows[::-1] if flipped else rows].astype("float32")
            )
            for move, rows in enumerate([[*ahead], *reflected])
            for flipped in (False, True)
        }
        weights = {
            "flip": {(0, False): 1 / 2, (0, True): 1 / 2},
            "flip_shift": {key: 1 / 4 if key[0] == 0 else 1 / 8 for key in logits},
        }
        for views, shares in weights.items():
            run_evaluate("run", "--views", views)
            mean = sum(share * logits[key] for key, share in shares.items())
            expected = measure(mean, labels, list("0123456789"))
            metrics = metrics_of(copied)
            assert metrics["views"] == views
            assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert metrics["confusion_matrix"] == expected["confusion_matrix"]
        printed = capsys.readouterr().out
        assert "on 360 test images of digits, 2 views each:" in printed
        assert "on 360 test images of digits, 6 views each:" in printed

    def test_keras_file_gives_the_same(self, copied, expected):
        run_evaluate("run/model.keras", "--data", "digits")
        assert metrics_of(copied.parent / "evaluation-model") == expected | {
            "model": "run/model.keras"
        }

    def test_diverged_network(self, copied, capsys):
        model = keras.saving.load_model(copied / "model.keras")
        model.weights[-1].assign(np.full(10, np.nan))  # the classifier's bias
        model.save(copied / "model.keras")
        with pytest.raises(SystemExit):
            run_evaluate("run")
        assert "error: The network's outputs are not finite" in capsys.readouterr().err
        assert not (copied / "metrics.json").exists()


class TestSamples:
    @pytest.mark.parametrize("count", [3, 12])
    def test_one_of_each_class_in_turn_with_its_pixels(self, copied, test_images, capsys, count):
        images, labels = test_images
        run_evaluate("run", "--save-samples", count)
        written = files(copied / "samples")
        assert written == sorted(f"{i // 10}_{i % 10}.png" for i in range(count))
        for name in written:
            rank, label = map(int, re.fullmatch(r"(\d+)_(\d)\.png", name).groups())
            with Image.open(copied / "samples" / name) as image:
                np.testing.assert_array_equal(
                    np.asarray(image), images[labels == label][rank, ..., 0]
                )
        printed = re.search(r"Wrote (\d+) test images to run/samples", capsys.readouterr().out)
        assert int(printed[1]) == len(written)

    def test_images_of_a_folder_are_written_whole_and_in_colour(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        pictures.write_folder(tmp_path / "pictures", images=2)
        kp.create_model(
            "digits_resnet8_preact", classes=2, input_shape=(16, 16, 3), width_factor=0.25
        ).save("m.keras")
        options = "--data folder --data-dir pictures --save-samples 9 --output out"
        run_evaluate("m.keras", *words(options))
        assert metrics_of(tmp_path / "out")["images"] == 4
        for name in ("cat", "dog"):
            originals = (tmp_path / "pictures" / "test" / name).iterdir()
            samples = [tmp_path / "out" / "samples" / f"{i}_{name}.png" for i in range(2)]
            assert sorted(map(pixels, samples)) == sorted(map(pixels, originals))


def pixels(path) -> bytes:
    with Image.open(path) as image:
        assert (image.mode, image.size) == ("RGB", (40, 30))
        return image.tobytes()


@pytest.mark.backend
class TestCalibration:
    @pytest.fixture
    def held_out(self, tmp_path, monkeypatch):
        """A run with held-out images, as far as `evaluate` reads it."""
        monkeypatch.chdir(tmp_path)
        run_train(tmp_path / "run", *RUN, "--data.holdout", "0.2")
        return tmp_path / "run"

    def test_temperature_is_that_of_the_held_out_images(self, held_out, test_images, capsys):
        run_evaluate("run")
        metrics = metrics_of(held_out)
        network = keras.saving.load_model(held_out / "model.keras")
        data = load(Data("digits", holdout=0.2))
        rows = list(data.holdout.open().as_numpy_iterator())
        images, labels = (np.stack(column) for column in zip(*rows, strict=True))
        logits = network.predict(images.astype("float32"), verbose=0)
        temperature = kp.transfer.fit_temperature(logits, labels)
        images, labels = test_images
        calibrated = network.predict(images.astype("float32"), verbose=0) / temperature
        expected = measure(calibrated, labels, list("0123456789"))
        assert metrics["calibrated"] == {
            "temperature": pytest.approx(temperature, rel=1e-4),
            "held_out_images": len(rows),
            "loss": pytest.approx(expected["loss"], rel=1e-4),
            "calibration_error": pytest.approx(expected["calibration_error"], rel=1e-3),
        }
        assert abs(temperature - 1) > 0.05
        said = f"  with logits / {temperature:.3g}, fitted on 287 held-out images: loss "
        assert said in capsys.readouterr().out

        options = ["run", "--name", "digits", "--output", "exported", "--temperature", "fitted"]
        cli.main("export", export_command.export, options)
        assert f"Its logits are divided by {temperature:.3g}." in capsys.readouterr().out
        run_evaluate("exported/digits", "--output", "again")
        again = metrics_of(held_out.parent / "again")
        assert again["loss"] == pytest.approx(metrics["calibrated"]["loss"], rel=1e-4)
        assert again["calibrated"]["temperature"] == pytest.approx(1, abs=1e-3)
        card = json.loads((held_out.parent / "exported/digits/model_card.json").read_text())
        assert card["metrics"]["temperature"] == metrics["calibrated"]["temperature"]

    def test_a_run_without_held_out_images_has_none(self, copied, capsys):
        run_evaluate("run")
        assert "calibrated" not in metrics_of(copied)
        options = ["run", "--name", "digits", "--temperature", "fitted"]
        with pytest.raises(SystemExit):
            cli.main("export", export_command.export, options)
        assert "have no temperature: `keras-preact evaluate` fits one" in capsys.readouterr().err

    def test_nothing_to_fit_is_said(self, held_out, monkeypatch, capsys):
        network = keras.saving.load_model(held_out / "model.keras")
        classifier = network.get_layer("head_classifier")
        classifier.set_weights([np.zeros_like(each) for each in classifier.get_weights()])
        network.save(held_out / "model.keras")
        run_evaluate("run")
        said = "The probabilities were not calibrated. No temperature is the best: use more held"
        assert said in capsys.readouterr().out
        assert "calibrated" not in metrics_of(held_out)


@pytest.mark.backend
def test_reliability_by_hand():
    logits = np.log([[0.9, 0.1], [0.92, 0.08], [0.6, 0.4], [0.39, 0.61]])
    confidences, accuracies, counts = reliability(logits, np.array([0, 1, 0, 0]))
    np.testing.assert_allclose(confidences, [0.6, 0.61, 0.91])
    np.testing.assert_allclose(accuracies, [1, 0, 0.5])
    np.testing.assert_array_equal(counts, [1, 1, 2])


@pytest.mark.backend
def test_reliability_is_drawn(tmp_path):
    point = np.array([0.9]), np.array([0.1]), np.array([3])
    draw_reliability({"as trained": point}, tmp_path / "reliability.png")
    with Image.open(tmp_path / "reliability.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    rows, columns = np.nonzero((np.abs(pixels - (0, 0x72, 0xB2)) < 3).all(axis=-1))
    chart = rows < 0.8 * pixels.shape[0]  # the legend has a point below
    assert np.median(columns[chart]) > 0.7 * pixels.shape[1]  # sure, and wrong: on the lower right
    assert np.median(rows[chart]) > 0.5 * pixels.shape[0]


@pytest.mark.backend
def test_exported_model_gives_the_metrics_of_its_run(copied, expected, capsys):
    cli.main("export", export_command.export, ["run", "--name", "digits", "--output", "exported"])
    capsys.readouterr()
    run_evaluate("exported/digits")
    metrics = metrics_of(copied.parent / "evaluation-digits")
    assert metrics["model"] == "exported/digits/1"
    assert metrics["confusion_matrix"] == expected["confusion_matrix"]
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert metrics["data"] == "digits"
    assert report(metrics) in capsys.readouterr().out
    assert not list((copied.parent / "exported").rglob("metrics.json"))
