"""The data sets and the way of an image to the network, on real files."""

import os
import re
import time
import zlib

import numpy as np
import pytest
import tensorflow as tf

from keras_preact.preprocessing import PREPROCESSING
from tests.training import images as pictures
from training.cli import UserError
from training.config import Data
from training.data import Split, evaluation_batches, load


def arrays(split: Split):
    rows = list(split.open().as_numpy_iterator())
    return np.stack([image for image, _ in rows]), np.array([label for _, label in rows])


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
        np.testing.assert_array_equal(
            np.sort(parts, axis=0), np.sort(arrays(whole.train)[0], axis=0)
        )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    rng = np.random.default_rng(0)
    images = {
        split: rng.integers(0, 256, (n, 32, 32, 3), "uint8")
        for split, n in (("train", 30), ("test", 7))
    }
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
            order = [
                int(np.flatnonzero((images[split] == image).all(axis=(1, 2, 3)))[0]) for image in x
            ]
            assert sorted(order) == list(range(len(images[split])))
            np.testing.assert_array_equal(y, labels[split][order])
        assert (data.size, data.channels, len(data.classes)) == (32, 3, 10)

    def test_holdout(self, prepared):
        folder, images, _ = prepared
        data = load(Data("cifar10", dir=folder, holdout=5))
        parts = np.concatenate([arrays(data.train)[0], arrays(data.holdout)[0]])
        assert (data.train.size, data.holdout.size) == (25, 5)
        np.testing.assert_array_equal(np.sort(parts, axis=0), np.sort(images["train"], axis=0))
        with pytest.raises(ValueError, match=r"leaves some of the 30 for training. Received: 30"):
            load(Data("cifar10", dir=folder, holdout=30))

    def test_neither_prepared_nor_downloadable_ends_at_once(self, tmp_path, monkeypatch):
        def no_network(*_, **__):
            raise OSError("no network")

        monkeypatch.setattr("urllib.request.urlopen", no_network)
        start = time.monotonic()
        with pytest.raises(ValueError, match=r"cifar100 is not prepared") as error:
            load(Data("cifar100", dir=tmp_path))
        assert time.monotonic() - start < 60  # TensorFlow Datasets itself would retry for minutes
        for part in (
            str(tmp_path),
            "tfds.load('cifar100'",
            "--data.dir",
            "keras-preact train digits",
            "no network",
        ):
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
        images, labels = data.held.images, data.held.labels
        published = PREPROCESSING["cifar10"]
        for measured, theirs, reference in (
            (data.preprocessing.mean, published.mean, images.mean(axis=(0, 1, 2))),
            (data.preprocessing.std, published.std, images.std(axis=(0, 1, 2))),
        ):
            np.testing.assert_allclose(measured, theirs, atol=0.1)
            np.testing.assert_allclose(measured, reference, atol=1e-3)
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

    def test_holdout_is_taken_at_random_and_always_the_same(self, tmp_path):
        pictures.write_folder(tmp_path, classes=("cat", "dog", "emu"), images=10)
        data = load(Data("folder", dir=tmp_path, holdout=12))
        names = lambda split: {str(path) for path in split.reader.paths}  # noqa: E731
        assert set(map(str, (tmp_path / "train").glob("*/*"))) == names(data.train) | names(
            data.holdout
        )
        assert not names(data.train) & names(data.holdout)
        assert {label for _, label in data.holdout.open().as_numpy_iterator()} == {0, 1, 2}
        assert names(load(Data("folder", dir=tmp_path, holdout=12)).holdout) == names(data.holdout)
        with pytest.raises(ValueError, match=r"leaves some of the 30 for training. Received: 30"):
            load(Data("folder", dir=tmp_path, holdout=30))

    def test_holdout_has_the_same_share_of_every_class(self, tmp_path):
        """Drawn without regard to the class, one of a few images often leaves none."""
        for name, count in {"cat": 30, "dog": 10, "emu": 2}.items():
            pictures.write_folder(tmp_path / name, classes=(name,), images=count, size=(2, 2))
            for split in ("train", "test"):
                (tmp_path / split).mkdir(exist_ok=True)
                (tmp_path / name / split / name).rename(tmp_path / split / name)
        data = load(Data("folder", dir=tmp_path, holdout=21))
        np.testing.assert_array_equal(np.bincount(data.holdout.reader.labels), [15, 5, 1])
        np.testing.assert_array_equal(np.bincount(data.train.reader.labels), [15, 5, 1])

    def test_broken_headers_are_named_before_anything_is_decoded(self, tmp_path):
        pictures.write_folder(tmp_path)
        bad = tmp_path / "train" / "dog" / "broken.jpg"
        image = pictures.Image.fromarray(np.zeros((8, 8, 3), "uint8"))
        image.save(tmp_path / "tiff", "TIFF")
        image.convert("P").save(tmp_path / "palette", "BMP")
        whole = (tmp_path / "train" / "dog" / "0.png").read_bytes()
        huge = whole[:16] + (60_000).to_bytes(4, "big") * 2 + whole[24:29]
        huge += zlib.crc32(huge[12:29]).to_bytes(4, "big") + whole[33:]
        for content, fault in (
            (b"", "it is not an image"),
            (b"no image at all", "it is not an image"),
            (
                (tmp_path / "tiff").read_bytes(),
                "its content is TIFF, not JPEG, PNG, BMP or WebP",
            ),
            ((tmp_path / "palette").read_bytes(), "it is a BMP with a palette: save it as PNG"),
            (huge, "it has more than 89,478,485 pixels"),
            (whole[: len(whole) // 2], "Truncated File Read"),
        ):
            bad.write_bytes(content)
            with pytest.raises(UserError) as raised:
                load(Data("folder", dir=tmp_path))
            assert str(raised.value) == (
                f"Found 1 broken image: {bad}: {fault}. Mend or remove it, or leave it out with "
                "--data.skip-broken."
            )

    def test_a_pipe_is_not_opened(self, tmp_path):
        pictures.write_folder(tmp_path)
        os.mkfifo(tmp_path / "train" / "dog" / "pipe.png")
        (tmp_path / "train" / "dog" / "device.png").symlink_to("/dev/zero")
        with pytest.raises(
            UserError, match=r"Found 2 broken images\. .*device.png: it is not a file"
        ):
            load(Data("folder", dir=tmp_path))

    def test_images_that_the_header_does_not_show_as_broken(self, tmp_path):
        """One in the training split is found by its statistics, one in the test split by
        the evaluation. `skip_broken` leaves out both.
        """
        pictures.write_folder(tmp_path)
        bad = [tmp_path / split / "dog" / "cut.jpg" for split in ("train", "test")]
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), "uint8")
        pictures.Image.fromarray(noise).save(tmp_path / "whole.jpg")
        for path in bad:
            path.write_bytes((tmp_path / "whole.jpg").read_bytes()[:2000])
        data = load(Data("folder", dir=tmp_path))
        with pytest.raises(UserError) as raised:
            _ = data.preprocessing
        assert str(raised.value) == (
            f"Found 2 broken images. The first is {bad[1]}: it cannot be decoded. Mend or remove "
            "them, or leave them out with --data.skip-broken."
        )
        bad[0].unlink()
        data = load(Data("folder", dir=tmp_path))
        assert data.preprocessing.size == 224
        with (
            pytest.raises(UserError, match=re.escape(f"1 broken image: {bad[1]}: it cannot")),
            data.naming_broken_images(),
        ):
            arrays(data.test)
        (tmp_path / "train" / "cat" / "text.png").write_text("no image")
        data = load(Data("folder", dir=tmp_path, skip_broken=True))
        assert (data.train.size, data.test.size) == (12, 12)
        assert data.notes == (
            f"Left out 1 broken image: {tmp_path}/train/cat/text.png: it is not an image.",
            f"Left out 1 broken image: {bad[1]}: it cannot be decoded.",
        )
        assert arrays(data.test)[0].shape == (12, 30, 40, 3)

    def test_an_error_of_the_network_stays_what_it_is(self, tmp_path):
        pictures.write_folder(tmp_path)
        data = load(Data("folder", dir=tmp_path))
        with (
            pytest.raises(tf.errors.InvalidArgumentError, match="no image"),
            data.naming_broken_images(),
        ):
            tf.debugging.Assert(False, ["no image"])

    def test_formats_that_are_read_and_files_that_are_not(self, tmp_path):
        pictures.write_folder(tmp_path, images=1)
        shown = pictures.Image.fromarray(np.full((8, 8, 3), (200, 10, 30), "uint8"))
        cat = tmp_path / "train" / "cat"
        for name in ("a.BMP", "b.webp", "c.tif", "d.tif", "e.gif"):
            shown.save(cat / name)
        (cat / "sub").mkdir()
        shown.save(cat / "sub" / "f.png")
        (cat / ".hidden").write_text("")
        (tmp_path / "train" / "README").write_text("")
        data = load(Data("folder", dir=tmp_path))
        assert [path.name for path in data.train.reader.paths] == [
            "0.png",
            "a.BMP",
            "b.webp",
            "0.png",
        ]
        for image, _ in list(data.train.open().as_numpy_iterator())[1:3]:
            np.testing.assert_allclose(image, np.broadcast_to((200, 10, 30), (8, 8, 3)), atol=4)
        assert data.notes == (
            f"Files of {tmp_path}/train that are not read: 2 .tif, 1 without ending, 1 .gif, "
            "1 .png. Images are CLASS/IMAGE with .bmp, .jpeg, .jpg, .png, .webp; convert the "
            "others.",
        )

    def test_classes_that_cannot_be_learned(self, tmp_path):
        pictures.write_folder(tmp_path, classes=("cat", "dog"))
        (tmp_path / "train" / "dog").rename(tmp_path / "dog")
        with pytest.raises(UserError, match=r"a class without training images: dog\. Add some"):
            load(Data("folder", dir=tmp_path))
        (tmp_path / "test" / "dog").rename(tmp_path / "other")
        with pytest.raises(UserError, match=r"has one class, cat; a classifier needs two or more"):
            load(Data("folder", dir=tmp_path))

    def test_missing_folders(self, tmp_path):
        with pytest.raises(
            ValueError, match=r"train/CLASS/IMAGE and test/CLASS/IMAGE. Received: None"
        ):
            load(Data("folder"))
        with pytest.raises(ValueError, match=r"train holds no images"):
            load(Data("folder", dir=tmp_path))


