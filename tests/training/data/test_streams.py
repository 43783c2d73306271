"""Training streams: a batch depends only on seed and step, not on where a run starts or on
how many processes share it.
"""

import itertools
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

from tests.training import images as pictures
from training.config import Data
from training.data import image_data, images, load, training_stream
from training.data.pipelines import AUGMENTATIONS
from training.data.readers import Files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("folder")
    pictures.write_folder(path, classes=("cat", "dog", "emu"), images=7)
    return load(Data("folder", dir=path))


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Images in three shards; the label is the image's number."""
    path = tmp_path_factory.mktemp("tfds")
    images = np.random.default_rng(0).integers(0, 256, (47, 32, 32, 3), "uint8")
    labels = {"train": np.arange(47), "test": np.arange(7)}
    pictures.write_tfds("cifar100", path, {"train": images, "test": images[:7]}, labels, shards=3)
    return path


#: Name to augmentation and size of a stream.
STREAMS = {
    "pad_crop_flip": ("pad_crop_flip", None),
    "padded and resized": ("pad_crop_flip", 5),
    "resized": ("resized_crop_flip", 5),
    "files": ("resized_crop_flip", 16),
    "padded files": ("pad_crop_flip", 16),
    "records": ("resized_crop_flip", 16),
    "padded records": ("pad_crop_flip", None),
    "fake": ("none", None),
    "mixed": ("pad_crop_flip", None),
    "mixed files": ("resized_crop_flip", 16),
}


@pytest.fixture(params=STREAMS)
def data_set(request, folder, records, monkeypatch):
    """A data set and the arguments of a stream; mixed streams have RandAugment, mixup and
    CutMix.
    """
    options = {}
    if "mixed" in request.param:
        options = {"rand_augment": (2, 9), "mixup": 0.2, "cutmix": 1.0}
    if "files" in request.param:
        data = folder
    elif "records" in request.param:
        monkeypatch.setattr(image_data, "CACHE_BYTES", 0)
        data = load(Data("cifar100", dir=records))
    elif request.param == "fake":
        data = load(Data("fake", size=8))
    else:
        images = np.random.default_rng(1).integers(0, 256, (23, 8, 8, 3), "uint8")
        data = pictures.in_memory(images, np.arange(23) % 3, classes=3)
    return data, STREAMS[request.param], options


def stream(data_set, seed=3):
    data, (augmentation, size), options = data_set
    return training_stream(data, 6, augmentation, size, seed, **options)


@pytest.fixture(scope="module")
def kept():
    return {}


@pytest.fixture
def whole(data_set, request, kept):
    """The first 11 batches of the stream of a data set; tests must not change them."""
    name = request.node.callspec.params["data_set"]
    if name not in kept:
        kept[name] = pictures.batches(stream(data_set), 11)
    return kept[name]


def test_a_later_start_gives_the_same_batches(data_set, whole):
    for start in (1, 3, 10):  # within an epoch, at a batch from two epochs, and after it
        pictures.assert_same(pictures.batches(stream(data_set), 11 - start, start), whole[start:])


@pytest.mark.parametrize("strided", [False, True])
def test_the_rows_of_all_processes_are_the_batch(data_set, whole, strided):
    whole = whole[2:8]
    if strided:
        odd = pictures.batches(stream(data_set), 6, 2, slice(1, None, 2))
        return pictures.assert_same(odd, [(pixels[1::2], labels[1::2]) for pixels, labels in whole])
    rows = [slice(*cut) for cut in itertools.pairwise((0, 1, 2, 5, 6))]
    parts = [pictures.batches(stream(data_set), 6, 2, part) for part in rows]
    joined = [
        tuple(map(np.concatenate, zip(*step, strict=True))) for step in zip(*parts, strict=True)
    ]
    pictures.assert_same(joined, whole)


def test_follows_from_the_seed_alone(data_set, whole):
    first = whole[:5]
    keras.utils.set_random_seed(77)
    pictures.assert_same(pictures.batches(stream(data_set), 5), first)
    other = pictures.batches(stream(data_set, seed=4), 5)
    assert not any(np.array_equal(a, b) for (a, _), (b, _) in zip(first, other, strict=True))


