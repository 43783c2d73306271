"""The data sets and the way of an image to the network, on real files."""

import time

import numpy as np
import pytest

from keras_preact.preprocessing import PREPROCESSING
from tests.training import images as pictures
from training.config import Data
from training.data import ImageData, Split, evaluation_batches, load, training_batches
from training.data.sources import _from_arrays


def arrays(split: Split):
    rows = list(split.open().as_numpy_iterator())
    return np.stack([image for image, _ in rows]), np.array([label for _, label in rows])


def image_data(images, labels, mean=(10.0, 20.0, 30.0)) -> ImageData:
    split = _from_arrays(images, labels)
    preprocessing = PREPROCESSING["cifar10"].__class__(mean=mean, std=(1.0, 1.0, 1.0), size=images.shape[1])
    return ImageData("test", ("a", "b"), images.shape[-1], images.shape[1], preprocessing, split, split)


def numbered(count: int, size: int = 4) -> ImageData:
    """Images whose pixels are all the image's number."""
    images = np.broadcast_to(np.arange(count, dtype="uint8")[:, None, None, None], (count, size, size, 3)).copy()
    return image_data(images, np.arange(count))


class TestDigits:
    def test_split_is_fixed_stratified_and_complete(self):
        from sklearn.datasets import load_digits

        data = load(Data("digits"))
        (train_x, train_y), (test_x, test_y) = arrays(data.train), arrays(data.test)
        assert (data.train.size, data.test.size) == (1437, 360)
        assert train_x.shape == (1437, 8, 8, 1)
        assert train_x.dtype == np.uint8
        share = np.bincount(test_y) / np.bincount(np.concatenate([train_y, test_y]))
        np.testing.assert_allclose(share, 360 / 1797, atol=0.005)
        # every image of the source is in exactly one split, its 17 grey levels spread over 0 to 255
        original = np.sort(load_digits().images.reshape(1797, 64), axis=0)
        ours = np.sort(np.concatenate([train_x, test_x]).reshape(1797, 64), axis=0)
        np.testing.assert_array_equal(ours, np.round(original * 255 / 16))
        np.testing.assert_array_equal(arrays(load(Data("digits")).test)[0], test_x)

    def test_holdout_comes_out_of_the_training_images(self):
        data, whole = load(Data("digits", holdout=100)), load(Data("digits"))
        assert (data.train.size, data.holdout.size, data.test.size) == (1337, 100, 360)
        np.testing.assert_array_equal(arrays(data.test)[0], arrays(whole.test)[0])
        parts = np.concatenate([arrays(data.train)[0], arrays(data.holdout)[0]])
        np.testing.assert_array_equal(np.sort(parts, axis=0), np.sort(arrays(whole.train)[0], axis=0))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    rng = np.random.default_rng(0)
    images = {split: rng.integers(0, 256, (n, 32, 32, 3), "uint8") for split, n in (("train", 30), ("test", 7))}
    labels = {split: np.arange(len(value)) % 10 for split, value in images.items()}
    folder = tmp_path_factory.mktemp("tfds")
    pictures.write_tfds("cifar10", folder, images, labels)
    return folder, images, labels


