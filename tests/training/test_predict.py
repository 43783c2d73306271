"""`python -m training.predict`: what it prints for image files, and its errors. The
models are TensorFlow alone.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import keras_preact as kp
from keras_preact.export._images import Decoder
from tests.training import commands
from training import predict

CLASSES = ["dark", "left", "right side"]


def darkness_and_halves(images):
    """How dark an image is, and how bright its halves are."""
    gray = tf.reduce_mean(images, axis=-1)
    half = tf.shape(gray)[2] // 2
    left, right = (
        tf.reduce_mean(part, axis=[1, 2]) for part in (gray[:, :, :half], gray[:, :, half:])
    )
    logits = tf.stack([50 - (left + right) / 2, left, right], axis=-1) / 50
    return {"logits": logits, "probabilities": tf.nn.softmax(logits)}


def save_model(
    path,
    shape=(8, 8, 1),
    core=darkness_and_halves,
    classes=CLASSES,
    size=(8, 8),
    preprocessing=None,
):
    """A model of three classes, with the functions that the project's exports have;
    size None: takes no files.
    """
    module = tf.Module()
    module.core = tf.function(
        core, input_signature=[tf.TensorSpec([None, *shape], tf.float32, name="images")]
    )
    if size is not None:
        decoder = Decoder(size, shape[-1], preprocessing, max_pixels=1000)
        module.decode = tf.function(
            decoder, input_signature=[tf.TensorSpec([None], tf.string)], autograph=False
        )
    tf.saved_model.save(module, str(path))
    (path / "assets.extra").mkdir(exist_ok=True)
    (path / "assets.extra" / "model_card.json").write_text(json.dumps({"classes": classes}))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved_models")
    save_model(folder / "gray" / "2")
    save_model(folder / "gray" / "10", classes=["DARK", "LEFT", "RIGHT"])
    for entry in folder.glob("gray/*/assets.extra/model_card.json"):
        entry.parents[2].joinpath("model_card.json").write_text(entry.read_text())
    save_model(folder / "colour" / "1", (None, None, 3))
    save_model(folder / "without files" / "1", size=None)
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
    files = [str(images / f"{name}.png") for name in ("right", "left")]
    predict.main([str(models / "gray"), *files, "--version", "2"])
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
    picture, best = capsys.readouterr().out.splitlines()  # the best class alone
    assert picture == str(images / "right.png")
    assert best.startswith("  RIGHT ")


@pytest.mark.parametrize("model", ["gray", "colour"])
def test_colours_and_sizes(models, images, capsys, model):
    files = [str(images / f"{name}.png") for name in ("large colour", "right")]
    predict.main([str(models / model), *files, "--top", "1"])
    captured = capsys.readouterr()
    assert captured.out.lower().count("  right") == 2
    assert captured.err == ""


def test_size_as_in_evaluation(tmp_path, capsys):
    """The dark square in the middle is all that a crop of 6 in 8 leaves of a bright
    picture.
    """
    picture = np.full((20, 40), 250, "uint8")
    picture[2:18, 12:28] = 0
    Image.fromarray(picture).save(tmp_path / "wide.png")
    crop = kp.preprocessing.Preprocessing((0,), (1,), 6, resize=8, crop="center")
    for name, preprocessing, first in (("crop", crop, "dark"), ("whole", None, "left")):
        save_model(tmp_path / name / "1", size=(8, 8), preprocessing=preprocessing)
        predict.main([str(tmp_path / name), str(tmp_path / "wide.png"), "--top", "1"])
        assert capsys.readouterr().out.splitlines()[1].split()[0] == first


def error_of(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        predict.main(list(map(str, arguments)))
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""  # nothing is classified before all is checked
    return commands.one_error(err)


def test_errors(models, images, capsys):
    gray, image = models / "gray", images / "right.png"
    there = error_of(capsys, models / "grey", image)
    assert f"Exported models: {gray}" in there
    assert "keras-preact export writes one." in error_of(capsys, images / "nothing" / "m", image)
    assert "It has: 2, 10." in error_of(capsys, gray, image, "--version", 3)
    assert "no version" in error_of(capsys, images, image)
    assert "at least 1" in error_of(capsys, gray, image, "--top", 0)
    (images / "run").mkdir()
    (images / "run" / "config.json").write_text("{}")
    assert f"is a run. Export it first: keras-preact export {images / 'run'}" in error_of(
        capsys, images / "run", image
    )
    assert "does not take image files" in error_of(capsys, models / "without files", image)
    assert "right.txt: No such file" in error_of(capsys, gray, image, images / "right.txt")
    (images / "text.png").write_text("no image")
    assert "text.png: it is no PNG or JPEG." in error_of(capsys, gray, image, images / "text.png")
    Image.new("L", (200, 6)).save(images / "large.png")
    assert "large.png: it is 200 x 6 pixels; at most 1000" in error_of(
        capsys, gray, image, images / "large.png"
    )
    half = image.read_bytes()
    (images / "half.png").write_bytes(half[: len(half) * 3 // 4])
    assert "half.png: it is damaged." in error_of(capsys, gray, image, images / "half.png")


def test_errors_of_damaged_models(models, images, tmp_path, capsys):
    (tmp_path / "m" / "1").mkdir(parents=True)
    assert "no model_card.json" in error_of(capsys, tmp_path / "m", images / "right.png")
    (tmp_path / "m" / "model_card.json").write_text("{}")
    assert "is not a model card" in error_of(capsys, tmp_path / "m", images / "right.png")
    (tmp_path / "m" / "model_card.json").write_text(
        (models / "gray" / "model_card.json").read_text()
    )
    assert "SavedModel file does not exist" in error_of(
        capsys, tmp_path / "m", images / "right.png"
    )
    (tmp_path / "m" / "1" / "saved_model.pb").write_bytes(b"junk")
    assert "damaged" in error_of(capsys, tmp_path / "m", images / "right.png")


def test_scores_that_are_no_numbers(tmp_path, images, capsys):
    def core(images):
        return {"probabilities": tf.reduce_mean(images, axis=[1, 2]) * float("nan")}

    save_model(tmp_path / "m" / "1", core=core)
    assert "are not finite" in error_of(capsys, tmp_path / "m", images / "right.png")


def test_as_a_command_without_keras(models, images):
    blocked = (
        "import sys; sys.modules |= {'keras': None, 'PIL': None}; "
        "from training.predict import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", blocked, str(models / "gray"), str(images / "right.png")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "RIGHT" in done.stdout
    assert commands.without_notes(done.stderr) == ""
