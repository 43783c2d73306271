"""The data sets, and how an image gets to the network, with real files."""

import dataclasses
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.training import images as pictures
from tests.training.images import arrays
from training.config import Data
from training.data import Reader, evaluation_batches, load
from training.errors import UserError


def assert_parts(data, train: Reader) -> None:
    """Check that the training and the held-out images together are the images of `train`."""
    parts = np.concatenate([arrays(data.train)[0], arrays(data.holdout)[0]])
    np.testing.assert_array_equal(np.sort(parts, axis=0), np.sort(arrays(train)[0], axis=0))


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
        assert (data.train.size, data.holdout.size) == (1337, 100)
        np.testing.assert_array_equal(arrays(data.test)[0], arrays(whole.test)[0])
        assert_parts(data, whole.train)


class TestTensorFlowDatasets:
    def test_reads_what_was_prepared(self, tmp_path):
        pixels = np.random.default_rng(0).integers(0, 256, (37, 32, 32, 3), "uint8")
        images = {"train": pixels[:30], "test": pixels[30:]}
        labels = {split: np.arange(len(value)) % 10 for split, value in images.items()}
        pictures.write_tfds("cifar10", tmp_path, images, labels)
        data = load(Data("cifar10", dir=tmp_path))
        for split in ("train", "test"):
            x, y = arrays(getattr(data, split))
            order = [np.flatnonzero((images[split] == row).all(axis=(1, 2, 3)))[0] for row in x]
            assert sorted(order) == list(range(len(images[split])))
            np.testing.assert_array_equal(y, labels[split][order])
        assert (data.size, data.channels, len(data.classes)) == (32, 3, 10)
        for ours, of in ((data.preprocessing.mean, np.mean), (data.preprocessing.std, np.std)):
            theirs = of(images["train"], axis=(0, 1, 2), dtype="float64")
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
        held = load(Data("cifar10", dir=tmp_path, holdout=5))
        assert (held.train.size, held.holdout.size) == (25, 5)
        assert_parts(held, data.train)

    def test_neither_prepared_nor_downloadable(self, tmp_path, monkeypatch):
        """It tries the network once; TensorFlow Datasets would retry for minutes."""
        asked = []

        def no_network(request, **_):
            asked.append(request.full_url)
            raise OSError("no network")

        monkeypatch.setattr("urllib.request.urlopen", no_network)
        for name, word in (("cifar100", "no network"), ("imagenet2012", "downloads/manual")):
            with pytest.raises(UserError, match=f"{name} is not prepared.*--data.dir.*{word}"):
                load(Data(name, dir=tmp_path))
        assert len(asked) == 1

    def test_any_data_set_of_images_with_classes(self, tmp_path):
        pixels = np.random.default_rng(0).integers(0, 256, (9, 28, 28, 1), "uint8")
        labels = np.arange(9) % 4
        parts = {"train": slice(0, 6), "test": slice(6, 9)}
        pictures.write_tfds(
            "mnist",
            tmp_path,
            *({split: each[part] for split, part in parts.items()} for each in (pixels, labels)),
        )
        data = load(Data("tfds:mnist", dir=tmp_path))
        assert (data.name, data.size, data.channels) == ("tfds:mnist", 28, 1)
        np.testing.assert_array_equal(np.sort(data.train.all_labels()), [0, 0, 1, 1, 2, 3])
        assert data.class_weights == {0: 0.75, 1: 0.75, 2: 1.5, 3: 1.5} | {
            i: 1.5 for i in range(4, 10)
        }
        assert data.preprocessing.mean == pytest.approx((pixels[:6].mean(),), abs=1e-4)
        with pytest.raises(UserError, match="has no data set mnits"):
            load(Data("tfds:mnits", dir=tmp_path))


