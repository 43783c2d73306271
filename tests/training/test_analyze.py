"""training.analyze: its page, pictures and numbers, on a run, a file and a registered
model; and its mistakes.
"""

import dataclasses
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

import keras_preact as kp
from keras_preact.analysis.audit import Audit, AuditFinding, Status
from keras_preact.analysis.audit.checks import CHECKS
from keras_preact.analysis.figures import style
from tests.training import images as pictures
from tests.training.commands import error_of, files, run_train, words
from training import cli, runs
from training.analyze import page
from training.analyze.__main__ import analyze
from training.analyze.chapters import CHAPTERS, Picture
from training.analyze.specimen import open_specimen
from training.analyze.texts import MAIN, SHOWN_BY, TEXTS
from training.audit import audit as audit_command
from training.config import Data
from training.data import load
from training.histories import read_table

pytestmark = pytest.mark.backend

VOID = {"meta", "img", "br", "source"}


def run(*arguments: object) -> None:
    cli.main("analyze", analyze, list(map(str, arguments)))


class Page(HTMLParser):
    """Reads a page and checks that its elements are closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_folder(folder: Path) -> tuple[Page, dict]:
    """Check what holds for every analysis; return the page and the numbers."""
    page = Page((folder / "index.html").read_text(encoding="utf-8"))
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    named = {"index.html", "analysis.json", "audit.txt"}
    for attribute, tag in (("href", "a"), ("src", "img"), ("srcset", "source")):
        for link in (attributes[attribute] for attributes in page.all(tag)):
            if link.startswith("#"):
                assert link[1:] in ids
            else:
                assert (folder / link).is_file()
                named.add(link)
    assert set(files(folder)) == named  # nothing is missing, nothing is left over
    for attributes, dark in zip(page.all("img"), page.all("source"), strict=True):
        assert len(attributes["alt"]) > 20
        light = folder / attributes["src"]
        shape = int(attributes["width"]) / int(attributes["height"])
        with Image.open(light.with_suffix(".png")) as picture:
            picture.verify()
            assert picture.width / picture.height == pytest.approx(shape, rel=0.02)
        assert dark == {
            "srcset": attributes["src"].replace(".svg", "-dark.svg"),
            "media": "(prefers-color-scheme: dark)",
        }
        assert (
            (folder / dark["srcset"]).read_text()
            == style.darkened(light.read_text())
            != light.read_text()
        )
    order = [
        page.text.index(part)
        for part in ("The network ", "Signals and gradients", "Every check", "What was analysed")
    ]
    assert order == sorted(order)  # verdict, picture, chapters; what was analysed is last
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.elements}

    def no_constant(value):
        raise AssertionError(value)

    return page, json.loads((folder / "analysis.json").read_text(), parse_constant=no_constant)


@pytest.fixture(scope="module")
def a_run(tmp_path_factory) -> Path:
    """As wide as the registered model, and analysed with as many images: what is
    compiled for one serves the other.
    """
    options = ("--model.width-factor", "1", "--health", "2", "--data.watch-test")
    return run_train(tmp_path_factory.mktemp("runs") / "a<b>run", *options)


@pytest.mark.soak
def test_run(a_run, capsys):
    run(a_run, "--images", 8)
    page, numbers = check_folder(a_run / "analysis")
    names = [Path(attributes["src"]).stem for attributes in page.all("img")]
    assert names == ["gradient_norms", *(name for name in TEXTS if name != "gradient_norms")]
    assert "Left out" not in page.text
    assert "Only for" not in page.text
    for part in (
        "normalisations use their moving averages, as at inference",
        a_run.name,
        "those of the run's model.keras",
        "8 test images of digits",
    ):
        assert part in page.text
    assert {"network", "audit", *CHAPTERS} <= numbers.keys()

    # the numbers are those of the trained network on its data
    [found] = numbers["signals"]["propagation"].values()
    opened = open_specimen(str(a_run), "final", None, 8, 0)
    model = keras.saving.load_model(a_run / "model.keras", compile=False)
    logits = model.predict(opened.x, verbose=0).astype("float64")
    entropy = np.log(np.exp(logits).sum(1)) - logits[np.arange(8), opened.labels]
    assert found["loss"] == pytest.approx(entropy.mean(), rel=1e-4)
    assert len(found["gradient_norm"]) == 4
    assert found["units"] == ["stage1_unit1", "stage2_unit1", "stage3_unit1"]
    history = numbers["training"]["history"]["loss"]
    assert history == read_table(a_run / "history.csv")["loss"].tolist()
    assert numbers["training"]["health"]["step"] == [2, 4]
    lesions = numbers["ensemble"]["lesions"]
    assert [len(each) for each in lesions["dropped"]] == [1] * 3 + [2] * 3
    assert all((32 * error) % 1 == 0 for error in lesions["error"])  # 4 x 8 other images

    text = (a_run / "analysis" / "audit.txt").read_text()
    for each in numbers["audit"]["findings"]:
        assert each["check"] in text
        assert each["check"] in page.text
    assert len(page.all("td")) > 3 * len(numbers["audit"]["findings"])
    again = error_of(capsys, run, a_run, "--quick")
    assert "exists and is not empty. Give another --output" in again


class TestRegisteredModel:
    def test_page(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        run("digits_resnet8_preact", "--quick", "--images", 8)
        page, numbers = check_folder(tmp_path / "analysis-digits_resnet8_preact")
        printed = capsys.readouterr().out
        assert "signals: 6 pictures" in printed
        assert (
            f"Wrote {Path('analysis-digits_resnet8_preact', 'index.html')} with 8 pictures. "
            in printed
        )
        assert numbers["jacobian"] == {"left_out": "left out by --quick"}
        for line in (
            "Only for runs with a history of training: Training.",
            "Left out by --quick: What the shortcuts carry, Jacobian, Mean-field theory.",
        ):
            assert line in page.text
            assert printed.count(line) == 1
        # no heading, no link
        assert page.text.count("Jacobian") == page.text.count("What the shortcuts carry") == 1
        assert "untrained, so its normalisations use the statistics of the batch" in page.text
        found = {each["check"]: each["detail"] for each in numbers["audit"]["findings"]}
        assert (
            page.text.count(f"The audit, within one shape: {found['gradient of the signal']}") == 1
        )
        assert "audit: PASS: all 15 checks pass" in printed
        assert "new ones, seed 0" in page.text
        assert "8 test images of digits" in page.text
        assert numbers["unit"] == {
            "basic": {"arrangement": "full_preactivation", "shortcut": "Identity"}
        }
        assert files(tmp_path)[0].startswith("analysis-digits_resnet8_preact")
        assert len(list(tmp_path.iterdir())) == 1  # no temporary folder

    def test_compared_with_other_variants(self, monkeypatch):
        opened = open_specimen("digits_resnet8_preact", "final", None, 8, 0)
        found = next(CHAPTERS["signals"].pictures(opened, False)).numbers["propagation"]
        others = [name for name in kp.ARRANGEMENTS if name != "full_preactivation"]
        assert list(found) == ["digits_resnet8_preact", *others, "no shortcuts"]
        assert np.isinf(found["no shortcuts"].ratio).all()
        assert found["original"].cut.max() > 0
        assert found["digits_resnet8_preact"].cut.max() == 0


class TestSpecimen:
    def test_seed_is_that_of_the_weights(self):
        first, again, other = (
            keras.ops.convert_to_numpy(
                open_specimen(
                    "digits_resnet8_preact", "final", None, 2, seed
                ).model.trainable_weights[0]
            )
            for seed in (3, 3, 4)
        )
        np.testing.assert_array_equal(first, again)
        assert np.abs(first - other).max() > 0

    def test_images_are_normalised_test_images_of_several_classes(self):
        opened = open_specimen("digits_resnet8_preact", "final", None, 20, 0)
        digits = load(Data("digits"))
        rows = [
            (digits.preprocessing.normalize(image[None])[0], label)
            for image, label in digits.test.open().as_numpy_iterator()
        ]
        for image, label in zip(opened.x, opened.labels, strict=True):
            assert any(label == other and np.allclose(image, pixels) for pixels, other in rows)
        assert len(set(opened.labels.tolist())) > 3

    def test_a_run_gets_pixels(self, run):
        opened = open_specimen(str(run), "last", None, 4, 0)
        checkpoint = r"those of the run's checkpoints/state-\d+-[0-9a-f]{16}\.npz"
        assert re.fullmatch(checkpoint, opened.weights)
        assert opened.x.max() > 200
        assert opened.more is not None
        assert len(opened.more[0]) == 16

    def test_vectors(self):
        opened = open_specimen("dense_resnet6", "final", None, 4, 0)
        assert opened.x.shape == (4, 64)
        assert opened.data == "4 test images of digits"

    def test_random_images(self):
        opened = open_specimen("cifar_resnet20_preact", "final", None, 3, 0)
        assert opened.x.shape == (3, 32, 32, 3)
        assert abs(opened.x.mean()) < 0.1
        assert "losses and accuracies mean nothing here" in opened.data
        assert opened.more is None

    def test_images_of_a_folder_come_from_all_classes(self, tmp_path):
        pictures.write_folder(tmp_path, images=12, size=(10, 10))
        options = {"width_factor": 0.25, "mean": (0, 0, 0), "std": (255, 255, 255)}
        model = kp.models.resnet_cifar(8, input_shape=(8, 8, 3), classes=2, **options)
        model.save(tmp_path / "net.keras")
        folder = Data("folder", dir=tmp_path)
        opened = open_specimen(str(tmp_path / "net.keras"), "final", folder, 8, 0)
        assert set(opened.labels.tolist()) == {0, 1}
        assert opened.x.shape == (8, 8, 8, 3)
        assert opened.x.max() > 2

    @pytest.mark.parametrize("stacked", [False, True])
    def test_untrained_file(self, tmp_path, stacked):
        """A file with the moving statistics of new layers is measured as a registered
        model is.
        """
        model = kp.models.resnet_cifar(
            26, input_shape=(8, 8, 1), width_factor=0.25, stacked=stacked
        )
        stacks = [layer.depth for layer in model.layers if isinstance(layer, kp.UnitStack)]
        assert stacks == ([3, 3, 3] if stacked else [])
        model.save(tmp_path / "new.keras")
        for weight in model.non_trainable_variables:
            if weight.path.endswith("moving_mean"):
                weight.assign(np.full(weight.shape, 0.1))
        model.save(tmp_path / "trained.keras")
        new, trained = (
            open_specimen(str(tmp_path / f"{name}.keras"), "final", None, 4, 0)
            for name in ("new", "trained")
        )
        assert (new.name, new.training, new.trained) == ("new.keras", True, False)
        assert new.statistics.startswith("The network is untrained")
        assert "untrained" in new.weights
        assert new.x.max() < 5  # normalised: the model has no preprocessing
        assert (trained.training, trained.trained) == (False, True)
        assert trained.statistics.startswith("In the pictures, normalisations use their moving")
        assert trained.weights == "those of trained.keras"

    def test_without_moving_statistics(self, tmp_path):
        options = {"width_factor": 0.25, "normalization": "layer"}
        model = kp.models.resnet_cifar(8, input_shape=(8, 8, 1), **options)
        model.save(tmp_path / "a.keras")
        opened = open_specimen(str(tmp_path / "a.keras"), "final", None, 4, 0)
        assert (opened.trained, opened.statistics) == (True, "")


def test_another_packages_model(tmp_path, capsys):
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(4, 3, padding="same")(inputs)
    x = keras.layers.Add()([x, keras.layers.Conv2D(4, 3, padding="same")(keras.layers.ReLU()(x))])
    outputs = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x))
    keras.Model(inputs, outputs, name="mine").save(tmp_path / "mine.keras")
    options = words("--images 4 --data digits --quick --out")
    run(tmp_path / "mine.keras", *options, tmp_path / "out")
    page, numbers = check_folder(tmp_path / "out")
    assert numbers["jacobian"]["left_out"] == "only for networks built with keras_preact"
    assert "gradient_norms" in [Path(attributes["src"]).stem for attributes in page.all("img")]
    line = (
        "Only for networks built with keras_preact: The unit, An ensemble of paths, Jacobian, "
        "Mean-field theory."
    )
    assert line in page.text
    assert capsys.readouterr().out.count(line) == 1
    links = {attributes["href"] for attributes in page.all("a")}
    assert {"#signals", "#audit"} <= links
    assert not {"#unit", "#jacobian", "#training"} & links
    assert page.text.count("The ReLU after the addition sets at most") == 1
    assert numbers["Network"].startswith("mine.keras, input (8, 8, 1), ")
    assert (tmp_path / "out" / "audit.txt").read_text().startswith("mine.keras: 1 residual unit, ")
    for check, noun in (
        ("gradient of the signal", "signal"),
        ("gradient of the weights", "branch weights"),
    ):
        [found] = [each for each in numbers["audit"]["findings"] if each["check"] == check]
        assert f"The gradient norm of the {noun}" in found["detail"]
        assert f"The audit, within one shape: {found['detail']}" in page.text
    assert "The loss of these images" not in page.text


def test_audit_command_names_the_file(tmp_path, capsys):
    kp.models.resnet_cifar(8, input_shape=(8, 8, 1), width_factor=0.25).save(
        tmp_path / "mine.keras"
    )
    cli.main("audit", audit_command, [str(tmp_path / "mine.keras"), "--images", "8"])
    printed = capsys.readouterr().out
    assert printed.startswith(
        "mine.keras: 3 residual units, 8 weight layers, read as full_preactivation. PASS: "
    )
    assert "Measured on 8 test images of digits." in printed


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("cifar_resnet111_preact", "Did you mean 'cifar_resnet110_preact'"),
        ("digits_resnet8_preact --images 1", "must be at least 2"),
        ("digits_resnet8_preact --data-dir x", "--data-dir needs --data"),
        ("digits_resnet8_preact --data digit", "Did you mean 'digits'"),
        (
            "imagenet_resnet18_preact --data digits",
            "has 1000 outputs, the data set digits has 10 classes",
        ),
        (
            "cifar_resnet20_preact --data digits",
            "takes (32, 32, 3), the images of digits are (32, 32, 1)",
        ),
        ("damaged.keras", "is damaged, or no model"),
        ("empty", "is not a run directory: it has no config.json"),
    ],
    ids=["name", "images", "data-dir", "data", "classes", "shape", "damaged", "empty"],
)
def test_mistakes(tmp_path, monkeypatch, capsys, arguments, part):
    monkeypatch.chdir(tmp_path)
    Path("damaged.keras").write_bytes(b"PK")
    Path("empty").mkdir()
    assert part in error_of(capsys, run, *words(arguments), "--out", "out")
    assert files(tmp_path) == ["damaged.keras"]


def test_nothing_is_left_of_an_analysis_that_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["keras_preact.analysis.audit"], "audit", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("digits_resnet8_preact", "--out", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def finding(
    check: str, status: Status, detail: str = "It is so.", advice: str = "Mend it."
) -> AuditFinding:
    return AuditFinding(check, status, 0.5, "size", (), detail, "It matters.", advice, "Sec. 1")


def picture(name: str) -> Picture:
    return Picture(
        name, kp.analysis.figures.path_length_shares(np.array([0.5, 0.5])), "It was found."
    )


def first_words(audit) -> str:
    """Return what a page says between its title and its pictures."""
    text = page.render("net", {"Units": "3"}, audit, [("a", "A", [picture("unit")])], "1.0")
    return " ".join(Page(text[text.index("<h1>") : text.index("<figure")]).text.split())


class TestVerdict:
    def test_pass(self):
        audit = Audit("net", None, 1, 1, (finding("one", Status.PASS), finding("two", Status.PASS)))
        assert first_words(audit) == "net The network passes the audit. All 2 checks pass."

    def test_failures_come_before_warnings_with_what_to_do(self):
        found = (
            finding("a", Status.WARN, "Rather large.", "Make it smaller."),
            finding("b", Status.PASS, "Fine.", "Nothing."),
            finding("c", Status.FAIL, "Too large.", "Make it small."),
        )
        assert first_words(Audit("net", None, 1, 1, found)) == (
            "net The network fails the audit. 1 of 3 checks fails, 1 warns. c: Too large. What "
            "to do: Make it small. a: Rather large. What to do: Make it smaller."
        )
        assert first_words(Audit("net", None, 1, 1, found[:2])).startswith(
            "net The network passes the audit with warnings. 1 of 2 checks warns. "
        )

    def test_none(self):
        assert (
            first_words("the model has no units")
            == "net There is no verdict. the model has no units"
        )

    @pytest.mark.parametrize(
        ("statuses", "want"),
        [
            ({}, "gradient_norms"),
            ({"signal growth": Status.WARN}, "activation_norms"),
            ({"signal growth": Status.WARN, "dead channels": Status.FAIL}, "truncation"),
            ({"sample scale": Status.FAIL}, "gradient_norms"),
            ({"branch order": Status.FAIL}, "gradient_norms"),
        ],
        ids=["pass", "warning", "failure first", "no picture", "picture left out"],
    )
    def test_picture_shows_the_worst_finding(self, statuses, want):
        found = [finding(check.name, statuses.get(check.name, Status.PASS)) for check in CHECKS]
        pictures = [
            picture(name)
            for name in ("weight_gradients", "gradient_norms", "activation_norms", "truncation")
        ]
        assert page.main_picture(Audit("net", None, 1, 1, tuple(found)), pictures).name == want

    def test_pictures_of_checks_exist(self):
        assert SHOWN_BY.keys() <= {check.name for check in CHECKS}
        assert {MAIN, *SHOWN_BY.values()} <= TEXTS.keys()

    def test_without_pictures(self):
        assert page.main_picture("no audit", []) is None
        text = page.render("x", {}, "no audit", [], "1.0", {"no units": ["A", "B"]}, "A note.")
        assert "No units: A, B." in Page(text).text
        assert "A note." in Page(text).text

    def test_each_picture_is_shown_once(self):
        text = page.render(
            "net", {}, "no audit", [("a", "A", [picture("unit"), picture("gradient_norms")])], "1.0"
        )
        assert [Path(each["src"]).stem for each in Page(text).all("img")] == [
            "gradient_norms",
            "unit",
        ]
        assert {"href": "#gradient_norms"} not in Page(text).all("a")

    def test_a_chapter_whose_only_picture_is_at_the_top_links_to_it(self):
        text = page.render("net", {}, "no audit", [("a", "A", [picture("unit")])], "1.0")
        assert [Path(each["src"]).stem for each in Page(text).all("img")] == ["unit"]
        assert {"href": "#unit"} in Page(text).all("a")


def test_page_escapes_what_others_wrote():
    nasty = "<script>alert(\"1\")</script> & 'x'"
    found = AuditFinding(nasty, Status.FAIL, math.nan, nasty, (nasty,), nasty, nasty, nasty, nasty)
    figure = kp.analysis.figures.path_length_shares(np.array([0.5, 0.5]))
    audit = Audit(nasty, None, 1, 1, (found,))
    chapters = [("a", nasty, [Picture("unit", figure, nasty, nasty)])]
    text = page.render(nasty, {nasty: nasty}, audit, chapters, "1.0", {nasty: ["B", nasty]}, nasty)
    read = Page(text)
    assert not read.all("script")
    assert read.all("img")[0]["alt"] == nasty
    assert read.text.count(nasty) == 20
    assert {"class": "status FAIL"} in read.all("td")
    assert nasty in Page(page.render("x", {}, nasty, [], "1.0")).text


def test_plain():
    @dataclasses.dataclass
    class Found:
        values: np.ndarray
        names: tuple

    value = {
        1: Found(np.array([[1.0, np.inf], [np.nan, 2.0]]), ("a", np.int64(3))),
        "b": float("nan"),
    }
    assert runs.plain(value) == {
        "1": {"values": [[1.0, None], [None, 2.0]], "names": ["a", 3]},
        "b": None,
    }
