"""`keras-preact predict`: its output for image files, and its errors. The models are made
with TensorFlow alone.
"""

import json
import re

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from keras_preact.export._images import decoder
from keras_preact.preprocessing import Preprocessing
from tests.keras_preact.export import layouts
from tests.training import calls
from training.commands import predict

CLASSES = ["dark", "left", "right side"]


def darkness_and_halves(images):
    """Scores for a dark image, and for the brightness of its halves."""
    left, right = (
        tf.reduce_mean(part, axis=[1, 2, 3]) for part in (images[:, :, :4], images[:, :, 4:])
    )
    logits = tf.stack([50 - (left + right) / 2, left, right], axis=-1) / 50
    return {"logits": logits, "probabilities": tf.nn.softmax(logits)}


def save_model(
    path, core=darkness_and_halves, classes=CLASSES, preprocessing=None, decodes=True, channels=1
):
    """Save a model of three classes, with the functions of the project's exports."""
    module = tf.Module()
    shape = tf.TensorSpec([None, 8, 8, channels], tf.float32, name="images")
    module.core = tf.function(core, input_signature=[shape])
    if decodes:
        decode = decoder((8, 8), channels, preprocessing, max_pixels=1000)
        files = tf.TensorSpec([None], tf.string)
        module.decode = tf.function(decode, input_signature=[files], autograph=False)
    tf.saved_model.save(module, str(path))
    (path / "assets.extra").mkdir(exist_ok=True)
    card = {"classes": classes, "preprocessing": preprocessing and preprocessing.to_dict()}
    (path / "assets.extra" / "model_card.json").write_text(json.dumps(card))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved_models")
    save_model(folder / "gray" / "2")
    save_model(folder / "gray" / "10", classes=["DARK", "LEFT", "RIGHT"])
    save_model(folder / "without files" / "1", decodes=False)
    cropping = Preprocessing((0.0,), (1.0,), 8, resize=10, crop="center")
    save_model(folder / "rgb" / "1", preprocessing=cropping, channels=3)
    return folder


@pytest.fixture
def images(tmp_path):
    half = np.zeros((8, 8), "uint8")
    half[:, 4:] = 200
    Image.fromarray(half).save(tmp_path / "right.png")
    Image.fromarray(half[:, ::-1]).save(tmp_path / "left.png")
    return tmp_path