def test_unknown_data_set():
    with pytest.raises(ValueError, match=r"Did you mean 'cifar100' or 'cifar10'"):
        load(Data("cifar1000"))


class TestStatistics:
    def test_are_those_of_the_training_images_alone(self):
        data = load(Data("digits", holdout=500))
        images = arrays(data.train)[0].astype("float64")
        assert data.preprocessing.mean == (round(images.mean(), 4),)
        assert data.preprocessing.std == (round(images.std(), 4),)
        assert data.preprocessing != load(Data("digits")).preprocessing
        assert (data.preprocessing.size, data.preprocessing.resize) == (8, None)

    def test_of_records(self, prepared):
        folder, images, _ = prepared
        found = load(Data("cifar10", dir=folder)).preprocessing
        np.testing.assert_allclose(
            found.mean, images["train"].mean(axis=(0, 1, 2), dtype="float64"), atol=1e-4
        )
        np.testing.assert_allclose(
            found.std, images["train"].std(axis=(0, 1, 2), dtype="float64"), atol=1e-4
        )

    def test_of_more_images_than_are_counted_at_a_time(self):
        images = np.random.default_rng(0).integers(0, 256, (9000, 2, 2, 3), "uint8")
        images[4096:, ..., 0] //= 4
        images[8500:, ..., 1] = 0
        found = pictures.in_memory(images).preprocessing
        np.testing.assert_allclose(
            found.mean, images.mean(axis=(0, 1, 2), dtype="float64"), atol=1e-4
        )
        np.testing.assert_allclose(
            found.std, images.std(axis=(0, 1, 2), dtype="float64"), atol=1e-4
        )

    def test_a_channel_that_never_changes(self):
        images = np.zeros((4, 2, 2, 3), "uint8")
        images[..., 1] = 7
        found = pictures.in_memory(images).preprocessing
        assert (found.mean, found.std) == ((0.0, 7.0, 0.0), (1.0, 1.0, 1.0))

    def test_of_a_folder_every_image_counts_the_same(self, tmp_path, monkeypatch):
        large, small = np.full((40, 30, 3), 50, "uint8"), np.full((5, 6, 3), 100, "uint8")
        small[:, :3, 2] = 200
        for split in ("train", "test"):
            for name, pixels in {"a": large, "b": small}.items():
                (tmp_path / split / name).mkdir(parents=True)
                pictures.Image.fromarray(pixels).save(tmp_path / split / name / "0.png")
        found = load(Data("folder", dir=tmp_path)).preprocessing
        assert found.mean == (75.0, 75.0, 100.0)
        third = np.array([50, 50, 100, 200])
        np.testing.assert_allclose(found.std, (25.0, 25.0, third.std()), atol=1e-4)
        assert (found.size, found.resize, found.crop) == (224, 256, "center")
        monkeypatch.setattr("training.data.pixels.SAMPLE", 1)
        assert load(Data("folder", dir=tmp_path)).preprocessing.mean in (
            (50.0, 50.0, 50.0),
            (100.0, 100.0, 150.0),
        )


