"""Whatever measures some of the images takes them from the whole split: the first images of a
folder, and of many arrays, have all the same class.
"""

import collections
import dataclasses

import numpy as np
import pytest
from PIL import Image

from tests.training import images as pictures
from training.commands import train
from training.commands.analyze.specimen import open_specimen
from training.commands.evaluate.__main__ import _save_samples
from training.config import Config, Data, Model
from training.data import load, sample
from training.directory.checkpoints import Checkpoints
from training.errors import UserError
from training.run import run as runs
from training.run.fit import Fit

CLASSES, EACH = 10, 400
LABELS = np.repeat(np.arange(CLASSES), EACH)
#: Every pixel is ten times the class, plus noise that makes the images differ.
IMAGES = (10 * LABELS[:, None, None, None] + np.arange(64).reshape(8, 8, 1) % 7).astype("uint8")


@pytest.fixture(scope="module")
def in_arrays(tmp_path_factory) -> Data:
    """Arrays that are sorted by class."""
    path = tmp_path_factory.mktemp("sorted") / "sorted.npz"
    np.savez(path, x_train=IMAGES, y_train=LABELS, x_test=IMAGES, y_test=LABELS)
    return Data("npz", dir=path)


@pytest.fixture(scope="module")
def in_a_folder(tmp_path_factory) -> Data:
    folder = tmp_path_factory.mktemp("photos")
    for i in range(0, len(LABELS), 20):
        path = folder / "train" / f"{LABELS[i]}" / f"{i:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.roll(IMAGES[i, ..., 0], i // 20)).save(path)
    (folder / "test").symlink_to(folder / "train")
    return Data("folder", dir=folder, size=8)


@pytest.fixture(scope="module")
def in_records(tmp_path_factory) -> Data:
    """Records in several files that were not shuffled."""
    folder = tmp_path_factory.mktemp("records")
    larger = np.tile(IMAGES, (1, 4, 4, 1))[:, :28, :28]
    pixels, labels = ({name: each for name in ("train", "test")} for each in (larger, LABELS))
    pictures.write_tfds("mnist", folder, pixels, labels, shards=3, shuffled=False)
    return Data("tfds:mnist", dir=folder)


@pytest.mark.parametrize("kind", ["in_arrays", "in_a_folder", "in_records"])
def test_a_sample_has_images_of_all_classes(kind, request):
    data = load(request.getfixturevalue(kind))
    images, labels = sample(data, data.train, 80, 8)
    assert set(labels.tolist()) == set(range(CLASSES))
    np.testing.assert_array_equal(images.min(axis=(1, 2, 3)) // 10, labels)
    whole, _ = sample(data, data.train, 10_000, 8)  # each image once, in the same order
    assert len(whole) == data.train.size
    np.testing.assert_array_equal(whole[:80], images)


def test_a_sample_of_records_is_from_its_split(in_records):
    data = load(dataclasses.replace(in_records, holdout=EACH))
    [note] = data.notes
    assert "without shuffling: its last 400 training images" in note
    for split, classes in ((data.train, range(CLASSES - 1)), (data.holdout, [CLASSES - 1])):
        _, labels = sample(data, split, 100, 8)
        assert set(labels.tolist()) == set(classes)
    assert load(in_records).notes == ()


def test_a_damaged_file_of_records(tmp_path):
    images = {"train": np.zeros((4, 28, 28, 1), "uint8"), "test": np.zeros((1, 28, 28, 1), "uint8")}
    labels = {name: np.zeros(len(each), int) for name, each in images.items()}
    pictures.write_tfds("mnist", tmp_path, images, labels)
    data = load(Data("tfds:mnist", dir=tmp_path))
    [file] = tmp_path.rglob("*train*")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(UserError, match=r"tfrecord.* is damaged: prepare the data set again"):
        sample(data, data.train, 4, 28)


def of_the_health(data, folder, monkeypatch):
    """Return the images that TrainingHealth measures in a run."""
    config = Config(model=Model("digits_resnet8_preact", width_factor=0.25), data=data)
    with train.started(config, "digits") as run:
        fit = Fit(run, folder, Checkpoints(folder / "checkpoints"), None, [], None)
        fit.progress.close()
        return fit.health.sample


def of_the_whitening(data, folder, monkeypatch):
    """Return the images from which a run computes its stem."""
    found = []
    monkeypatch.setattr(runs, "ADAPTED_IMAGES", 32)
    monkeypatch.setattr(
        "keras_preact.models.ResidualNetwork.adapt", lambda self, images: found.append(images)
    )
    config = Config(model=Model("cifar_fast_resnet8", width_factor=0.25), data=data)
    with train.started(config, "digits"):
        return found[0]


def of_the_analyses(data, folder, monkeypatch):
    """Return the images of `keras-preact analyze` and `audit`, as pixels."""
    opened = open_specimen("digits_resnet8_preact", "final", data, 32, 0)
    preprocessing = load(data).preprocessing
    return opened.x * preprocessing.std + preprocessing.mean


@pytest.mark.parametrize("measured", [of_the_health, of_the_whitening, of_the_analyses])
def test_what_is_measured_has_images_of_most_classes(in_arrays, tmp_path, monkeypatch, measured):
    images = measured(in_arrays, tmp_path, monkeypatch)
    assert len(images) == 32
    assert len(set((images.mean(axis=(1, 2, 3)) // 10).tolist())) >= CLASSES - 2


@pytest.mark.parametrize("count", [10, 25])
def test_saved_samples_are_one_of_each_class_in_turn(in_arrays, tmp_path, count):
    assert _save_samples(load(in_arrays), tmp_path, count) == count
    written = collections.Counter()
    for path in tmp_path.iterdir():
        rank, label = map(int, path.stem.split("_"))
        with Image.open(path) as image:
            np.testing.assert_array_equal(image, IMAGES[label * EACH + rank, ..., 0])
        written[rank] += 1
    assert written == {rank: min(10, count - 10 * rank) for rank in range(-(-count // 10))}
