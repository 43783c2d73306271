"""metrics.json holds the measurement of a run's own test images, and `compare` and `export`
use no other.
"""

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from keras_preact.export import _check
from tests.keras_preact.export.one_process import in_this_process
from tests.training import images as pictures
from tests.training.calls import (
    TINY,
    error_of,
    files,
    run_evaluate,
    words,
)
from training import cli, disk
from training.commands import compare, train
from training.commands.analyze.__main__ import analyze as analyze_command
from training.commands.evaluate import __main__ as evaluate
from training.commands.export import export
from training.config import Data
from training.data import load
from training.directory import curves, measurements, models, runs

OPTIONS = "--data.dir photos --data.size 8 --batch-size 4 --health 0 --data.augmentation none"


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Load each network once, and neither compute logits nor draw: what a measurement is
    called, and where it is used, is the subject.
    """
    load, loaded = models.load, {}

    def of_file(path):
        content = path.read_bytes()
        if content not in loaded:
            loaded[content] = load(path)
        return loaded[content]

    def classify(opened, images, batch_size, size, views, split):
        """The logits of a network that takes every third image for another class."""
        labels = np.asarray(split.labels)
        answers = np.where(np.arange(len(labels)) % 3, labels, 1 - labels)
        return 2.0 * np.eye(opened.outputs)[answers], labels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "load", of_file)
        patch.setattr(evaluate, "_classify", classify)
        patch.setattr(evaluate, "draw_confusion", lambda numbers, classes, path: path.touch())
        patch.setattr(evaluate, "draw_reliability", lambda curves, path: path.touch())
        patch.setattr(curves, "draw", lambda histories, path, *_: path.touch())
        patch.setattr(_check, "replay", in_this_process)
        yield


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with photos of cats and dogs, and a run on them."""
    folder = tmp_path_factory.mktemp("photos")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        pictures.write_folder(folder / "photos", size=(8, 8))
        arguments = [*TINY, *words(OPTIONS), "--data.holdout", "4", "--output", "run"]
        train.main(["folder_small", *arguments])
    return folder


@pytest.fixture
def here(begun, tmp_path, monkeypatch):
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def evaluated(begun, tmp_path_factory):
    """The same with the measurement of the run."""
    folder = tmp_path_factory.mktemp("evaluated")
    shutil.copytree(begun, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_evaluate("run")
    return folder


@pytest.fixture
def measured(evaluated, tmp_path, monkeypatch):
    shutil.copytree(evaluated, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def another(folder, *, classes=("cat", "dog"), seed=1, images=6):
    pictures.write_folder(folder, classes, images, (8, 8), seed)


@pytest.mark.parametrize(
    ("options", "file"),
    [
        ("", "metrics.json"),
        ("--batch-size 3", "metrics.json"),
        ("--data-dir photos", "metrics.json"),
        ("--data folder --data-dir photos", "metrics.json"),
        ("--data-dir moved", "metrics.json"),  # the same images in another place
        ("--views flip", "metrics-flip.json"),
        ("--views flip_shift --checkpoint best", "metrics-best-flip_shift.json"),
        ("--checkpoint last", "metrics-last.json"),
        ("--data-dir others", "metrics-on-others.json"),
        ("--data-dir others/.", "metrics-on-others.json"),
        ("--data-dir best --views flip", "metrics-flip-on-best.json"),
        ("--data-dir one_more", "metrics-on-one_more.json"),
        ("--data npz --data-dir arrays.npz", "metrics-on-arrays.json"),
    ],
)
def test_file_of_each_measurement(here, options, file):
    shutil.copytree("photos", "moved")
    shutil.copytree("photos", "one_more")
    Image.new("RGB", (8, 8)).save("one_more/test/dog/6.png")
    another(here / "others")
    another(here / "best")
    arrays(here / "arrays.npz")
    before = files(here / "run")
    run_evaluate("run", *options.split())
    written = {name for name in files(here / "run") if name.endswith(".json")} - {*before}
    assert written == {file}
    # a file of this name elsewhere, too
    run_evaluate("run", *options.split(), "--output", "elsewhere")
    assert file in files(here / "elsewhere")


def arrays(path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3), "uint8")
    y = np.array([0, 1] * 4)
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)


def test_arrays_have_no_names(here):
    arrays(here / "arrays.npz")
    run_evaluate("run", "--data", "npz", "--data-dir", "arrays.npz")
    metrics = json.loads((here / "run/metrics-on-arrays.json").read_text())
    assert list(metrics["per_class"]) == ["cat", "dog"]


def test_images_that_change_in_their_place(here, capsys):
    """More test images are not the run's own, and more training images change the held-out
    ones.
    """
    Image.new("RGB", (8, 8)).save("photos/train/dog/9.png")
    run_evaluate("run")
    assert "calibrated" not in json.loads((here / "run/metrics.json").read_text())
    assert "The held-out images are not the run's" in capsys.readouterr().out
    Image.new("RGB", (8, 8)).save("photos/test/dog/9.png")
    run_evaluate("run")
    assert json.loads((here / "run/metrics-on-photos.json").read_text())["images"] == 13
    assert "These are not the test images of the run" in capsys.readouterr().out
    assert json.loads((here / "run/metrics.json").read_text())["images"] == 12


