"""Evaluation: its figures against hand-computed ones, and its files against the data
and the network.
"""

import hashlib
import json
import re
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import keras_preact as kp
from keras_preact.analysis.figures import style
from keras_preact.export import _check
from keras_preact.export.version import INT8, OWN_CARD, Version
from keras_preact.models import registry
from tests import layout
from tests.keras_preact.export.one_process import in_this_process
from tests.training.calls import csv_rows, error_of, files, run_evaluate
from tests.training.images import write_folder, write_tfds
from training import cli
from training.commands import export as export_command
from training.commands.evaluate import corruptions, mistakes
from training.commands.evaluate.drawing import draw_mistakes
from training.commands.evaluate.metrics import measure, report
from training.config import Data
from training.data import load
from training.errors import UserError


def scores(rows) -> np.ndarray:
    return np.array(rows, "float32")


class TestMeasure:
    #: Two images of class a, two of b, none of c; the second a is classified as b.
    LOGITS = scores([[2, 1, 0], [1, 3, 0], [0, 1, 0], [-1, 0, -2]])
    LABELS = np.array([0, 0, 1, 1])

    def test_by_hand(self):
        metrics = measure(self.LOGITS, self.LABELS, ["a", "b", "c"])
        assert metrics["images"] == 4
        assert (metrics["accuracy"], metrics["error"]) == (0.75, 0.25)
        assert metrics["confusion_matrix"] == [[1, 1, 0], [0, 2, 0], [0, 0, 0]]
        names = ("precision", "recall", "f1", "images")
        for name, row in {
            "a": (1, 1 / 2, 2 / 3, 2),
            "b": (2 / 3, 1, 4 / 5, 2),
            "c": (0,) * 4,
        }.items():
            expected = dict(zip(names, row, strict=True))
            assert metrics["per_class"][name] == pytest.approx(expected)

    def test_loss_is_the_mean_cross_entropy_in_nats(self):
        exponentials = np.exp(self.LOGITS.astype("float64"))
        probabilities = exponentials[np.arange(4), self.LABELS] / exponentials.sum(axis=1)
        loss = measure(self.LOGITS, self.LABELS, ["a", "b", "c"])["loss"]
        assert loss == pytest.approx(-np.log(probabilities).mean(), rel=1e-12)
        # e^1000 overflows. The first image is right with a loss of 0, the second has 2000 nats
        large = scores([[1000, -1000], [1000, -1000]])
        assert measure(large, np.array([0, 1]), ["a", "b"])["loss"] == 1000

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
        certain = scores([[1000, 0], [0, 1000]])  # confidence 1: no error if right, 1 if wrong
        assert measure(certain, np.array([0, 1]), ["a", "b"])["calibration_error"] == 0
        assert measure(certain, np.array([1, 0]), ["a", "b"])["calibration_error"] == 1

    @pytest.mark.parametrize(("right", "images"), [(0, 5), (3, 4), (356, 360), (5, 5)])
    def test_accuracy_interval(self, right, images):
        """Its ends are the accuracies p from which the measured accuracy is 1.96 deviations
        away: (accuracy - p)^2 = 1.96^2 p (1 - p) / images.
        """
        logits = scores([[1, 0]] * right + [[0, 1]] * (images - right))
        got = measure(logits, np.zeros(images, int), ["a", "b"])["accuracy_interval"]
        accuracy, square = right / images, 1.959964**2 / images
        ends = np.roots([1 + square, -2 * accuracy - square, accuracy**2])
        assert got == pytest.approx(sorted(ends), abs=1e-6)

    def test_top5(self):
        logits = scores([[7, 6, 5, 4, 3, 2, 1]] * 4)
        # the true class has rank 1, 5, 6 and 7
        metrics = measure(logits, np.array([0, 4, 5, 6]), list("abcdefg"))
        assert (metrics["top5_accuracy"], metrics["accuracy"]) == (0.5, 0.25)
        assert "top5_accuracy" not in measure(logits[:1, :5], np.array([0]), list("abcde"))

    def test_a_class_without_images_has_no_scores(self):
        metrics = measure(scores([[1, 0, 0], [0, 1, 0]]), np.array([0, 1]), ["a", "b", "c"])
        *_, b, c = report(metrics | {"model": "m", "data": "d", "views": "one"}).splitlines()
        assert b.split() == ["b", *3 * ["100.00", "%"], "1"]
        assert c.split() == ["c", "-", "-", "-", "0"]

    @pytest.mark.parametrize("value", [np.nan, -np.inf])
    def test_outputs_that_are_not_finite(self, value):
        logits = self.LOGITS.copy()
        logits[2, 0] = value
        with pytest.raises(UserError, match="not finite"):
            measure(logits, self.LABELS, ["a", "b", "c"])


