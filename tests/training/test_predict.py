"""`python -m training.predict`: what it prints for image files, and its errors. The models are TensorFlow alone."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from training import predict

CLASSES = ["dark", "left", "right side"]


def save_model(path, shape, **card):
    """A model of three classes: how dark an image is, and how bright its halves are."""

    @tf.function(input_signature=[tf.TensorSpec([None, *shape], tf.float32, name="images")])
    def serve(images):
        gray = tf.reduce_mean(images, axis=-1)
        half = tf.shape(gray)[2] // 2
        left, right = (tf.reduce_mean(part, axis=[1, 2]) for part in (gray[:, :, :half], gray[:, :, half:]))
        logits = tf.stack([50 - (left + right) / 2, left, right], axis=-1) / 50
        return {"logits": logits, "probabilities": tf.nn.softmax(logits)}

    tf.saved_model.save(tf.Module(), str(path), signatures={"serving_default": serve})
    inputs = {"images": {"dtype": "float32", "shape": [None, *shape], "normalized_in_graph": True}}
    card = {"classes": CLASSES, "preprocessing": None, "signature": {"inputs": inputs}} | card
    (path / "assets.extra").mkdir(exist_ok=True)
    (path / "assets.extra" / "model_card.json").write_text(json.dumps(card))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved_models")
    save_model(folder / "gray" / "2", (8, 8, 1))
    save_model(folder / "gray" / "10", (8, 8, 1), classes=["DARK", "LEFT", "RIGHT"])
    for entry in folder.glob("gray/*/assets.extra/model_card.json"):
        entry.parents[2].joinpath("model_card.json").write_text(entry.read_text())
    save_model(folder / "colour" / "1", (None, None, 3))
    save_model(folder / "vector" / "1", (8, 8, 1), signature={"inputs": {"images": {"shape": [None, 64]}}})
    return folder


@pytest.fixture
def images(tmp_path):
    half = np.zeros((8, 8), "uint8")
    half[:, 4:] = 200
    Image.fromarray(half).save(tmp_path / "right.png")
    Image.fromarray(half[:, ::-1]).save(tmp_path / "left.png")
    Image.fromarray(half).convert("RGB").resize((16, 16)).save(tmp_path / "large colour.png")
    return tmp_path


def test_prints_the_names(models, images, capsys):
    predict.main([str(models / "gray"), str(images / "right.png"), str(images / "left.png"), "--version", "2"])
    captured = capsys.readouterr()
    e = np.exp([-1, 4, 0])
    left, right, dark = 100 * e[[1, 2, 0]] / e.sum()
    assert captured.out.splitlines() == [
        f"{images / 'right.png'}",
        f"  right side  {left:6.2f} %",
        f"  left        {right:6.2f} %",
        f"  dark        {dark:6.2f} %",
        f"{images / 'left.png'}",
        f"  left        {left:6.2f} %",
        f"  right side  {right:6.2f} %",
        f"  dark        {dark:6.2f} %",
    ]
    assert captured.err == ""


def test_takes_the_highest_version(models, images, capsys):
    predict.main([str(models / "gray"), str(images / "right.png"), "--top", "1"])
    assert "RIGHT " in capsys.readouterr().out


@pytest.mark.parametrize("model", ["gray", "colour"])
def test_colours_and_sizes(models, images, capsys, model):
    predict.main([str(models / model), str(images / "large colour.png"), str(images / "right.png"), "--top", "1"])
    captured = capsys.readouterr()
    assert captured.out.lower().count("  right") == 2
    note = f"note: {images / 'large colour.png'} is 16 x 16 pixels, the model takes 8 x 8: resized.\n"
    assert captured.err == (note if model == "gray" else "")


def card(**fields):
    values = {"classes": CLASSES, "mode": "L", "size": (4, 2), "preprocessing": {}, "normalize": False} | fields
    return predict.Card(**values)


def test_modes_of_image_files(tmp_path):
    ramp = np.arange(8, dtype="uint8").reshape(2, 4) * 30
    deep = Image.fromarray(ramp.astype("uint16") * 257)
    assert deep.mode == "I;16"
    for name, image in {
        "gray": Image.fromarray(ramp),
        "16 bits": deep,
        "palette": Image.fromarray(ramp).convert("P"),
        "alpha": Image.fromarray(ramp).convert("RGBA"),
        "with transparency": Image.fromarray(ramp).convert("P"),
    }.items():
        options = {"transparency": bytes([0, 255])} if name == "with transparency" else {}
        image.save(tmp_path / f"{name}.png", **options)
        np.testing.assert_array_equal(predict.read_image(tmp_path / f"{name}.png", card())[..., 0], ramp, err_msg=name)
        colours = predict.read_image(tmp_path / f"{name}.png", card(mode="RGB"))
        np.testing.assert_array_equal(colours, np.stack([ramp] * 3, axis=-1), err_msg=name)


def test_a_turned_photograph(tmp_path):
    ramp = np.arange(8, dtype="uint8").reshape(4, 2) * 30
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    Image.fromarray(ramp).save(tmp_path / "turned.png", exif=exif)
    read = predict.read_image(tmp_path / "turned.png", card())
    np.testing.assert_array_equal(read[..., 0], np.rot90(ramp, -1))


def test_size_as_in_evaluation(tmp_path, capsys):
    picture = np.zeros((40, 80), "uint8")
    picture[:, 20:60] = 255  # the square in the middle
    picture[5:35, 25:55] = 100  # and what a crop of 6 in 8 leaves of it
    Image.fromarray(picture).save(tmp_path / "wide.png")
    preprocessing = {"size": 6, "resize": 8, "crop": "center", "mean": [0], "std": [1]}
    read = predict.read_image(tmp_path / "wide.png", card(size=(6, 6), preprocessing=preprocessing))
    assert read.shape == (6, 6, 1)
    assert (read[1:-1, 1:-1] == 100).all()
    assert read.max() < 200
    assert "80 x 40 pixels, the model takes 6 x 6: scaled, and its centre cut out" in capsys.readouterr().err


def test_normalises_for_a_model_that_does_not():
    values = predict._tensor(
        np.full((1, 1, 1), 30, "uint8"), card(normalize=True, preprocessing={"mean": [10.0], "std": [5.0]})
    )
    np.testing.assert_array_equal(values, np.full((1, 1, 1, 1), 4.0))


def error_of(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_status:
        predict.main(list(map(str, arguments)))
    captured = capsys.readouterr()
    assert exit_status.value.code == 2
    assert captured.out == ""  # nothing is classified before all is checked
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_errors(models, images, capsys):
    gray, image = models / "gray", images / "right.png"
    there = error_of(capsys, models / "grey", image)
    assert f"There is: {gray}" in there
    assert "python -m training.export" in error_of(capsys, images / "nothing" / "m", image)
    assert "It has: 2, 10." in error_of(capsys, gray, image, "--version", 3)
    assert "no version" in error_of(capsys, images, image)
    assert "at least 1" in error_of(capsys, gray, image, "--top", 0)
    assert "which image files do not hold" in error_of(capsys, models / "vector", image)
    assert "right.txt: No such file" in error_of(capsys, gray, image, images / "right.txt")
    (images / "text.png").write_text("no image")
    assert "text.png: it is no image" in error_of(capsys, gray, image, images / "text.png")
    half = image.read_bytes()
    (images / "half.png").write_bytes(half[: len(half) * 3 // 4])
    assert "Cannot read the image" in error_of(capsys, gray, image, images / "half.png")


def test_errors_of_damaged_models(models, images, tmp_path, capsys):
    (tmp_path / "m" / "1").mkdir(parents=True)
    assert "no model_card.json" in error_of(capsys, tmp_path / "m", images / "right.png")
    (tmp_path / "m" / "model_card.json").write_text("{}")
    assert "no model card" in error_of(capsys, tmp_path / "m", images / "right.png")
    (tmp_path / "m" / "model_card.json").write_text((models / "gray" / "model_card.json").read_text())
    assert "SavedModel file does not exist" in error_of(capsys, tmp_path / "m", images / "right.png")
    (tmp_path / "m" / "1" / "saved_model.pb").write_bytes(b"junk")
    assert "damaged" in error_of(capsys, tmp_path / "m", images / "right.png")


def test_scores_that_are_no_numbers(tmp_path, images, capsys):
    @tf.function(input_signature=[tf.TensorSpec([None, 8, 8, 1], tf.float32, name="images")])
    def serve(images):
        return {"probabilities": tf.reduce_mean(images, axis=[1, 2]) * float("nan")}

    save_model(tmp_path / "m" / "1", (8, 8, 1))
    tf.saved_model.save(tf.Module(), str(tmp_path / "m" / "1"), signatures={"serving_default": serve})
    assert "not numbers" in error_of(capsys, tmp_path / "m", images / "right.png")


def test_as_a_command_without_keras(models, images):
    blocked = "import sys; sys.modules['keras'] = None; from training import predict; predict.main()"
    command = [sys.executable, "-c", blocked, str(models / "gray"), str(images / "right.png")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "RIGHT" in done.stdout
    assert done.stderr == ""
