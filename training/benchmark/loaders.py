"""Loaders of images from a folder, each as its users write it. The benchmark runs this
module in a process per loader.

The argument is JSON: name of the loader, and the arguments of `LOADERS` by name. The
answers are lines of JSON on stdout: the versions when the loader has given a batch, and
for each line of stdin the figures.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .. import backends, children

#: Side of an image before the crop, relative to the side after it.
_SHORTER = 256 / 224


def keras_preact(folder: Path, mode: str, size: int, batch: int) -> Iterator[Any]:
    """Read the images as `keras-preact train` and `evaluate` do."""
    from ..config import Data
    from ..data import folders, images, pipelines

    data = folders.load(Data(name="folder", dir=folder, test=0.01, holdout=0))
    if mode == "evaluation":
        return iter(images.evaluation_batches(data, data.train, batch, size).repeat())
    stream = pipelines.training_stream(data, batch, "resized_crop_flip", size, seed=0)
    return iter(stream.dataset())


def keras(folder: Path, mode: str, size: int, batch: int) -> Iterator[Any]:
    """Read the images with `keras.utils.image_dataset_from_directory` and Keras' layers for
    augmentation. It resizes without smoothing.
    """
    # Its users have autotuning, so this loader has it too. A dropped iterator with autotuning
    # can freeze the process for a minute: this one has no other work, and ends soon.
    import keras
    import tensorflow as tf

    def read(side: int, **options: Any):
        return keras.utils.image_dataset_from_directory(
            folder, image_size=(side, side), batch_size=batch, verbose=False, **options
        ).repeat()

    if mode == "evaluation":
        return iter(read(size, shuffle=False, crop_to_aspect_ratio=True).prefetch(tf.data.AUTOTUNE))
    layers = [keras.layers.RandomCrop(size, size), keras.layers.RandomFlip("horizontal")]

    def augment(images, labels):
        for layer in layers:
            images = layer(images, training=True)
        return images, labels

    data = read(round(size * _SHORTER), seed=0)
    return iter(data.map(augment, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE))


def grain(folder: Path, mode: str, size: int, batch: int) -> Iterator[Any]:
    """Read the images with Grain's threads and Pillow, with the crops of `keras_preact`."""
    import grain
    import numpy as np
    from PIL import Image

    classes = sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith("."))
    files = [
        (entry.path, label)
        for label, name in enumerate(classes)
        for entry in sorted(os.scandir(folder / name), key=lambda entry: entry.name)
    ]

    def cut(image: Image.Image, random: np.random.Generator) -> np.ndarray:
        width, height = image.size
        for _ in range(10):
            area = width * height * random.uniform(0.08, 1)
            ratio = random.uniform(3 / 4, 4 / 3)
            columns, rows = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if columns <= width and rows <= height:
                break
        else:
            columns, rows = width, height
        left, top = random.integers(width - columns + 1), random.integers(height - rows + 1)
        box = (left, top, left + columns, top + rows)
        pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box), "float32")
        return pixels[:, ::-1] if random.random() < 0.5 else pixels

    def middle(image: Image.Image) -> np.ndarray:
        scale = round(size * _SHORTER) / min(image.size)
        width, height = (round(side * scale) for side in image.size)
        left, top = (width - size) // 2, (height - size) // 2
        resized = image.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(resized.crop((left, top, left + size, top + size)), "float32")

    class Read(grain.transforms.RandomMap):
        def random_map(self, element, random):
            path, label = element
            with Image.open(path) as image:
                rgb = image.convert("RGB")
            return (cut(rgb, random) if mode == "train" else middle(rgb)), label

    data = grain.MapDataset.source(files).seed(0)
    if mode == "train":
        data = data.shuffle()
    data = data.repeat().random_map(Read()).batch(batch)
    return iter(data.to_iter_dataset())


#: Name to a function from a folder of classes, `train` or `evaluation`, the side of the images and
#: the size of a batch to endless batches of images and labels.
LOADERS: Mapping[str, Callable[[Path, str, int, int], Iterator[Any]]] = MappingProxyType(
    {"keras": keras, "grain": grain, "keras-preact": keras_preact}
)


def measure(
    loader: str, folder: str, mode: str, size: int, batch: int, batches: int
) -> Iterator[dict]:
    """Yield the versions of the packages, then figures for each line of stdin."""

    def opened() -> Iterator[Any]:
        stream = LOADERS[loader](Path(folder), mode, size, batch)
        images, labels = next(stream)
        found = (tuple(images.shape), tuple(labels.shape))
        if found != ((batch, size, size, 3), (batch,)):
            raise ValueError(f"{loader} gives batches of other shapes: {found}")
        return stream

    opened()
    packages = {"grain": ("grain", "pillow"), "keras": ("keras", "tensorflow")}
    yield backends.versions(*packages.get(loader, ("keras-preact", "tensorflow")))
    for _ in sys.stdin:
        start = time.perf_counter()
        stream = opened()
        first = time.perf_counter() - start
        for _ in range(batches):  # what was waiting in buffers took no time
            next(stream)
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(batches):
            next(stream)
        images = batches * batch
        yield {
            "images_per_second": images / (time.perf_counter() - start),
            "cpu_seconds": (time.process_time() - cpu) / images,
            "first_seconds": first,
        }
        del stream  # ends its threads


if __name__ == "__main__":
    children.answer_each(lambda: measure(**json.loads(sys.argv[1])))
