"""`keras-preact analyze`: its page, pictures and numbers; runs, files and models that it
opens; its errors.
"""

import json
import math
import re
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.analysis.audit import Audit, AuditFinding, Status
from keras_preact.analysis.audit.checks import CHECKS
from tests.training.calls import error_of, files, words
from training import cli
from training.commands.analyze import chapters, page
from training.commands.analyze.__main__ import analyze
from training.commands.analyze.chapters import Picture
from training.commands.analyze.specimen import Specimen, open_specimen
from training.config import Data
from training.data import load
from training.errors import UserError

FIGURE = kp.analysis.figures.path_length_shares(np.array([0.5, 0.5]))


def run_analyze(*arguments: object) -> None:
    cli.main("analyze", analyze, list(map(str, arguments)))


def test_numbers_are_those_of_the_trained_network_on_its_data(run, tmp_path, capsys):
    output = tmp_path / "analysis"
    run_analyze(run, "--quick", "--images", 8, "--output", output)
    text = (output / "index.html").read_text()
    links = set(re.findall(r'(?:href|src|srcset)="([^#"]+)"', text))
    assert set(files(output)) == {"index.html"} | links  # nothing is missing or left over
    places = re.findall(r' id="([^"]+)"', text)
    assert len(set(places)) == len(places)
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(places)

    def no_constant(value):
        raise AssertionError(value)

    numbers = json.loads((output / "analysis.json").read_text(), parse_constant=no_constant)
    [found] = numbers["signals"]["propagation"].values()
    opened = open_specimen(str(run), "final", None, 8, 0)
    model = keras.saving.load_model(run / "model.keras", compile=False)
    logits = model.predict(opened.x, verbose=0).astype("float64")
    entropy = np.log(np.exp(logits).sum(1)) - logits[np.arange(8), opened.labels]
    assert found["loss"] == pytest.approx(entropy.mean(), rel=1e-4)
    assert found["units"] == ["stage1_unit1", "stage2_unit1", "stage3_unit1"]
    assert len(numbers["training"]["history"]["loss"]) == 2
    audited = (output / "audit.txt").read_text()
    checks = {each["check"] for each in numbers["audit"]["findings"]}
    assert all(check in audited and check in text for check in checks)
    assert numbers["jacobian"] == {"left_out": "left out by --quick"}
    assert "exists and is not empty. Give another --output" in error_of(
        capsys, run_analyze, run, "--output", output
    )
    others = (run, "--output", output.with_name("other"), "--seed", 1)
    assert "is measured with neither" in error_of(capsys, run_analyze, *others)


class TestSpecimen:
    def test_images_are_normalised_test_images_of_several_classes(self):
        opened = open_specimen("digits_resnet8_preact", "final", None, 20, 0)
        digits = load(Data("digits"))
        images, labels = zip(*digits.test.open().as_numpy_iterator(), strict=True)
        pixels = digits.preprocessing.normalize(np.stack(images))
        for image, label in zip(opened.x, opened.labels, strict=True):
            places = np.flatnonzero(np.isclose(pixels, image).all(axis=(1, 2, 3)))
            assert label in np.array(labels)[places]
        assert len(set(opened.labels.tolist())) > 3

    @pytest.mark.parametrize(
        ("scaling", "shape", "least", "most"),
        [
            (keras.layers.Rescaling(1 / 255), (8, 8, 1), 0, 255),
            (keras.layers.Rescaling(1 / 255, offset=-0.5), (8, 8, 1), 0, 255),
            (keras.layers.Normalization(mean=0.5, variance=0.04), (8, 8, 1), 0, 1),
            (keras.layers.Activation("linear"), (8, 8, 1), -1, 2),
            (keras.layers.Rescaling(1 / 255), (9, 9, 1), 0, 255),
            (keras.layers.Normalization(mean=0.5, variance=0.04), (9, 9, 1), 0, 1),
        ],
    )
    def test_images_have_the_range_that_a_model_of_a_person_expects(
        self, tmp_path, scaling, shape, least, most
    ):
        """The network is inside another model, with test images of digits or with noise."""
        network = kp.models.resnet_cifar(8, input_shape=shape, width_factor=0.125)
        keras.Sequential([keras.Input(shape), scaling, network]).save(tmp_path / "a.keras")
        opened = open_specimen(str(tmp_path / "a.keras"), "final", None, 20, 0)
        assert least <= opened.x.min() < opened.x.max() <= most
        assert opened.x.max() - opened.x.min() > 0.7 * (most - least)
        assert opened.audit()["sample scale"].status == "PASS"

    @pytest.mark.parametrize(("images", "more"), [(9, 3), (12, 12), (50, 12)])
    def test_a_small_test_set_measures_errors_too(self, tmp_path, images, more):
        pixels, labels = np.arange(12 * 64, dtype="uint8").reshape(12, 8, 8, 1), np.arange(12) % 10
        names = ("x_train", "y_train", "x_test", "y_test")
        np.savez(tmp_path / "a.npz", **dict(zip(names, 2 * (pixels, labels), strict=True)))
        keras.utils.set_random_seed(0)
        kp.create_model("digits_resnet8_preact").save(tmp_path / "a.keras")
        data = Data("npz", dir=tmp_path / "a.npz")
        opened = open_specimen(str(tmp_path / "a.keras"), "final", data, images, 0)
        assert len(opened.x) == min(images, 12)
        assert [len(each) for each in opened.more] == [more, more]

    def test_a_network_with_the_moving_statistics_of_new_layers_is_untrained(self, tmp_path):
        options = {"stacked": True, "input_shape": (8, 8, 1), "width_factor": 0.25}
        model = kp.models.resnet_cifar(26, **options)
        for trained in (False, True):
            for weight in model.non_trainable_variables if trained else ():
                if weight.path.endswith("moving_mean"):
                    weight.assign(np.full(weight.shape, 0.1))
            model.save(tmp_path / "net.keras")
            opened = open_specimen(str(tmp_path / "net.keras"), "final", None, 4, 0)
            assert (opened.training, opened.trained) == (not trained, trained)
        with pytest.raises(UserError, match="--seed is for new weights and random images"):
            open_specimen(str(tmp_path / "net.keras"), "final", None, 4, 1)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("cifar_resnet111_preact", "Did you mean 'cifar_resnet110_preact'"),
        ("runs/nothing", "runs/nothing does not exist."),
        ("cifar_resnet20_preact --data digits", "the images of digits are (32, 32, 1)"),
        ("damaged.keras", "is damaged, or no model"),
        (".", "it has no config.json"),
        ("digits_resnet8_preact --checkpoint best", "digits_resnet8_preact is not a run directory"),
        ("digits_resnet8_preact --seed -1", "--seed must be from 0 to 4294967295"),
        ("digits_resnet8_preact --data.name digit", "Unknown --data.name: 'digit'"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, arguments, part):
    monkeypatch.chdir(tmp_path)
    Path("damaged.keras").write_bytes(b"PK")
    assert part in error_of(capsys, run_analyze, *words(arguments), "--out", "out")
    assert files(tmp_path) == ["damaged.keras"]


