"""Data sets with validation images beside their test images: with `--data.holdout` these are
held out, and without it a run says that they are not used.
"""

import numpy as np
import pytest
from PIL import Image

from tests.training import images as pictures
from training.config import Data
from training.data import load

#: Split to the value of all its pixels, and to its number of images.
SPLITS = {"train": (50, 12), "test": (150, 8), "val": (250, 4)}
#: Their names in TensorFlow Datasets and Hugging Face.
LONG = {"train": "train", "test": "test", "val": "validation"}


def split(name: str) -> tuple[np.ndarray, np.ndarray]:
    value, count = SPLITS[name]
    return np.full((count, 8, 8, 3), value, "uint8"), np.arange(count) % 2


def folder(path) -> Data:
    for name in SPLITS:
        for i, (image, label) in enumerate(zip(*split(name), strict=True)):
            file = path / name / "ab"[label] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
    return Data("folder", dir=path, size=8)


def npz(images: str, labels: str):
    def write(path) -> Data:
        arrays = {}
        for name in SPLITS:
            arrays[images.format(name)], arrays[labels.format(name)] = split(name)
        np.savez(path / "a.npz", **arrays)
        return Data("npz", dir=path / "a.npz")

    return write


def tfds(path) -> Data:
    images, labels = {}, {}
    for name in SPLITS:
        pixels, labels[LONG[name]] = split(name)
        images[LONG[name]] = np.resize(pixels, (len(pixels), 32, 32, 3))  # one value
    pictures.write_tfds("cifar10", path, images, labels)
    return Data("tfds:cifar10", dir=path)


def hugging_face(path) -> Data:
    import datasets

    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    (path / "data").mkdir()
    for name in SPLITS:
        images, labels = split(name)
        table = datasets.Dataset.from_dict(
            {"image": list(images), "label": labels}, datasets.Features(features)
        )
        table.to_parquet(path / "data" / f"{LONG[name]}-00000-of-00001.parquet")
    return Data(f"hf:{path / 'data'}", dir=path / "cache")


KINDS = {
    "folder": folder,
    "arrays as of Keras": npz("x_{}", "y_{}"),
    "arrays as of MedMNIST": npz("{}_images", "{}_labels"),
    "TensorFlow Datasets": tfds,
    "Hugging Face": hugging_face,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("holdout", [0, 0.1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_validation_images_are_held_out_or_named(kind, holdout, tmp_path):
    source = KINDS[kind](tmp_path)
    data = load(Data(source.name, dir=source.dir, size=source.size, holdout=holdout))
    expected = {"train": data.train, "test": data.test}
    if holdout:
        expected["val"] = data.holdout
    else:
        assert data.holdout is None
    for name, reader in expected.items():
        images, labels = pictures.arrays(reader)
        value, count = SPLITS[name]
        assert (len(images), set(images.flat)) == (count, {value})
        np.testing.assert_array_equal(np.sort(labels), np.sort(np.arange(count) % 2))
    [origin] = data.origins
    assert origin.startswith("Held-out images: " if holdout else "Not used: ")
    assert "val" in origin


#: The version of a data set of TensorFlow Datasets stands for its images.
WITHOUT_VERSION = [kind for kind in KINDS if kind != "TensorFlow Datasets"]


@pytest.mark.parametrize("kind", WITHOUT_VERSION)
def test_other_images_with_the_same_labels_have_another_hash(kind, tmp_path, monkeypatch):
    hashes = []
    for change in (0, 1):
        for name, (value, count) in SPLITS.items():
            monkeypatch.setitem(SPLITS, name, (value + change, count))
        path = tmp_path / str(change)
        path.mkdir()
        source = KINDS[kind](path)
        data = load(Data(source.name, dir=source.dir, size=source.size, holdout=1))
        assert data.holdout is not None
        hashes.append([split.hash for split in (data.train, data.test, data.holdout)])
    assert not set(hashes[0]) & set(hashes[1])