class TestArrays:
    IMAGES = np.random.default_rng(1).integers(0, 256, (12, 6, 6, 3), "uint8")
    LABELS = np.array([0, 1, 1, 1] * 3)

    def write(self, tmp_path, **changes):
        arrays = {
            "x_train": self.IMAGES[:8],
            "y_train": self.LABELS[:8],
            "x_test": self.IMAGES[8:],
            "y_test": self.LABELS[8:],
        } | changes
        np.savez(tmp_path / "a.npz", **{k: v for k, v in arrays.items() if v is not None})
        return tmp_path / "a.npz"

    def test_as_keras_has_them(self, tmp_path):
        data = load(Data("npz", dir=self.write(tmp_path), holdout=4))
        assert (data.classes, data.size, data.channels) == (("0", "1"), 6, 3)
        np.testing.assert_array_equal(arrays(data.test)[0], self.IMAGES[8:])
        np.testing.assert_array_equal(np.sort(arrays(data.holdout)[1]), [0, 1, 1, 1])
        assert_parts(data, load(Data("npz", dir=tmp_path / "a.npz")).train)
        # three of four images have class 1
        assert data.class_weights == pytest.approx({0: 2.0, 1: 2 / 3})

    def test_as_medmnist_has_them(self, tmp_path):
        np.savez(
            tmp_path / "a.npz",
            train_images=self.IMAGES[:8, ..., 0],
            train_labels=self.LABELS[:8, None],
            val_images=self.IMAGES[:1, ..., 0],
            val_labels=self.LABELS[:1, None],
            test_images=self.IMAGES[8:, ..., 0],
            test_labels=self.LABELS[8:, None],
        )
        data = load(Data("npz", dir=tmp_path / "a.npz"))
        assert (data.train.size, data.test.size, data.channels) == (8, 4, 1)
        np.testing.assert_array_equal(arrays(data.train)[0], self.IMAGES[:8, ..., :1])

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"x_test": None}, "must hold the arrays x_train y_train x_test y_test or"),
            ({"x_train": IMAGES[:8] / 255}, "x_train must be square uint8.* Received: float64"),
            ({"x_train": IMAGES[:8, :5]}, r"x_train must be square uint8.*\(8, 5, 6, 3\)"),
            ({"x_test": IMAGES[8:, :5, :5]}, "x_test must be square uint8"),
            ({"y_test": LABELS[:3]}, r"labels int64 \(3,\)"),
            ({"y_train": LABELS[:8] / 2}, "labels float64"),
            ({"y_test": LABELS[8:] + 1}, "Received: 0 to 1, for test 1 to 2"),
            ({"y_train": LABELS[:8] - 1}, "Received: -1 to 0"),
            (
                {"y_train": np.eye(2)[LABELS[:8]]},
                r"one class number each.* float64 \(8, 2\)",
            ),
            (
                {"y_test": LABELS[8:].reshape(2, 2)},
                r"one class number each.* int64 \(2, 2\)",
            ),
            ({"x_train": IMAGES[:0], "y_train": LABELS[:0]}, r"one or more.*\(0, 6, 6, 3\)"),
            ({"x_test": IMAGES[:0], "y_test": LABELS[:0]}, r"x_test must be .*\(0, 6, 6, 3\)"),
            ({"y_train": 0 * LABELS[:8], "y_test": 0 * LABELS[8:]}, "a.npz has one class, 0: "),
        ],
    )
    def test_arrays_that_are_not_images(self, tmp_path, changes, words):
        with pytest.raises(UserError, match=words):
            load(Data("npz", dir=self.write(tmp_path, **changes)))

    def test_other_files(self, tmp_path):
        with pytest.raises(UserError, match=r"must name an existing .npz file. Received: nothing"):
            load(Data("npz"))
        (tmp_path / "b.npz").write_text("text")
        with pytest.raises(UserError, match="is not a file of np"):
            load(Data("npz", dir=tmp_path / "b.npz"))