def test_labels_are_what_jax_takes_as_they_are(data_set):
    """JAX warns for int64."""
    data, _, options = data_set
    _, labels = stream(data_set).dataset().element_spec
    assert labels.dtype == ("float32" if options else "int32")
    for split in (data.train, data.test):
        assert split.open().element_spec[1].dtype == "int32"


class TestEpochs:
    def labels(self, data, seed, augmentation="none", size=None, epochs=3):
        """Return the labels of some epochs, one row per epoch."""
        taken = -(-epochs * data.train.size // 6)
        drawn = pictures.batches(training_stream(data, 6, augmentation, size, seed), taken)
        return np.concatenate([labels for _, labels in drawn])[: epochs * data.train.size].reshape(
            epochs, -1
        )

    def check(self, of_seed, want):
        epochs = of_seed(3)
        for epoch in epochs:
            np.testing.assert_array_equal(np.sort(epoch), want)
        orders = [tuple(epoch) for epoch in (*epochs, *of_seed(4))]
        assert len(set(orders)) == len(orders)

    def test_images_in_memory(self):
        data = pictures.numbered(20)
        self.check(lambda seed: self.labels(data, seed), np.arange(20))
        # images and labels go together
        for pixels, labels in pictures.batches(training_stream(data, 6, "none", None, 0), 4):
            np.testing.assert_array_equal(pixels[:, 0, 0, 0], labels)

    @pytest.mark.parametrize("buffer", [10_000, 8])
    def test_records(self, records, monkeypatch, buffer):
        """A small buffer mixes too, because records of several shards are read in turn."""
        monkeypatch.setattr(image_data, "CACHE_BYTES", 0)
        monkeypatch.setattr("training.data.readers.SHUFFLE_BUFFER", buffer)
        data = load(Data("cifar100", dir=records, holdout=5))
        left = np.setdiff1d(
            np.arange(47), [label for _, label in data.holdout.open().as_numpy_iterator()]
        )
        self.check(lambda seed: self.labels(data, seed, size=8), left)


class TestResizedCrop:
    def test_area_aspect_and_flip(self, tmp_path):
        """Red is the column and green is the row, so that the slopes of an output show the
        crop's width and height.
        """
        columns, rows = np.meshgrid(np.arange(200), np.arange(200))
        pixels = np.stack([columns, rows, np.zeros_like(rows)], axis=-1).astype("uint8")
        data = pictures.in_memory(np.tile(pixels, (4, 1, 1, 1)))
        drawn = pictures.batches(training_stream(data, 4, "resized_crop_flip", 20, seed=0), 75)
        out = np.concatenate([batch for batch, _ in drawn])
        across = (out[:, 5:15, 14, 0] - out[:, 5:15, 5, 0]).mean(axis=1) / 9 * 20
        down = (out[:, 14, 5:15, 1] - out[:, 5, 5:15, 1]).mean(axis=1) / 9 * 20
        width, height = np.abs(across), down
        share = width * height / 200**2
        assert share.min() > 0.07
        assert share.min() < 0.12
        assert share.max() > 0.9
        aspect = width / height
        assert aspect.min() > 0.72
        assert aspect.max() < 1.39
        assert aspect.min() < 0.8
        assert aspect.max() > 1.25
        assert 115 < (across < 0).sum() < 185  # half of 300, within four deviations
        assert np.unique(out[:, 10, 10, 0]).size > 100

    def test_a_jpeg_gives_what_the_same_pixels_give(self, tmp_path):
        """Little more than the crop is decoded from a JPEG, but all of a PNG."""
        import tensorflow as tf

        random = np.random.default_rng(0)
        for split in ("train", "test"):
            for i in range(6):
                jpeg, png = (tmp_path / name / split / "ab"[i % 2] for name in ("jpeg", "png"))
                jpeg.mkdir(parents=True, exist_ok=True)
                png.mkdir(parents=True, exist_ok=True)
                smooth = random.integers(0, 256, (7, 9, 3), "uint8")
                image = Image.fromarray(smooth).resize((90 + i, 71 + i), Image.Resampling.BICUBIC)
                image.save(jpeg / f"{i}.jpg", quality=80, subsampling=i % 3)
                pixels = tf.io.decode_jpeg((jpeg / f"{i}.jpg").read_bytes()).numpy()
                Image.fromarray(pixels).save(png / f"{i}.png")
        of = [load(Data("folder", dir=tmp_path / name)) for name in ("jpeg", "png")]
        ours, theirs = (
            pictures.batches(training_stream(data, 6, "resized_crop_flip", 24, 0), 12)
            for data in of
        )
        pictures.assert_same(ours, theirs)

    @pytest.mark.parametrize(("height", "width"), [(500, 611), (803, 602)])
    @pytest.mark.parametrize(("size", "largest"), [(10, 8), (23, 8), (40, 4), (90, 2)])
    def test_a_crop_of_a_large_jpeg_is_at_the_same_place(
        self, height, width, size, largest, monkeypatch
    ):
        """It is decoded at the smallest scale that has twice the pixels that are needed. Red is
        the column and green the row: a level is two or three of their pixels.
        """
        import tensorflow as tf

        rows, columns = np.mgrid[0 : 255 : height * 1j, 0 : 255 : width * 1j]
        pixels = np.stack([columns, rows, np.full_like(rows, 128)], -1).round().astype("uint8")
        file = tf.io.encode_jpeg(pixels, quality=100, chroma_downsampling=False).numpy()
        data = pictures.in_memory(np.zeros((1, 8, 8, 3), "uint8"))
        reader = Files([Path("it.jpg")], [0], Path())
        scales = []
        decode = tf.image.decode_and_crop_jpeg

        def spy(*arguments, ratio):
            scales.append(ratio)
            return decode(*arguments, ratio=ratio)

        monkeypatch.setattr(tf.image, "decode_and_crop_jpeg", spy)
        away = []
        for seed in range(40):
            seeds = tf.constant([[seed, 1], [seed, 2]])
            ours, exact = (
                images.resized_crop_flip(of, image, seeds, data, size).numpy()
                for of, image in ((reader, tf.constant(file)), (data.train, pixels))
            )
            away.append(ours - exact)
        assert max(scales) == largest
        # half a pixel of the scale at either end, and the rounding of colours
        assert np.abs(away).max() < 255 * largest / 2 / min(height, width) + 4
        assert np.abs(np.mean(away, axis=(0, 1, 2))).max() < 2


def test_fake_data_is_one_random_batch_again_and_again():
    data = load(Data("fake", size=8, holdout=100))
    assert (data.size, data.train.size, data.holdout.size) == (8, 49_900, 100)
    drawn = pictures.batches(training_stream(data, 12, "pad_crop_flip", 8, 0), 3)
    pictures.assert_same(drawn[1:], [drawn[0]] * 2)
    pixels, labels = drawn[0]
    assert pixels.shape == (12, 8, 8, 3)
    assert len(np.unique(pixels)) > 200
    assert set(labels) <= set(range(10))


NUMBERED = pictures.numbered(10)


def numbered(batch_size=4, augmentation="none", size=None, seed=0, **options):
    return training_stream(NUMBERED, batch_size, augmentation, size, seed, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: numbered(0), "--batch-size.* must be 1 to 10.* Received: 0"),
        (lambda: numbered(11), "--batch-size.* must be 1 to 10.* Received: 11"),
        (lambda: numbered().dataset(-1), "`start` must not be negative"),
        (lambda: numbered().dataset(rows=slice(4, 8)), "some of the 4 images of a batch"),
        (
            lambda: numbered(augmentation="pad_crop_flip", size=8, flip="alternating"),
            "--data.flip alternating is for images in memory that keep their size. Use",
        ),
        (lambda: numbered(1, cutmix=1.0), "need at least 2 images in a batch.*1 image"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_images_of_several_sizes_need_a_size(folder):
    for augmentation in AUGMENTATIONS:
        with pytest.raises(ValueError, match=r"differ in size: choose one with --data\.size"):
            training_stream(folder, 4, augmentation, None, 0)