@pytest.mark.parametrize(
    ("statuses", "want"),
    [
        ({}, "gradient_norms"),
        ({"signal growth": Status.WARN}, "activation_norms"),
        ({"signal growth": Status.WARN, "dead channels": Status.FAIL}, "truncation"),
        ({"sample scale": Status.FAIL}, "gradient_norms"),  # it has no picture
    ],
)
def test_the_worst_finding_and_its_picture_come_first(statuses, want):
    assert page.SHOWN_BY.keys() <= {check.name for check in CHECKS}
    found = tuple(
        AuditFinding(
            *(check.name, statuses.get(check.name, Status.PASS), 0.5, "size", ()),
            *("It is so.", "It matters.", "Mend it.", "Sec. 1"),
        )
        for check in CHECKS
    )
    names = ("gradient_norms", "activation_norms", "truncation")
    shown = [Picture(name, FIGURE, "It is so.") for name in names]
    text = page.render("net", {}, Audit("net", None, 1, 1, found), [("a", "A", shown)], {})
    drawn = re.findall(r'<img src="pictures/(\w+)\.svg"', text)
    assert drawn[0] == want
    assert sorted(drawn) == sorted(names)  # each is shown once
    named = re.findall(r'<li><strong class="\w+">([\w ]+)</strong>: It is so\. What to do', text)
    assert named == sorted(statuses, key=lambda name: statuses[name] != Status.FAIL)


@pytest.mark.parametrize("shortcut", ["identity", "constant_scaling", "conv1x1", "none"])
def test_the_gain_of_all_shortcuts_is_shown_if_it_differs_from_1(shortcut):
    options = {"width_factor": 0.25, "input_shape": (8, 8, 1), "shortcut": shortcut}
    model = kp.models.resnet_cifar(14, **options)
    x, labels = np.random.default_rng(0).normal(size=(4, 8, 8, 1)), np.arange(4)
    specimen = Specimen("net", model, "new weights", False, x, labels, "noise")
    shown = {each.name: each for each in chapters.identities(specimen, quick=False)}
    assert list(shown)[:2] == ["gradient_split", "direct_path"]
    if shortcut != "constant_scaling":
        assert len(shown) == 2
        return
    found = shown["composite_gain"]
    np.testing.assert_allclose(found.numbers["composite_gain"].forward[:2], [0.25, 0.5])
    assert "up to 0.5 times and a gradient up to 0.5 times" in found.found


def test_page_escapes_what_others_wrote():
    nasty = "<script>alert(\"1\")</script> & 'x'"
    found = AuditFinding(nasty, Status.FAIL, math.nan, nasty, (nasty,), nasty, nasty, nasty, nasty)
    audit = Audit(nasty, None, 1, 1, (found,))
    pictures = [("a", nasty, [Picture("unit", FIGURE, nasty, alt=nasty)])]
    text = page.render(nasty, {nasty: nasty}, audit, pictures, {nasty: nasty})
    for part in (text, page.render("x", {}, nasty, [], {})):
        assert "<script" not in part
        assert "&lt;script&gt;" in part