@pytest.fixture
def copied(run, tmp_path, monkeypatch):
    """A copy of a trained run, `run` in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, "must be a folder with labels.npy"),
        ({"labels": np.zeros(10, int)}, "must be a folder with labels.npy"),
        ({"labels": np.zeros(9, int), "fog": np.zeros((9, 8, 8, 1))}, r"shape (9,)"),
        ({"labels": np.full(10, 3), "fog": np.zeros((10, 8, 8, 1))}, "numbers up to 3"),
        ({"labels": np.zeros(0, int), "fog": np.zeros((0, 8, 8, 1))}, "shape (0,), int64"),
        ({"labels": np.full(10, 1.5), "fog": np.zeros((10, 8, 8, 1))}, "shape (10,), float64"),
        ({"labels": np.zeros(10, int), "fog": np.zeros((5, 8, 8, 1))}, "each of the 10 labels"),
        (
            {"labels": np.zeros(10, int), "fog": np.zeros((10, 8, 9, 3))},
            "shape (8, None, 1), height, width, channels, for each of the 10 labels. Received: "
            "float64 (10, 8, 9, 3)",
        ),
        ({"labels": np.zeros(10, int), "fog": np.full((10, 8, 8, 1), "a")}, "<U1 (10, 8, 8, 1)"),
    ],
)
def test_other_folders_of_corruptions(tmp_path, arrays, words):
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    with pytest.raises(UserError, match=re.escape(words)):
        corruptions.measure(tmp_path, lambda _: pytest.fail("measured"), (8, None, 1), 3, 4)


@pytest.fixture(scope="module")
def test_images():
    rows = list(load(Data("digits")).test.open().as_numpy_iterator())
    return np.stack([image for image, _ in rows]), np.array([label for _, label in rows])


def metrics_of(folder) -> dict:
    return json.loads((folder / "metrics.json").read_text())


class TestRun:
    @pytest.mark.backend
    def test_metrics_are_those_of_the_network_on_the_test_images(self, copied, test_images, capsys):
        images, labels = test_images
        before = files(copied)
        run_evaluate("run")
        run_evaluate("run", "--batch-size", "7")  # replaces the files
        written = ["metrics.json", "confusion_matrix.png", "reliability.png"]
        assert files(copied) == sorted([*before, *written])
        metrics = metrics_of(copied)
        network = keras.saving.load_model(copied / "model.keras")
        logits = network.predict_on_batch(images.astype("float32"))
        expected = measure(logits, labels, list("0123456789"))
        file = hashlib.sha256((copied / "model.keras").read_bytes()).hexdigest()[:16]
        test = json.loads((copied / "config.json").read_text())["hashes"]["test"]
        about = {"model": "run/model.keras", "data": "digits", "split": "test", "views": "one"}
        about |= {"hashes": {"model": file, "test": test}, "precision": "float32"}
        # `calibrated` is missing: the run has no held-out images
        assert metrics.keys() == about.keys() | expected.keys()
        assert {key: metrics[key] for key in about} == about
        assert metrics["confusion_matrix"] == expected["confusion_matrix"]
        for figure in ("accuracy", "top5_accuracy", "loss", "calibration_error"):
            assert metrics[figure] == pytest.approx(expected[figure], rel=1e-4)
        assert report(metrics) in capsys.readouterr().out
        for name in written[1:]:
            with Image.open(copied / name) as image:
                image.verify()
        # the model file alone gives the same
        run_evaluate("run/model.keras", "--data", "digits", "--batch-size", "7")
        assert metrics_of(copied.parent / "evaluation-model") == metrics

    def test_json_is_all_of_stdout(self, copied, capsys):
        run_evaluate("run", "--json", "--save-samples", "1")
        out, err = capsys.readouterr()
        assert json.loads(out) == metrics_of(copied)
        assert "Wrote run/metrics.json" in err

    def test_predictions_and_mistakes(self, copied, test_images, capsys):
        _, labels = test_images
        (copied / "errors-flip.png").write_bytes(b"")
        run_evaluate("run", "--save-errors", "3", "--views", "flip")
        assert "Wrote predictions-flip.csv and errors-flip.png." in capsys.readouterr().out
        metrics = json.loads((copied / "metrics-flip.json").read_text())
        matrix = np.zeros((10, 10), int)
        for i, row in enumerate(csv_rows(copied / "predictions-flip.csv")):
            assert (row["image"], row["label"]) == (str(i), str(labels[i]))
            matrix[labels[i], int(row["prediction"])] += 1
        assert matrix.tolist() == metrics["confusion_matrix"]
        with Image.open(copied / "errors-flip.png") as image:
            image.verify()
        for count in (-1, 101):
            error = error_of(capsys, run_evaluate, "run", "--save-errors", count)
            assert f"must be 0 to 100. Received: {count}" in error

    def test_only_a_run_has_other_checkpoints(self, copied, capsys):
        error = error_of(capsys, run_evaluate, "run/model.keras", "--checkpoint", "best")
        assert "run/model.keras is not a run directory. Received: best" in error

    def test_checkpoint_and_output(self, copied):
        run_evaluate("run", "--checkpoint", "best", "--output", "elsewhere/here")
        folder = copied.parent / "elsewhere" / "here"
        names = ["confusion_matrix-best.png", "metrics-best.json", "reliability-best.png"]
        assert files(folder) == names
        metrics = json.loads((folder / "metrics-best.json").read_text())
        assert metrics["model"] == "run/checkpoints/best.keras"
        assert not (copied / "metrics.json").exists()

    @pytest.mark.parametrize("count", [3, 12])
    def test_samples_are_one_of_each_class_in_turn(self, copied, test_images, count):
        images, labels = test_images
        run_evaluate("run", "--save-samples", count)
        written = files(copied / "samples")
        assert written == sorted(f"{i // 10}_{i % 10}.png" for i in range(count))
        for name in written:
            rank, label = map(int, re.findall(r"\d+", name))
            expected = images[labels == label][rank, ..., 0]
            with Image.open(copied / "samples" / name) as image:
                np.testing.assert_array_equal(np.asarray(image), expected)

    def test_views(self, copied, test_images):
        """Each view is made by hand, with the indices of its pixels."""
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
            metrics = json.loads((copied / f"metrics-{views}.json").read_text())
            assert metrics["views"] == views
            assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert metrics["confusion_matrix"] == expected["confusion_matrix"]

    def test_corruptions(self, copied, test_images, capsys):
        images, labels = (each[:40] for each in test_images)
        folder = copied.parent / "digits-c"
        folder.mkdir()
        np.save(folder / "labels.npy", np.tile(labels, 5))
        rows = np.arange(8)[None, :, None, None]
        darker = [images // (i + 1) for i in range(5)]
        shorter = [np.where(rows < 8 - i, images, 0) for i in range(5)]
        for name, severities in (("darker", darker), ("shorter", shorter)):
            np.save(folder / f"{name}.npy", np.concatenate(severities))
        run_evaluate("run", "--corruptions", "digits-c", "--batch-size", "33")
        model = keras.saving.load_model(copied / "model.keras")
        found = metrics_of(copied)["corruptions"]
        assert list(found) == ["darker", "shorter"]
        for name, severities in (("darker", darker), ("shorter", shorter)):
            wrong = [
                (model.predict_on_batch(each.astype("float32")).argmax(1) != labels).mean()
                for each in severities
            ]
            assert found[name] == pytest.approx(wrong)
        mean = 100 * np.mean([found["darker"], found["shorter"]], axis=0)
        [last] = re.findall(r"^mean (.*)$", capsys.readouterr().out, re.MULTILINE)
        assert last.split() == [f"{value:.2f}" for value in (mean.mean(), *mean)]

    def test_temperature_is_that_of_the_held_out_images(
        self, everything, tmp_path, monkeypatch, test_images
    ):
        monkeypatch.chdir(tmp_path)
        shutil.copytree(everything, "run")
        run_evaluate("run")
        metrics = metrics_of(tmp_path / "run")
        network = keras.saving.load_model("run/model.keras")
        data = load(Data("digits", holdout=200))
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
        options = ["run", "--name", "digits", "--output", "exported", "--temperature", "fitted"]
        cli.main("export", export_command.export, options)
        for path in ("exported/digits", "exported/digits/1"):
            run_evaluate(path, "--output", "again")
            again = metrics_of(tmp_path / "again")
            assert again["model"] == "exported/digits/1"
        assert again["loss"] == pytest.approx(metrics["calibrated"]["loss"], rel=1e-4)
        assert again["calibrated"]["temperature"] == pytest.approx(1, abs=1e-3)
        card = json.loads((tmp_path / "exported/digits/model_card.json").read_text())
        assert card["metrics"]["temperature"] == metrics["calibrated"]["temperature"]


#: Pixels of images of one pixel, their classes, and the logit of class 1 per normalised pixel.
PIXELS, OF_CLASS_1, SLOPE = np.array([50, 90, 150, 220, 140, 60]), np.array([0, 0, 0, 1, 1, 1]), 3.0
AVERAGE, DEVIATION = 125.0, 64.0


def small_classifier(outputs, *, takes_pixels=True, slope=SLOPE, activation=None):
    """Two classes, by the brightness."""
    layers = [keras.Input((1, 1, 1))]
    if takes_pixels:  # True, or what they are divided by
        scale = float(takes_pixels) / DEVIATION
        layers += [keras.layers.Rescaling(scale, -AVERAGE / DEVIATION)]
    layers += [keras.layers.Flatten(), keras.layers.Dense(outputs, activation=activation)]
    model = keras.Sequential(layers)
    kernel = [[slope]] if outputs == 1 else [[-slope / 2, slope / 2]]
    model.layers[-1].set_weights([np.array(kernel), np.zeros(outputs)])
    return model


def loss_of(slope=SLOPE) -> float:
    logits = slope * (PIXELS - AVERAGE) / DEVIATION
    return float(np.log1p(np.exp(np.where(OF_CLASS_1 == 1, -logits, logits))).mean())


def exported(model, names=("dark", "bright"), **options):
    return kp.export.save(model, "exported/m", classes=list(names), batch_sizes=[1], **options)


def normalised():
    preprocessing = kp.preprocessing.Preprocessing([AVERAGE], [DEVIATION], 1)
    exported(small_classifier(2, takes_pixels=False), preprocessing=preprocessing)


def in_8_bits():
    """A version whose second network has another slope."""
    ov = pytest.importorskip("openvino")
    other = Version(exported(small_classifier(2, slope=1.0))).functions()[0].openvino_model()
    shutil.rmtree("exported")
    version = exported(small_classifier(2))
    ov.save_model(other, version / INT8, compress_to_fp16=False)
    card = json.loads((version / OWN_CARD).read_text())
    (version / OWN_CARD).write_text(json.dumps(card | {"precision": "int8"}))


@pytest.mark.parametrize(
    "cut", [pytest.param({}, marks=pytest.mark.soak), {"resize": 6, "crop": "center"}]
)
def test_an_export_without_a_run_gets_its_photos_as_its_card_says(tmp_path, monkeypatch, cut):
    """The loss is that of the answers for the same files."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "photos")
    network = [keras.Input((4, 4, 3)), keras.layers.Flatten(), keras.layers.Dense(2)]
    preprocessing = kp.preprocessing.Preprocessing((120.0,) * 3, (60.0,) * 3, 4, **cut)
    path = exported(keras.Sequential(network), ["cat", "dog"], preprocessing=preprocessing)
    files = sorted(tmp_path.glob("photos/test/*/*.png"))
    serve = tf.saved_model.load(path).signatures["predict_bytes"]
    answers = serve(image_bytes=tf.constant([file.read_bytes() for file in files]))
    of_label = answers["classes"].numpy() == [[file.parent.name.encode()] for file in files]
    want = -np.log(answers["scores"].numpy()[of_label]).mean()
    run_evaluate("exported/m", "--data", "folder", "--data-dir", "photos", "--output", "again")
    assert metrics_of(tmp_path / "again")["loss"] == pytest.approx(want, rel=1e-4)