class TestFunction:
    """Data that a user's function returns; it is in a file in the working directory."""

    @pytest.fixture(autouse=True)
    def module(self, tmp_path, monkeypatch):
        module = types.ModuleType("my_data")
        monkeypatch.setitem(sys.modules, "my_data", module)
        monkeypatch.setattr(sys, "path", list(sys.path))
        return module

    IMAGES, LABELS = TestArrays.IMAGES, TestArrays.LABELS

    def test_as_keras_returns_them(self, module):
        pairs = (self.IMAGES[:8, ..., 0], self.LABELS[:8, None]), (self.IMAGES[8:, ..., 0], [0] * 4)
        module.load_data = lambda: pairs
        data = load(Data("my_data:load_data", holdout=4))
        assert (data.name, data.classes) == ("my_data:load_data", ("0", "1"))
        assert (data.size, data.channels, data.test.size) == (6, 1, 4)
        np.testing.assert_array_equal(np.sort(arrays(data.holdout)[1]), [0, 1, 1, 1])
        module.named = lambda: (*pairs, ("cat", "dog", "emu"))
        assert load(Data("my_data:named")).classes == ("cat", "dog", "emu")

    def test_what_yields_images_with_labels(self, module):
        rows = list(zip(self.IMAGES, self.LABELS, strict=True))
        stream = tf.data.Dataset.from_tensor_slices((self.IMAGES, self.LABELS))
        module.load_data = lambda: (stream.take(8), iter(rows[8:]))
        data = load(Data("my_data:load_data"))
        for split, part in ((data.train, slice(8)), (data.test, slice(8, None))):
            images, labels = arrays(split)
            np.testing.assert_array_equal(images, self.IMAGES[part])
            np.testing.assert_array_equal(labels, self.LABELS[part])

    def test_a_function_of_a_file(self, tmp_path, monkeypatch):
        (tmp_path / "data_of_a_test.py").write_text("def nothing(): return None\n")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UserError, match=r"must return \(x_train.* Received: None"):
            load(Data("data_of_a_test:nothing"))

    @pytest.mark.parametrize(
        ("returned", "words"),
        [
            (((IMAGES, LABELS),) * 4, "may add class names"),
            (((IMAGES / 255, LABELS),) * 2, "training split of my_data:f must be square .*float64"),
            (((IMAGES, LABELS), (IMAGES[:, :5, :5], LABELS)), "The test split.*5, 5, 3"),
            (((IMAGES, LABELS), (IMAGES, LABELS), ["cat"]), "from 0 to 0. Received: 0 to 1"),
            (((IMAGES, LABELS), []), "must return pairs of images and labels"),
            (((IMAGES, LABELS), 3), "must return pairs of images and labels"),
            ((zip([IMAGES[0], IMAGES[1, 1:]], "ab", strict=True), []), "pairs of images"),
        ],
    )
    def test_something_else(self, module, returned, words):
        module.f = lambda: returned
        with pytest.raises(UserError, match=words):
            load(Data("my_data:f"))

    def test_no_function(self):
        with pytest.raises(UserError, match=r"data.name must be MODULE:NAME, such as my_d"):
            load(Data("my_data:none"))


class TestHuggingFace:
    """Local folders of Parquet files. The same function loads a data set from the Hub."""

    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)

    def write(self, folder, images, labels, test="test", **columns):
        """Write images, and classes in the columns `coarse` and `fine`, as the training and as
        the test split.
        """
        import datasets

        classes = datasets.ClassLabel(names=["cat", "dog", "emu"])
        features = {"id": datasets.Value("int64"), "picture": datasets.Image(), "fine": classes}
        values = {"id": range(len(labels)), "picture": images, "fine": labels}
        values |= {name: labels for name in columns}
        table = datasets.Dataset.from_dict(values, datasets.Features(features | columns))
        folder.mkdir()
        for name in ("train", test):
            table.to_parquet(folder / f"{name}-00000-of-00001.parquet")
        return Data(f"hf:{folder}", dir=folder / "cache")

    def load(self, data: Data, **changes):
        return load(dataclasses.replace(data, **changes))

    @pytest.mark.parametrize("channels", [1, 3])
    def test_images_of_one_size(self, tmp_path, channels):
        pixels = np.random.default_rng(0).integers(0, 256, (12, 5, 5, channels), "uint8")
        labels = np.arange(12) % 3
        given = self.write(tmp_path / "a", [image.squeeze() for image in pixels], labels)
        data = load(given)
        assert (data.size, data.channels, data.notes) == (5, channels, ())
        assert data.classes == ("cat", "dog", "emu")
        for split in (data.train, data.test):
            np.testing.assert_array_equal(arrays(split)[0], pixels)
            np.testing.assert_array_equal(arrays(split)[1], labels)
        assert data.preprocessing.mean == pytest.approx(pixels.mean((0, 1, 2)), abs=1e-4)
        held = self.load(given, holdout=3)
        assert (held.train.size, sorted(arrays(held.holdout)[1])) == (9, [0, 1, 2])
        assert_parts(held, data.train)

    def test_images_of_several_sizes_and_columns_of_classes(self, tmp_path):
        import datasets

        images = [np.full((size, 6, 3), 50 * size, "uint8") for size in (4, 5)]
        coarse = datasets.ClassLabel(names=["a", "b"])
        given = self.write(tmp_path / "a", images, [1, 0], "validation", coarse=coarse)
        data = load(given)
        assert (data.size, data.channels) == (None, 3)
        assert data.notes == (f"{given.name} has classes in fine, coarse; fine is used.",)
        for (image, label), expected in zip(data.test.open(), images, strict=True):
            np.testing.assert_array_equal(image, expected)
            assert label == 5 - len(expected)
        [batch] = evaluation_batches(data, data.train, 4, 3)
        assert batch[0].shape == (2, 3, 3, 3)

    def test_bad_data_sets(self, tmp_path):
        images = [np.zeros((4, 4), "uint8")] * 3
        with pytest.raises(UserError, match=r"'nobody/nothing': .*Hub.*no local folder"):
            load(Data("hf:nobody/nothing", dir=tmp_path))
        given = self.write(tmp_path / "a", images, [0, 1, -1])
        with pytest.raises(UserError, match=r"must have .*splits train, test; columns id \(Val"):
            load(given)
        given = self.write(tmp_path / "b", [{"bytes": b"GIF", "path": None}] * 3, [0, 1, 2])
        with pytest.raises(UserError, match="has an image that cannot be read"):
            load(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "cifar1000"}, "Did you mean 'cifar100' or 'cifar10'"),
        ({"name": "digits", "holdout": 1437}, "leaves some of the 1437 for training"),
        ({"name": "digits", "holdout": 9}, "must hold out 10 of the 1437 digits or more"),
        ({"name": "digits", "holdout": 1428}, "and leave as many. Received: 1428"),
    ],
)
def test_data_that_cannot_be_learned(options, message):
    with pytest.raises(UserError, match=message):
        load(Data(**options))


