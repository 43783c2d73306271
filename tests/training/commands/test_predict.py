"""`keras-preact predict`: its output for image files, and its errors. The models are made
with TensorFlow alone.
"""

import io
import json
import os
import re

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from keras_preact.export._images import decoder
from keras_preact.preprocessing import Preprocessing
from tests.keras_preact.export import layouts
from tests.training import calls
from training.commands.predict import conversions, exported
from training.commands.predict.__main__ import Pace, classified, main
from training.commands.predict.named import Named, find

CLASSES = ["dark", "left", "right side"]


def darkness_and_halves(images):
    """Scores for a dark image, and for the brightness of its halves."""
    left, right = (
        tf.reduce_mean(part, axis=[1, 2, 3]) for part in (images[:, :, :4], images[:, :, 4:])
    )
    logits = tf.stack([50 - (left + right) / 2, left, right], axis=-1) / 50
    return {"logits": logits, "probabilities": tf.nn.softmax(logits)}


def card_of(classes, outputs=3, **fields):
    probabilities = {"outputs": {"probabilities": {"shape": [None, outputs]}}}
    return json.dumps(
        {"classes": classes, "signatures": {"serving_default": probabilities}} | fields
    )


def save_model(
    path,
    core=darkness_and_halves,
    classes=CLASSES,
    preprocessing=None,
    decodes=True,
    channels=1,
    **card,
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
    card["preprocessing"] = preprocessing and preprocessing.to_dict()
    (path / "assets.extra" / "model_card.json").write_text(card_of(classes, **card))


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
    main([str(models / "gray"), *files, "--version", "2"])
    printed = [line.rsplit(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    e = np.exp([4, 0, -1])
    shares = [f"{100 * share:.2f}" for share in e / e.sum()]
    assert [line[0].strip() for line in printed] == [
        *(files[0], "right side", "left", "dark"),
        *(files[1], "left", "right side", "dark"),
    ]
    assert [line[1] for line in printed if len(line) == 3] == shares * 2


def test_takes_the_highest_version(models, images, capsys):
    main([str(models / "gray"), str(images / "right.png"), "--top", "1"])
    _, best = capsys.readouterr().out.splitlines()  # only the best class
    assert best.startswith("  RIGHT ")


def test_a_folder_of_a_version_is_that_version(models, images, capsys, monkeypatch):
    monkeypatch.chdir(models / "gray" / "2")
    main([".", str(images / "right.png"), "--version", "2"])
    assert "right side" in capsys.readouterr().out


def test_says_that_it_does_not_compute_in_8_bits(images, capsys):
    save_model(images / "m" / "1", precision="int8")
    main([str(images / "m"), str(images / "right.png")])
    assert capsys.readouterr().err == (
        "warning: These are the answers of the network in float32. Those in 8 bits come from "
        f"keras-preact serve {images} --engine openvino.\n"
    )


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
    main([str(models / model), *files])
    out, err = capsys.readouterr()
    assert err.splitlines() == [f"warning: Images were {text}".format(*files) for text in changes]
    assert [line for line in out.splitlines() if line[0] != " "] == files


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("lossless", [False, True])
def test_the_header_of_a_webp(mode, lossless):
    file = io.BytesIO()
    Image.new(mode, (300, 17), "#10203040"[: 1 + 2 * len(mode)]).save(
        file, "WEBP", lossless=lossless
    )
    expected = conversions.Header(17, 300, is_gray=False, has_transparency=mode == "RGBA")
    assert conversions.header(file.getvalue()) == expected


def error_of(capsys, model, *arguments) -> str:
    with pytest.raises(SystemExit):
        main([str(model), *map(str, arguments)])
    out, err = capsys.readouterr()
    assert out == ""
    return calls.one_error(err)


def test_errors(models, images, tmp_path, capsys):
    gray, image = models / "gray", images / "right.png"
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
        ((image,), "Name an exported model, then images: keras-preact predict MODEL IMAGE."),
        ((models / "grey", image), "Models beside it: 'gray', 'rgb', 'without files'."),
        ((gray, image, "--version", 3), "It has: 2, 10."),
        ((gray, image, "--version", 0), "It has: 2, 10."),
        ((gray, image, "--version", -1), "It has: 2, 10."),
        ((gray / "2", image, "--version", 10), "itself a version, but not version 10. Use"),
        ((images / "run", image), "is a run. Export it first"),
        ((models / "without files", image), "does not take image files"),
        ((gray, image, "--top", 0), "must be positive"),
        ((gray, image, "--batch", 0), "must be positive"),
        ((gray, image, "--output", "a.txt"), "must end in .csv or .json. Received: a.txt"),
        ((gray, image, "--output", image / "a.csv"), f"Cannot write {image}"),
        ((damaged, image), "model_card.json cannot be read: KeyError('classes')"),
        ((tmp_path / "nan", image), "are not finite"),
    ):
        assert word in error_of(capsys, *arguments)
    for names, words in (
        (CLASSES[:2], "for each of its 3 outputs under `classes`. Received: 2 values. Correct it"),
        ([CLASSES[0]] * 3, f"Received: 3 values, with {CLASSES[0]!r} more than once. Correct it"),
    ):
        card.write_text(card_of(names))
        assert words in error_of(capsys, damaged, image)
    card.write_text(card_of(CLASSES))
    assert "saved_model.pb" in error_of(capsys, damaged, image)


@pytest.fixture
def bad(images):
    """Files that are no images, with what is said about them."""
    half = (images / "right.png").read_bytes()
    (images / "half.png").write_bytes(half[: len(half) * 3 // 4])
    (images / "text.png").write_text("no image")
    (images / "empty.png").write_bytes(b"")
    Image.new("L", (200, 6)).save(images / "large.png")
    Image.new("L", (8, 8)).save(images / "other.png", "GIF")
    return {
        "empty.png": "it is no PNG, JPEG or WebP",
        "half.png": "it is damaged",
        "large.png": "it is 200 x 6 pixels; at most 1000 pixels are decoded",
        "other.png": "it is a GIF file: save it as PNG or JPEG",
        "text.png": "it is no PNG, JPEG or WebP",
    }


def run(capsys, *arguments) -> tuple[int, str, list[str]]:
    """Return the exit status, stdout and the lines of stderr."""
    capsys.readouterr()
    status = 0
    try:
        main(list(map(str, arguments)))
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    return status, out, err.splitlines()


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_a_bad_file_does_not_stop_the_others(models, images, bad, tmp_path, capsys, batch):
    output = tmp_path / "new" / "a.csv"
    options = ["--batch", batch, "--output", output, "--json", "--version", 2]
    status, out, err = run(capsys, models / "gray", images, images / "none.png", *options)
    files = sorted(["left.png", "right.png", *bad])
    expected = {str(images / name): bad.get(name) for name in files}
    expected[str(images / "none.png")] = "No such file or directory"
    assert status == 1
    assert err == [
        *(f"error: Cannot classify {file}: {why}." for file, why in expected.items() if why),
        f"Wrote {output}: 2 of 8 files were classified.",
        "error: 6 of 8 files could not be classified.",
    ]
    rows = calls.csv_rows(output)
    printed = json.loads(out)
    for row, printed_row, (file, why) in zip(rows, printed, expected.items(), strict=True):
        assert (row["file"], row["error"]) == (printed_row["file"], why or "") == (file, why or "")
        assert printed_row.get("error") == why
        guesses = printed_row.get("predictions", [])
        assert len(guesses) == (0 if why else 3)
        for i, guess in enumerate(guesses, 1):
            assert row[f"class_{i}"] == guess["class"]
            assert float(row[f"probability_{i}"]) == pytest.approx(guess["probability"], abs=6e-7)
    best = [row["class_1"] for row in rows if not row["error"]]
    assert best == ["left", "right side"]
    e = np.exp([4, 0, -1])
    assert float(rows[3]["probability_1"]) == pytest.approx(e[0] / e.sum(), abs=1e-5)


def test_a_file_of_any_size_is_not_read(models, images, capsys, monkeypatch):
    monkeypatch.setattr(exported, "LARGEST", 2_000_000)
    with (images / "huge.png").open("wb") as file:
        file.truncate(5_000_000)
    status, _, err = run(capsys, models / "gray", images / "huge.png", images / "left.png")
    assert status == 1
    assert "huge.png: it has 5 MB; at most 2 MB are read." in err[0]


def test_json_is_the_same_on_stdout_and_in_a_file(models, images, tmp_path, capsys):
    output = tmp_path / "a.json"
    status, out, _ = run(capsys, models / "gray", images, "--json", "--output", output)
    assert (status, output.read_text()) == (0, out)
    status, out, err = run(capsys, models / "gray", images / "none.png", "--json")
    assert (status, [list(row) for row in json.loads(out)]) == (1, [["file", "error"]])
    assert len(err) == 2


NAMES = ["a b.png", "Gr\u00fc\u00dfe.png", "two\nlines.png", 'quoted "x", y.png', "\udce9.png"]


def test_names_of_files(models, tmp_path, capsys):
    """A name that is not UTF-8 is an escape in CSV, and itself in JSON."""
    for name in NAMES:
        Image.new("L", (8, 8)).save(tmp_path / name, "PNG")
    files = sorted(str(tmp_path / name) for name in NAMES)
    _, out, _ = run(capsys, models / "gray", tmp_path, "--json", "--output", tmp_path / "a.csv")
    assert [row["file"] for row in json.loads(out)] == files
    rows = calls.csv_rows(tmp_path / "a.csv")
    assert [row["file"] for row in rows] == [file.replace("\udce9", "\\udce9") for file in files]
    Image.new("RGB", (8, 8)).save(tmp_path / "two\nlines.png", "PNG")
    _, out, [warning] = run(capsys, models / "gray", tmp_path / "two\nlines.png", "--top", 1)
    shown = str(tmp_path / "two\\nlines.png")
    assert warning == f"warning: Images were converted from colour to grayscale: {shown}."
    assert out.splitlines()[0] == shown


@pytest.mark.parametrize("stop", [KeyboardInterrupt, "nan"])
def test_what_stops_half_way_leaves_the_output_as_it_was(
    models, images, tmp_path, capsys, monkeypatch, stop
):
    output = tmp_path / "a.csv"
    output.write_text("old")
    classify, calls_so_far = exported.Exported.classify, []

    def stopping(model, decoded):
        calls_so_far.append(len(decoded))
        if len(calls_so_far) == 2:
            if stop != "nan":
                raise stop
            return np.full((1, 3), np.nan)
        return classify(model, decoded)

    monkeypatch.setattr(exported.Exported, "classify", stopping)
    before = calls.files(tmp_path)
    files = [images / "left.png", images / "right.png"]
    options = ["--batch", 1, "--output", output]
    status, out, err = run(capsys, models / "gray", *files, *options)
    assert (status, out, calls_so_far) == (2 if stop == "nan" else 130, "", [1, 1])
    assert (output.read_text(), calls.files(tmp_path)) == ("old", before)
    assert len(err) == (1 if stop == "nan" else 0)


def sigmoids(outputs):
    def core(images):
        left = tf.reduce_mean(images[:, :, :4], axis=[1, 2]) / 255
        probabilities = tf.concat([left, 1 - left / 2, left / 4], axis=-1)[:, :outputs]
        return {"probabilities": probabilities}

    return core


@pytest.mark.parametrize(
    ("outputs", "classes", "expected"),
    [
        (3, CLASSES, {"left": 0.5, "dark": 1.0, "right side": 0.25}),
        (1, ["no", "yes"], {"no": 0.0, "yes": 1.0}),
        (1, ["yes"], {"yes": 1.0}),
    ],
)
def test_sigmoids(tmp_path, capsys, outputs, classes, expected):
    """Of several labels, each has its own probability. One output has one or two names."""
    save_model(tmp_path / "m" / "1", core=sigmoids(outputs), classes=classes, outputs=outputs)
    Image.new("L", (8, 8), 255).save(tmp_path / "white.png")
    arguments = [tmp_path / "m", tmp_path / "white.png", "--output", tmp_path / "a.csv"]
    _, out, _ = run(capsys, *arguments, "--json")
    [row] = json.loads(out)
    got = {guess["class"]: guess["probability"] for guess in row["predictions"]}
    assert got == pytest.approx(expected)
    assert list(got.values()) == sorted(got.values(), reverse=True)
    [heading, _] = (tmp_path / "a.csv").read_text().splitlines()
    assert heading.count("class_") == len(classes)


class TestFind:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name in (
            *("photos/b.png", "photos/a.JPG", "photos/deep/er/c.jpeg", "photos/notes.txt"),
            *("photos/.hidden/d.png", "photos/.e.png", "photos/@eaDir/f.png", "photos/g[1].png"),
            *("none/LICENSE", "other/h.webp"),
        ):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
        (tmp_path / "photos" / "linked").symlink_to(tmp_path / "other")
        (tmp_path / "photos" / "gone.png").symlink_to(tmp_path / "nowhere.png")

    INSIDE = (
        *("photos/a.JPG", "photos/b.png", "photos/deep/er/c.jpeg", "photos/g[1].png"),
        *("photos/gone.png", "photos/linked/h.webp"),
    )

    @pytest.mark.parametrize(
        ("names", "files"),
        [
            (["photos"], INSIDE),
            (["photos/notes.txt", "photos/.e.png"], ["photos/notes.txt", "photos/.e.png"]),
            (["photos/*.png"], ["photos/b.png", "photos/g[1].png", "photos/gone.png"]),
            (["photos/**/c.*"], ["photos/deep/er/c.jpeg"]),
            (["photos/d*"], ["photos/deep/er/c.jpeg"]),  # as from a shell
            (["photos/g[1].png"], ["photos/g[1].png"]),  # a file, not a pattern
            (["photos/b.png", "photos", "./photos/../photos/b.png"], ["photos/b.png", *INSIDE]),
            (["missing.png"], ["missing.png"]),
        ],
    )
    def test_names(self, names, files):
        found, _ = find(names)
        assert found == [Named(file) for file in dict.fromkeys(files)]

    def test_other_files_are_counted(self):
        assert find(["photos", "other"])[1] == "1 .txt"

    def test_problems(self, monkeypatch):
        os.mkfifo("photos/pipe.png")
        scandir = os.scandir

        def unreadable(path):
            if str(path).endswith("deep"):
                raise PermissionError(13, "Permission denied", str(path))
            return scandir(path)

        monkeypatch.setattr(os, "scandir", unreadable)
        found, _ = find(["photos", "none", "*.gif"])
        assert {each.path: each.problem for each in found if each.problem} == {
            "photos/deep": "Permission denied",
            "photos/pipe.png": "it is not a file",
            "none": "the folder holds no images (.bmp, .jpeg, .jpg, .png, .webp)",
            "*.gif": "no file matches this pattern",
        }
        assert Named("photos/b.png") in found


@pytest.mark.parametrize(
    ("mode", "kind", "is_gray", "has_transparency"),
    [
        *(("L", "PNG", True, False), ("1", "PNG", True, False), ("I;16", "PNG", True, False)),
        *(("LA", "PNG", True, True), ("RGB", "PNG", False, False), ("RGBA", "PNG", False, True)),
        *(("P", "PNG", False, False), ("P+", "PNG", False, True)),
        *(("L", "JPEG", True, False), ("RGB", "JPEG", False, False)),
        ("CMYK", "JPEG", False, False),
    ],
)
def test_header(mode, kind, is_gray, has_transparency):
    file = io.BytesIO()
    options = {"transparency": 0} if mode.endswith("+") else {}
    Image.new(mode.removesuffix("+"), (5, 3)).save(file, kind, **options)
    assert conversions.header(file.getvalue()) == (3, 5, is_gray, has_transparency)


class Stub:
    """A model of 8 x 8 pixels that notes what it is asked for."""

    classes, crops, path = ("a", "b"), False, "stub"

    def __init__(self):
        self.decoded, self.classified = [], []

    def decode(self, path):
        self.decoded.append(path)
        return exported.Decoded(np.zeros((1, 8, 8, 1)), conversions.Header(8, 8, True, False))

    def classify(self, images):
        self.classified.append(len(images))
        return np.tile([0.25, 0.75], (len(images), 1))


def test_files_are_read_batch_by_batch():
    model, files = Stub(), [Named(str(i), "missing" if i == 4 else "") for i in range(8)]
    for i, answers in enumerate(classified(model, files, 1, 3)):
        assert [answer.file for answer in answers] == [
            file.path for file in files[3 * i : 3 * i + 3]
        ]
        assert sorted(model.decoded) == [
            file.path for file in files[: 3 * i + 3] if not file.problem
        ]
        assert all(answer.error or answer.predictions == [("b", 0.75)] for answer in answers)
    assert model.classified == [3, 2, 2]


def test_progress(capsys):
    times = iter([0, 4, 9, 14, 20, 34])
    pace = Pace(1000, lambda: next(times))
    for files in (100, 100, 100, 100, 600):
        pace.add(files)
    assert capsys.readouterr().err.splitlines() == [
        "Classifying 1,000 files.",
        "300 of 1,000 files, 20 per second, 35 s left",
    ]
    Pace(99)
    assert capsys.readouterr().err == ""


@pytest.mark.process
def test_needs_neither_keras_nor_pillow(models, images):
    blocked = (
        "import sys; sys.modules |= {'keras': None, 'PIL': None}; "
        "from training.commands.predict.__main__ import main; main(sys.argv[1:])"
    )
    arguments = [models / "gray", images, "--output", "a.csv", "--json"]
    status, out, err = calls.finish(calls.start("-c", blocked, *arguments, cwd=images))
    assert status == 0, err
    assert [row["predictions"][0]["class"] for row in json.loads(out)] == ["LEFT", "RIGHT"]
    assert "RIGHT" in (images / "a.csv").read_text()