#: What is evaluated: a function that writes it, its path, and its loss.
MEASURED = {
    "an export": (lambda: exported(small_classifier(2)), "exported/m", loss_of()),
    "one output with two names": (lambda: exported(small_classifier(1)), "exported/m", loss_of()),
    "one output with one name": (
        lambda: exported(small_classifier(1), ["bright"]),
        "exported/m",
        loss_of(),
    ),
    "an export of normalised images": (normalised, "exported/m", loss_of()),
    "an export of pixels divided by 255": (
        lambda: exported(small_classifier(2, takes_pixels=255)),
        "exported/m",
        loss_of(),
    ),
    "an export that divides the pixels of files by 255": (
        lambda: exported(
            small_classifier(2, takes_pixels=255),
            preprocessing=kp.preprocessing.Preprocessing([0.0], [255.0], 1),
        ),
        "exported/m",
        loss_of(),
    ),
    "a file for pixels divided by 255": (
        lambda: small_classifier(2, takes_pixels=255).save("m.keras"),
        "m.keras",
        loss_of(),
    ),
    "an export in 8 bits": (in_8_bits, "exported/m", loss_of(1.0)),
    **{
        f"a file with {outputs} outputs, activation {activation}": (
            lambda outputs=outputs, activation=activation: small_classifier(
                outputs, activation=activation
            ).save("m.keras"),
            "m.keras",
            loss_of(),
        )
        for outputs, activation in ((2, None), (2, "softmax"), (1, None), (1, "sigmoid"))
    },
}


