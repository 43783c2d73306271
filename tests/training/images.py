"""Small data sets for tests: in memory, as records of TensorFlow Datasets, and as folders
of image files.
"""

import types

import numpy as np
from PIL import Image

from keras_preact.preprocessing import Preprocessing
from training.data.image_data import ImageData
from training.data.readers import Arrays, Reader


def in_memory(images: np.ndarray, labels=None, classes: int = 2) -> ImageData:
    """Return a data set of these images, for training and as test images; a label is
    the image's number by default.
    """
    part = Arrays(images, np.arange(len(images)) if labels is None else labels)
    size, channels = images.shape[1], images.shape[3]
    standard = Preprocessing((0.0,) * channels, (1.0,) * channels, size)
    return ImageData(
        "test", tuple(map(chr, range(97, 97 + classes))), channels, size, standard, part, part
    )


def numbered(count: int, size: int = 4) -> ImageData:
    """Return images. Every pixel of an image, and its label, is the image's number."""
    return in_memory(
        np.tile(np.arange(count, dtype="uint8")[:, None, None, None], (1, size, size, 3))
    )


def arrays(split: Reader) -> tuple[np.ndarray, np.ndarray]:
    """Return all images and labels of a split whose images have one size."""
    rows = list(split.open().as_numpy_iterator())
    return np.stack([image for image, _ in rows]), np.array([label for _, label in rows])


def batches(
    stream, count: int, start: int = 0, rows: slice = slice(None)
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return batches of a training stream."""
    return list(stream.dataset(start, rows).take(count).as_numpy_iterator())


def assert_same(ours, theirs) -> None:
    """Check that two lists of batches are equal to the last bit."""
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def write_tfds(
    name: str,
    folder,
    images: dict[str, np.ndarray],
    labels: dict[str, np.ndarray],
    shards: int = 1,
    shuffled: bool = True,
) -> None:
    """Prepare a data set with these images that TensorFlow Datasets loads by the name of
    one of its own data sets. Its records are in a random order, or in that of the images.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.image_classification import cifar, mnist

    stocks = {"cifar10": cifar.Cifar10, "cifar100": cifar.Cifar100, "mnist": mnist.MNIST}
    stock = stocks[name]

    def info(self):
        found = stock._info(self)
        found.as_proto.disable_shuffling = not shuffled
        return found

    def split_generators(self, _):
        return {split: self._generate_examples(split) for split in images}

    def generate_examples(self, split):
        for i, (image, label) in enumerate(zip(images[split], labels[split], strict=True)):
            more = {"cifar10": {"id": str(i)}, "cifar100": {"id": str(i), "coarse_label": 0}}
            yield i, {"image": image, "label": int(label)} | more.get(name, {})

    body = {
        "pkg_dir_path": None,
        "_info": info,
        "_split_generators": split_generators,
        "_generate_examples": generate_examples,
    }
    # TensorFlow Datasets derives the data set's name from the class's name
    builder = types.new_class(
        stock.__name__, (stock,), {"skip_registration": True}, lambda space: space.update(body)
    )
    skip = tfds.download.ComputeStatsMode.SKIP
    builder(data_dir=folder).download_and_prepare(
        download_config=tfds.download.DownloadConfig(compute_stats=skip, num_shards=shards)
    )


def write_folder(folder, classes=("cat", "dog"), images=6, size=(40, 30), seed=0) -> None:
    """Write folder/{train,test}/CLASS/NUMBER.png: random pictures, with a different colour
    for each class.
    """
    rng = np.random.default_rng(seed)
    for split in ("train", "test"):
        for index, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for i in range(images):
                pixels = rng.integers(0, 100, (size[1], size[0], 3), dtype="uint8")
                pixels[..., index % 3] += 150
                Image.fromarray(pixels).save(folder / split / name / f"{i}.png")