def test_a_share_of_class_folders(tmp_path, monkeypatch, capsys):
    """The run, its measurement and its resumption know the same test images, and notice
    when they change.
    """
    monkeypatch.chdir(tmp_path)
    pictures.write_folder(tmp_path / "all", images=8, size=(8, 8))
    (tmp_path / "all/train").rename("photos")
    options = words(OPTIONS, "--data.test 0.25 --data.holdout 4 --output run")
    train.main(["folder_small", *TINY, *options])
    assert runs.read_config(tmp_path / "run")["images"] == {"train": 8, "holdout": 4, "test": 4}
    run_evaluate("run")
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    assert metrics["images"] == 4
    assert "are not the run's" not in capsys.readouterr().out
    train.main(["--resume", "run"])

    another(tmp_path / "others")
    run_evaluate("run", "--data-dir", "others")  # which has test images of its own
    assert json.loads((tmp_path / "run/metrics-on-others.json").read_text())["images"] == 12
    assert "trained on some of them" not in capsys.readouterr().out
    for i in range(4):
        shutil.copy("photos/dog/0.png", f"photos/dog/added{i}.png")
    run_evaluate("run")
    assert "may have been trained on some of them (--data.test)" in capsys.readouterr().out
    assert json.loads((tmp_path / "run/metrics-on-photos.json").read_text())["images"] == 5
    assert json.loads((tmp_path / "run/metrics.json").read_text()) == metrics
    assert "4 test images, now 5" in error_of(capsys, train.main, ["--resume", "run"])
    message = error_of(
        capsys, train.main, ["folder_small", *words("--data.dir others --data.test 0.2")]
    )
    assert "but others/test holds test images already. Remove the option." in message


OTHER_CLASSES = "class 0 is 'cat' in the network and 'dog' in the data set"


@pytest.mark.parametrize(
    ("command", "function", "arguments"),
    [
        ("evaluate", run_evaluate, "run --data-dir wolves"),
        ("evaluate", run_evaluate, "run --data folder --data-dir wolves"),
        ("analyze", None, "run --data folder --data-dir wolves --quick"),
        ("export", None, "run --name n --precision bfloat16 --data-dir wolves"),
    ],
)
def test_classes_with_other_names(here, capsys, command, function, arguments):
    another(here / "wolves", classes=("dog", "wolf"))
    functions = {"analyze": analyze_command, "export": export}
    call = (function, *arguments.split())
    if function is None:
        call = (cli.main, command, functions[command], arguments.split())
    assert OTHER_CLASSES in error_of(capsys, *call)


def error_in_table(here, capsys) -> str | None:
    capsys.readouterr()
    cli.main("compare", compare.compare, ["run", "--output", "table"])
    heading, row = (here / "table/comparison.csv").read_text().splitlines()
    return dict(zip(heading.split(","), row.split(","), strict=True))["test_error"]


@pytest.mark.parametrize(
    "changes",
    [
        {"views": "flip"},
        {"data": "digits"},
        {"images": 13},
        {"per_class": {"dog": {}, "wolf": {}}},
        {"model": "run/checkpoints/best.keras"},
        {"hashes": {"model": "0" * 16}},
        {"hashes": {"test": "0" * 16}},
    ],
)
def test_other_measurements_are_not_used(measured, capsys, changes):
    """Older versions wrote some of these to metrics.json, and so does --output."""
    path = measured / "run/metrics.json"
    metrics = json.loads(path.read_text())
    found = error_in_table(measured, capsys)
    assert float(found) == pytest.approx(100 * metrics["error"])
    described = runs.read_config(measured / "run")
    assert measurements.of_run(measured / "run", described, measured / "run/model.keras") == metrics
    path.write_text(json.dumps(metrics | changes))
    assert error_in_table(measured, capsys) == ""
    assert measurements.of_run(measured / "run", described, measured / "run/model.keras") is None


def test_another_data_set_with_the_same_hash(here):
    """The hash of a data set of Hugging Face knows only the labels."""
    described = runs.read_config(here / "run")
    source = Data("folder", dir=here / "photos")
    images = load(source)
    assert measurements.are_of_run(images, source, described)
    assert not measurements.are_of_run(images, Data("hf:others"), described)


def test_a_run_of_an_older_version(here):
    """Without hashes, the options and the number of images decide."""
    described = runs.read_config(here / "run")
    del described["hashes"]
    disk.write_json(here / "run/config.json", described)
    another(here / "others")
    for options, name in (("", "metrics"), ("--data-dir others", "metrics-on-others")):
        run_evaluate("run", *options.split())
        assert (here / f"run/{name}.json").is_file()


def test_an_exported_model_is_of_a_run_too(here):
    cli.main("export", export, words("run --name pets"))
    another(here / "others")
    run_evaluate("saved_models/pets", "--data-dir", "photos")
    run_evaluate("saved_models/pets", "--data-dir", "others")
    written = [name for name in files(here / "evaluation-pets") if name.startswith("metrics")]
    assert written == ["metrics-on-others.json", "metrics.json"]


def test_the_data_sets_of_tests_have_hashes(run):
    """The hashes are those of the run's images; `run_train` has trained on digits."""
    hashes = runs.read_config(run)["hashes"]
    assert hashes.keys() == {"train", "holdout", "test"}
    assert hashes["holdout"] is None
    assert all(re.fullmatch("[0-9a-f]{16}", hashes[name]) for name in ("train", "test"))
    assert hashes["train"] != hashes["test"]