class TestEvaluationBatches:
    def test_every_image_once_in_order_untouched(self):
        data = pictures.numbered(10)
        batches = list(evaluation_batches(data, data.test, 4, None).as_numpy_iterator())
        assert [x.dtype for x, _ in batches] == [np.uint8] * 3
        assert [len(x) for x, _ in batches] == [4, 4, 2]
        np.testing.assert_array_equal(
            np.concatenate([x for x, _ in batches])[:, 0, 0, 0], np.arange(10)
        )

    @pytest.mark.parametrize(
        ("rows", "want"),
        [
            (slice(0, 2), [[0, 1], [4, 5], [8, 9]]),
            (slice(2, 4), [[2, 3], [6, 7]]),  # the last batch has none of these
            (slice(1, 4), [[1, 2, 3], [5, 6, 7], [9]]),
            (slice(1, None, 2), [[1, 3], [5, 7], [9]]),
        ],
    )
    def test_rows(self, rows, want):
        data = pictures.numbered(10)
        found = [
            labels.tolist()
            for _, labels in evaluation_batches(data, data.test, 4, 4, rows).as_numpy_iterator()
        ]
        assert found == want

    def test_rows_of_files_are_picked_before_they_are_decoded(self, tmp_path):
        pictures.write_folder(tmp_path, images=4)
        data = load(Data("folder", dir=tmp_path))
        whole = list(evaluation_batches(data, data.test, 4, 16).as_numpy_iterator())
        for i in (0, 1):  # numbers 0, 1, 4, 5
            (tmp_path / "test" / "cat" / f"{i}.png").write_bytes(b"no image")
            (tmp_path / "test" / "dog" / f"{i}.png").write_bytes(b"no image")
        kept = list(evaluation_batches(data, data.test, 4, 16, slice(2, 4)).as_numpy_iterator())
        pictures.assert_same(kept, [(pixels[2:], labels[2:]) for pixels, labels in whole])

    def test_bad_arguments(self):
        data = pictures.numbered(10)
        with pytest.raises(ValueError, match=r"`batch_size` must be positive. Received: 0"):
            evaluation_batches(data, data.test, 0, None)
        with pytest.raises(ValueError, match=r"must hold some of the 4 images of a batch"):
            evaluation_batches(data, data.test, 4, None, slice(2, 2))

    @pytest.mark.parametrize("shape", [(60, 80), (80, 60), (37, 90)])
    def test_resizes_the_shorter_side_and_cuts_out_the_centre(self, tmp_path, shape):
        """As Pillow does it: 256 / 224 of 28 is 32, and the middle 28 x 28 is kept."""
        pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), "uint8")
        for split in ("train", "test"):
            for name in ("a", "b"):
                (tmp_path / split / name).mkdir(parents=True)
                pictures.Image.fromarray(pixels).save(tmp_path / split / name / "0.png")
        data = load(Data("folder", dir=tmp_path))
        height, width = (round(side * 32 / min(shape)) for side in shape)
        resized = np.asarray(
            pictures.Image.fromarray(pixels).resize(
                (width, height), pictures.Image.Resampling.BILINEAR
            )
        )
        top, left = (height - 28) // 2, (width - 28) // 2
        [(batch, _)] = evaluation_batches(data, data.test, 2, 28).as_numpy_iterator()
        assert batch.dtype == np.float32
        # Pillow rounds
        np.testing.assert_allclose(batch[0], resized[top : top + 28, left : left + 28], atol=1.01)