class TestWhatIsMeasured:
    @pytest.fixture(autouse=True)
    def _in_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(_check, "replay", in_this_process)
        images = PIXELS.astype("uint8").reshape(-1, 1, 1, 1)
        names = {"x_train": images, "x_test": images, "y_train": OF_CLASS_1, "y_test": OF_CLASS_1}
        np.savez("data.npz", **names)

    @pytest.mark.parametrize("name", MEASURED)
    def test_its_loss_is_that_of_its_answers(self, name, tmp_path, capsys):
        write, path, loss = MEASURED[name]
        write()
        run_evaluate(path, "--data", "npz", "--data.dir", "data.npz", "--output", "found")
        found = metrics_of(tmp_path / "found")
        assert found["loss"] == pytest.approx(loss, rel=2e-3 if "8 bits" in name else 1e-5)
        assert found["confusion_matrix"] == [[2, 1], [1, 2]]
        assert "Warning" not in capsys.readouterr().err

    def test_images_of_another_range(self, capsys):
        """Pixels, for a network that takes normalised images and does not say how."""
        small_classifier(2, takes_pixels=False).save("m.keras")
        exported(small_classifier(2, takes_pixels=False))
        for path in ("m.keras", "exported/m"):
            run_evaluate(path, "--data", "npz", "--data-dir", "data.npz", "--output", "found")
            [warning] = re.findall("^Warning: .*", capsys.readouterr().err, re.MULTILINE)
            assert re.search(f"{path}.*The input has values from 50 to 220", warning)

    def test_what_takes_no_images(self, capsys):
        layers = [keras.Input((6,)), keras.layers.Embedding(20, 4), keras.layers.Flatten()]
        exported(keras.Sequential([*layers, keras.layers.Dense(2)]))
        options = ["exported/m", "--data", "npz", "--data-dir", "data.npz"]
        message = error_of(capsys, run_evaluate, *options)
        assert message == "error: exported/m/1 does not take images: its input has shape (6,).\n"

    def test_several_classes_in_an_image(self, capsys):
        model = small_classifier(2, activation="sigmoid")
        exported(model)
        model.save("m.keras")
        for path, named in (("exported/m", "exported/m/1"), ("m.keras", "m.keras")):
            options = [path, "--data", "npz", "--data-dir", "data.npz"]
            message = error_of(capsys, run_evaluate, *options)
            assert message.startswith(f"error: {named} finds several classes in one image. Only")