class TestStatistics:
    def test_more_images_than_are_counted_at_a_time(self):
        images = np.random.default_rng(0).integers(0, 256, (9000, 2, 2, 3), "uint8")
        images[4096:, ..., 0] //= 4
        images[..., 1] = 7  # a channel that never changes
        found = pictures.in_memory(images).preprocessing
        for ours, of in ((found.mean, np.mean), (found.std, np.std)):
            theirs = of(images, axis=(0, 1, 2), dtype="float64")
            np.testing.assert_allclose(ours, np.where(theirs, theirs, 1), atol=1e-4)

    def test_every_image_of_a_folder_counts_the_same(self, tmp_path):
        large, small = np.full((40, 30, 3), 50, "uint8"), np.full((5, 6, 3), 100, "uint8")
        small[:, :3, 2] = 200
        found = load(Data("folder", dir=write(tmp_path, large, small))).preprocessing
        assert found.mean == (75.0, 75.0, 100.0)
        third = np.array([50, 50, 100, 200])
        np.testing.assert_allclose(found.std, (25.0, 25.0, third.std()), atol=1e-4)
        assert (found.size, found.resize, found.crop) == (224, 256, "center")


class TestEvaluationBatches:
    @pytest.mark.parametrize(
        ("rows", "want"),
        [
            (slice(None), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
            (slice(2, 4), [[2, 3], [6, 7]]),  # the last batch has none of these
            (slice(1, 4), [[1, 2, 3], [5, 6, 7], [9]]),
            (slice(1, None, 2), [[1, 3], [5, 7], [9]]),
        ],
    )
    def test_every_image_once_in_order_untouched(self, rows, want):
        data = pictures.numbered(10)
        batches = evaluation_batches(data, data.test, 4, None, rows).as_numpy_iterator()
        for (pixels, labels), expected in zip(batches, want, strict=True):
            assert pixels.dtype == np.uint8
            assert pixels[:, 0, 0, 0].tolist() == labels.tolist() == expected

    @pytest.mark.parametrize("shape", [(60, 80), (90, 37)])
    def test_resizes_the_shorter_side_and_cuts_out_the_centre(self, tmp_path, shape):
        """Compare with Pillow: 256 / 224 of 28 is 32, and the middle 28 x 28 pixels are kept."""
        pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), "uint8")
        data = load(Data("folder", dir=write(tmp_path, pixels, pixels)))
        height, width = (round(side * 32 / min(shape)) for side in shape)
        bilinear = Image.Resampling.BILINEAR
        resized = np.asarray(Image.fromarray(pixels).resize((width, height), bilinear))
        top, left = (height - 28) // 2, (width - 28) // 2
        [(batch, _)] = evaluation_batches(data, data.test, 2, 28).as_numpy_iterator()
        assert batch.dtype == np.float32
        # Pillow rounds
        np.testing.assert_allclose(batch[0], resized[top : top + 28, left : left + 28], atol=1.01)


def write(folder, *images):
    """Write a folder with one class per image; return it."""
    for split in ("train", "test"):
        for name, pixels in zip("ab", images, strict=True):
            (folder / split / name).mkdir(parents=True)
            Image.fromarray(pixels).save(folder / split / name / "0.png")
    return folder


@pytest.mark.parametrize("name", ["digits", "fake", "my_data:load_data"])
def test_a_place_for_data_that_have_none(name):
    """A person who forgets --data.name would train on digits in place of their images."""
    with pytest.raises(UserError, match=rf"--data.dir is for other data than {name}, .* photos$"):
        load(Data(name, dir=Path("photos")))