class TestTensorFlowDatasets:
    def test_reads_what_was_prepared(self, prepared):
        folder, images, labels = prepared
        data = load(Data("cifar10", dir=folder))
        for split in ("train", "test"):
            x, y = arrays(getattr(data, split))
            order = [int(np.flatnonzero((images[split] == image).all(axis=(1, 2, 3)))[0]) for image in x]
            assert sorted(order) == list(range(len(images[split])))
            np.testing.assert_array_equal(y, labels[split][order])
        assert (data.size, data.channels, len(data.classes)) == (32, 3, 10)

    def test_holdout(self, prepared):
        folder, images, _ = prepared
        data = load(Data("cifar10", dir=folder, holdout=5))
        parts = np.concatenate([arrays(data.train)[0], arrays(data.holdout)[0]])
        assert (data.train.size, data.holdout.size) == (25, 5)
        np.testing.assert_array_equal(np.sort(parts, axis=0), np.sort(images["train"], axis=0))
        with pytest.raises(ValueError, match=r"must leave some of the 30 training images. Received: 30"):
            load(Data("cifar10", dir=folder, holdout=30))

    def test_neither_prepared_nor_downloadable_ends_at_once(self, tmp_path, monkeypatch):
        def no_network(*_, **__):
            raise OSError("no network")

        monkeypatch.setattr("urllib.request.urlopen", no_network)
        start = time.monotonic()
        with pytest.raises(ValueError, match=r"cifar100 is not prepared") as error:
            load(Data("cifar100", dir=tmp_path))
        assert time.monotonic() - start < 60  # TensorFlow Datasets itself would retry for minutes
        for part in (str(tmp_path), "tfds.load('cifar100'", "--data.dir", "training.train digits", "no network"):
            assert part in str(error.value)
        assert not list(tmp_path.rglob("*.tfrecord*"))

    def test_manual_download_is_explained(self, tmp_path):
        with pytest.raises(ValueError, match=r"imagenet2012 is not prepared") as error:
            load(Data("imagenet2012", dir=tmp_path))
        assert str(tmp_path / "downloads" / "manual") in str(error.value)

    def test_real_cifar10_has_the_published_statistics(self):
        tfds = pytest.importorskip("tensorflow_datasets")
        if not tfds.builder("cifar10").is_prepared():
            pytest.skip("CIFAR-10 is not prepared in TensorFlow Datasets' data dir (TFDS_DATA_DIR)")
        data = load(Data("cifar10"))
        images, labels = arrays(data.train)
        np.testing.assert_allclose(images.mean(axis=(0, 1, 2)), data.preprocessing.mean, atol=0.1)
        np.testing.assert_allclose(images.std(axis=(0, 1, 2)), data.preprocessing.std, atol=0.1)
        np.testing.assert_array_equal(np.bincount(labels), [5000] * 10)