def gray_of_two_classes(folder):
    x = np.arange(6, dtype="uint8").reshape(6, 1, 1, 1) * np.ones((1, 4, 4, 1), "uint8")
    y = np.array([0, 1] * 3)
    np.savez(folder / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    return Data("npz", dir=folder / "data.npz")


def folder_with_names(folder):
    write_folder(folder, ("cat", "Hündin, 2"), images=3, size=(300, 40))
    (folder / "test" / "cat" / "0.png").rename(folder / "test" / "cat" / "a\nb \udce9.png")
    return Data("folder", dir=folder, size=8)


def records(folder):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype="uint8")
    write_tfds(
        "cifar10", folder, *({s: each for s in ("train", "test")} for each in (pixels, 6 * [1]))
    )
    return Data("cifar10", dir=folder)


class TestMistakes:
    #: The third image is right; the fifth is the most confident mistake, then the first.
    LOGITS = scores([[0, 3], [1, 0], [0, 9], [0.2, 0], [-1, 4], [0, 0]])

    @pytest.mark.parametrize("kind", [gray_of_two_classes, folder_with_names, records])
    def test_of_every_kind_of_data(self, kind, tmp_path, monkeypatch):
        images = load(kind(tmp_path)).test
        read = [pixels for pixels, _ in images.open().as_numpy_iterator()]
        classes = ["cat", "Hündin, $2$", *map(str, range(8))]
        logits = np.full((6, 10), -99.0)
        logits[:, :2] = self.LOGITS
        labels = np.array([1 - i for i in self.LOGITS.argmax(axis=1)])
        labels[2] = 1
        drawn, draw = [], mistakes.draw_mistakes
        record = lambda *arguments: drawn.append(arguments) or draw(*arguments)  # noqa: E731
        monkeypatch.setattr(mistakes, "draw_mistakes", record)
        mistakes.write(images, logits, labels, classes, 2, tmp_path, "-x")
        [(pictures, titles, _)] = drawn
        assert titles == ["Hündin, $2$ 99.3 %\nis cat", "Hündin, $2$ 95.3 %\nis cat"]
        for i, picture in zip((4, 0), pictures, strict=True):
            if max(picture.size) < mistakes.SIDE:
                np.testing.assert_array_equal(np.asarray(picture), read[i].squeeze())
            else:
                assert picture.size == (200, 27)
        rows = csv_rows(tmp_path / "predictions-x.csv")
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        for row, share, label in zip(rows, shares, labels, strict=True):
            assert row["label"] == classes[label]
            assert row["prediction"] == classes[share.argmax()]
            assert float(row["probability"]) == pytest.approx(share.max(), abs=6e-7)
        names = [row["image"] for row in rows]
        if kind is folder_with_names:
            assert names[5] == str(tmp_path / "test" / "cat" / "a\nb \\udce9.png")
            assert names[0] == str(tmp_path / "test" / "Hündin, 2" / "0.png")
        else:
            assert names == list("012345")

    @pytest.mark.parametrize("count", [1, 9])
    def test_titles_do_not_overlap(self, count, tmp_path, monkeypatch):
        figures, new = [], style.new_figure
        monkeypatch.setattr(
            style, "new_figure", lambda *size: figures.append(new(*size)) or figures[0]
        )
        picture = Image.new("RGB", (30, 20))
        title = "a class with a very long name 99.9 %\nis another_one_without_spaces_in_it"
        draw_mistakes(count * [picture], count * [title], tmp_path / "errors.png")
        layout.check(figures[0])

    def test_without_a_mistake_there_is_no_sheet(self, tmp_path):
        images = load(gray_of_two_classes(tmp_path)).test
        sheet = tmp_path / "errors.png"
        sheet.write_bytes(b"of another network")
        logits = self.LOGITS
        written = mistakes.write(images, logits, logits.argmax(1), ["a", "b"], 9, tmp_path, "")
        assert (written, sheet.exists()) == ([tmp_path / "predictions.csv"], False)


@pytest.mark.soak
@pytest.mark.parametrize(
    "path", sorted(registry.TRAINED.glob("*.json")), ids=lambda path: path.stem
)
def test_trained_weights_on_all_test_images(path, tmp_path):
    """The test needs CIFAR-10, prepared by TFDS in its default folder or in TFDS_DATA_DIR."""
    import tensorflow_datasets as tfds

    card = json.loads(path.read_text())
    if not tfds.builder(card["data"]).is_prepared():
        pytest.skip(f"{card['data']} is not prepared")
    run_evaluate(card["model"], "--data", card["data"], "--output", tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    # different kinds of CPUs round differently
    assert metrics["accuracy"] == pytest.approx(card["accuracy"], abs=3e-4)
    assert metrics["calibration_error"] == pytest.approx(card["calibration_error"], abs=1e-3)