def test_prints_the_names(models, images, capsys):
    files = [str(images / f"{name}.png") for name in ("right", "left")]
    predict.main([str(models / "gray"), *files, "--version", "2"])
    printed = [line.rsplit(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    e = np.exp([4, 0, -1])
    shares = [f"{100 * share:.2f}" for share in e / e.sum()]
    assert [line[0].strip() for line in printed] == [
        *(files[0], "right side", "left", "dark"),
        *(files[1], "left", "right side", "dark"),
    ]
    assert [line[1] for line in printed if len(line) == 3] == shares * 2


def test_takes_the_highest_version(models, images, capsys):
    predict.main([str(models / "gray"), str(images / "right.png"), "--top", "1"])
    _, best = capsys.readouterr().out.splitlines()  # only the best class
    assert best.startswith("  RIGHT ")


def test_a_folder_of_a_version_is_that_version(models, images, capsys, monkeypatch):
    monkeypatch.chdir(models / "gray" / "2")
    predict.main([".", str(images / "right.png"), "--version", "2"])
    assert "right side" in capsys.readouterr().out


@pytest.mark.parametrize(
    "place", [place for place, (_, taken_by) in layouts.PLACES.items() if "find" not in taken_by]
)
def test_says_why_a_path_is_no_model(tmp_path, images, capsys, place):
    """`evaluate`, which takes files and names too, says the same about folders."""
    layouts.build_places(tmp_path / "places")
    path, (words, _) = tmp_path / "places" / place, layouts.PLACES[place]
    sentence = f"{re.escape(str(path))} cannot be used as an exported model. {words}"
    assert re.search(sentence, error_of(capsys, path, images / "right.png"))
    if path.is_dir():
        assert re.search(sentence, calls.error_of(capsys, calls.run_evaluate, path))


SQUARE, WIDE = (16, 16), (16, 8)


@pytest.mark.parametrize(
    ("model", "given", "changes"),
    [
        ("gray", [("L", (8, 8)), ("1", (8, 8))], []),
        ("gray", [("L", SQUARE)], ["scaled to 8 x 8 pixels: {0} (16 x 16)."]),
        ("gray", [("L", WIDE)], ["stretched to 8 x 8 pixels: {0} (16 x 8)."]),
        ("gray", [("RGB", (8, 8))], ["converted from colour to grayscale: {0}."]),
        ("gray", [("LA", (8, 8))], ["read without their transparency: {0}."]),
        ("rgb", [("RGB", (8, 8))], []),
        ("rgb", [("L", (8, 8))], ["converted from grayscale to colour: {0}."]),
        ("rgb", [("RGB", WIDE)], []),  # as in training
        (
            "rgb",
            [("RGBA", (8, 8)), ("LA", SQUARE), ("RGB", (8, 8))],
            [
                "read without their transparency: {0}, {1}.",
                "converted from grayscale to colour: {1}.",
            ],
        ),
        (
            "gray",
            [("L", (8, 8)), *[("L", (10 + i, 10 + i)) for i in range(5)]],
            ["scaled to 8 x 8 pixels: {1} (10 x 10), {2} (11 x 11), {3} (12 x 12) and 2 more."],
        ),
    ],
)
def test_says_how_it_changes_images(models, tmp_path, capsys, model, given, changes):
    files = [str(tmp_path / f"{i}.png") for i in range(len(given))]
    for file, (mode, size) in zip(files, given, strict=True):
        Image.new(mode, size).save(file)
    predict.main([str(models / model), *files])
    out, err = capsys.readouterr()
    assert err.splitlines() == [f"warning: Images were {text}".format(*files) for text in changes]
    assert [line for line in out.splitlines() if line[0] != " "] == files


def error_of(capsys, model, *arguments) -> str:
    with pytest.raises(SystemExit):
        predict.main([str(model), *map(str, arguments)])
    out, err = capsys.readouterr()
    assert out == ""  # nothing is classified before all is checked
    return calls.one_error(err)


def test_errors(models, images, tmp_path, capsys):
    gray, image = models / "gray", images / "right.png"
    half = image.read_bytes()
    (images / "half.png").write_bytes(half[: len(half) * 3 // 4])
    (images / "text.png").write_text("no image")
    Image.new("L", (200, 6)).save(images / "large.png")
    damaged, card = tmp_path / "m", tmp_path / "m" / "1" / "assets.extra" / "model_card.json"
    card.parent.mkdir(parents=True)
    (damaged / "1" / "saved_model.pb").write_bytes(b"junk")
    card.write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")

    def nan(images):
        return {"probabilities": tf.reduce_mean(images, axis=[1, 2]) * np.nan}

    save_model(tmp_path / "nan" / "1", core=nan)
    for arguments, word in (
        ((models / "grey", image), "Models beside it: 'gray', 'rgb', 'without files'."),
        ((gray, image, "--version", 3), "It has: 2, 10."),
        ((gray, image, "--version", 0), "It has: 2, 10."),
        ((gray, image, "--version", -1), "It has: 2, 10."),
        ((gray / "2", image, "--version", 10), "itself a version, but not version 10. Use"),
        ((images / "run", image), "is a run. Export it first"),
        ((models / "without files", image), "does not take image files"),
        ((gray, image, "--top", 0), "must be positive"),
        ((gray, image, images / "right.txt"), "right.txt: No such file"),
        ((gray, image, images / "text.png"), "text.png: it is no PNG, JPEG or WebP."),
        ((gray, image, images / "large.png"), "large.png: it is 200 x 6 pixels; at most 1000"),
        ((gray, image, images / "half.png"), "half.png: it is damaged."),
        ((damaged, image), "model_card.json cannot be read: KeyError('classes')"),
        ((tmp_path / "nan", image), "are not finite"),
    ):
        assert word in error_of(capsys, *arguments)
    card.write_text(json.dumps({"classes": CLASSES}))
    assert "saved_model.pb" in error_of(capsys, damaged, image)


@pytest.mark.process
def test_needs_neither_keras_nor_pillow(models, images):
    blocked = (
        "import sys; sys.modules |= {'keras': None, 'PIL': None}; "
        "from training.commands.predict import main; main(sys.argv[1:])"
    )
    arguments = [models / "gray", images / "right.png"]
    status, out, err = calls.finish(calls.start("-c", blocked, *arguments, cwd=images))
    assert status == 0, err
    assert "RIGHT" in out