class TestFolder:
    def test_reads_classes_and_images(self, tmp_path):
        pictures.write_folder(tmp_path, classes=("cat", "dog", "emu"), images=4)
        data = load(Data("folder", dir=tmp_path, holdout=2))
        assert data.classes == ("cat", "dog", "emu")
        assert (data.train.size, data.holdout.size, data.test.size, data.size) == (10, 2, 12, None)
        for image, label in data.test.open().as_numpy_iterator():
            assert image.shape == (30, 40, 3)
            assert image.mean(axis=(0, 1)).argmax() == label  # the colour of its class

    def test_unreadable_image_is_named(self, tmp_path):
        pictures.write_folder(tmp_path)
        bad = tmp_path / "train" / "dog" / "broken.png"
        whole = (tmp_path / "train" / "dog" / "0.png").read_bytes()
        for content in (b"no image at all", whole[: len(whole) // 2]):
            bad.write_bytes(content)
            with pytest.raises(ValueError, match=r"Unreadable image .*train/dog/broken.png"):
                load(Data("folder", dir=tmp_path))

    def test_missing_folders(self, tmp_path):
        with pytest.raises(ValueError, match=r"train/CLASS/IMAGE and test/CLASS/IMAGE. Received: None"):
            load(Data("folder"))
        with pytest.raises(ValueError, match=r"train holds no images"):
            load(Data("folder", dir=tmp_path))


def test_unknown_data_set():
    with pytest.raises(ValueError, match=r"Did you mean 'cifar100' or 'cifar10'"):
        load(Data("cifar1000"))


class TestTrainingBatches:
    def test_every_epoch_is_another_permutation_and_follows_from_the_seed(self):
        def stream(seed):
            batches = training_batches(numbered(10), 4, "none", None, seed).take(5)
            return np.concatenate([labels for _, labels in batches.as_numpy_iterator()]).reshape(2, 10)

        first, second = stream(3)
        assert sorted(first) == sorted(second) == list(range(10))
        assert list(first) != list(second)
        np.testing.assert_array_equal(stream(3), [first, second])
        assert list(stream(4)[0]) != list(first)

    def test_pad_crop_flip_is_one_of_its_162_results_and_all_occur(self):
        rng = np.random.default_rng(0)
        image = rng.integers(0, 256, (1, 6, 6, 3), "uint8")
        data = image_data(np.repeat(image, 50, axis=0), np.arange(50))
        padded = np.empty((14, 14, 3), "float32")
        padded[:] = data.preprocessing.mean
        padded[4:10, 4:10] = image[0]
        crops = [padded[i : i + 6, j : j + 6] for i in range(9) for j in range(9)]
        candidates = np.stack(crops + [crop[:, ::-1] for crop in crops]).reshape(162, -1)
        batches = training_batches(data, 50, "pad_crop_flip", None, seed=0).take(60)
        outputs = np.concatenate([x for x, _ in batches.as_numpy_iterator()]).reshape(3000, -1)
        distance = np.abs(outputs[:, None] - candidates[None]).max(axis=2)
        assert distance.min(axis=1).max() < 1e-4
        counts = np.bincount(distance.argmin(axis=1), minlength=162)
        assert counts.min() > 0
        # uniform: chi-square with 161 degrees of freedom lies below 235 in 99.99 % of draws; the seed is fixed
        expected = 3000 / 162
        assert ((counts - expected) ** 2 / expected).sum() < 235

    def test_augmentation_follows_from_the_seed_and_differs_between_epochs(self):
        rng = np.random.default_rng(0)
        data = image_data(rng.integers(0, 256, (4, 8, 8, 3), "uint8"), np.arange(4))

        def epochs(seed):
            rows = training_batches(data, 4, "pad_crop_flip", None, seed).take(2).as_numpy_iterator()
            return np.stack([x[np.argsort(y)] for x, y in rows])

        first, second = epochs(0)
        assert not np.array_equal(first, second)
        np.testing.assert_array_equal(epochs(0), [first, second])
        assert not np.array_equal(epochs(1)[0], first)

    def test_resized_crop_flip_has_the_size_and_only_pixels_of_the_image(self, tmp_path):
        pictures.write_folder(tmp_path)
        data = load(Data("folder", dir=tmp_path))
        batch, labels = next(training_batches(data, 8, "resized_crop_flip", 16, seed=0).as_numpy_iterator())
        assert batch.shape == (8, 16, 16, 3)
        assert batch.min() >= 0
        assert batch.max() <= 250
        np.testing.assert_array_equal(batch.mean(axis=(1, 2)).argmax(axis=1), labels)
        assert np.ptp(batch.std(axis=(1, 2, 3))) > 0

    def test_bad_arguments(self, tmp_path):
        with pytest.raises(ValueError, match=r"must be 1 to 10, the training images. Received: batch_size=11"):
            training_batches(numbered(10), 11, "none", None, 0)
        with pytest.raises(ValueError, match=r"Did you mean .*'pad_crop_flip'"):
            training_batches(numbered(10), 4, "crop_flip", None, 0)
        pictures.write_folder(tmp_path)
        with pytest.raises(ValueError, match=r"use 'resized_crop_flip'"):
            training_batches(load(Data("folder", dir=tmp_path)), 4, "pad_crop_flip", None, 0)


class TestEvaluationBatches:
    def test_every_image_once_in_order_untouched(self):
        data = numbered(10)
        batches = list(evaluation_batches(data, data.test, 4, None).as_numpy_iterator())
        assert [len(x) for x, _ in batches] == [4, 4, 2]
        np.testing.assert_array_equal(np.concatenate([x for x, _ in batches])[:, 0, 0, 0], np.arange(10, dtype="float32"))

    def test_resizes_the_shorter_side_and_cuts_out_the_centre(self, tmp_path):
        # 80 x 40 with a bright middle: scaled to 37 x 18 (256 / 224 of 16), the middle 16 x 16 is all bright
        for split in ("train", "test"):
            for name in ("a", "b"):
                (tmp_path / split / name).mkdir(parents=True)
                pixels = np.zeros((40, 80, 3), "uint8")
                pixels[:, 18:62] = 200
                pictures.Image.fromarray(pixels).save(tmp_path / split / name / "0.png")
        data = load(Data("folder", dir=tmp_path))
        batch, _ = next(evaluation_batches(data, data.test, 2, 16).as_numpy_iterator())
        assert batch.shape == (2, 16, 16, 3)
        np.testing.assert_allclose(batch, 200, atol=1)
