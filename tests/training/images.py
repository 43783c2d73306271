"""Small data sets in the real formats, for tests: TensorFlow Datasets records, and folders of image files."""

import types

import numpy as np
from PIL import Image


def write_tfds(name: str, folder, images: dict[str, np.ndarray], labels: dict[str, np.ndarray]) -> None:
    """Prepare a data set that TensorFlow Datasets takes for the stock one of that name, but with these images."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.image_classification import cifar

    stock = {"cifar10": cifar.Cifar10, "cifar100": cifar.Cifar100}[name]

    def split_generators(self, _):
        return {split: self._generate_examples(split) for split in images}

    def generate_examples(self, split):
        for i, (image, label) in enumerate(zip(images[split], labels[split], strict=True)):
            yield i, {"id": str(i), "image": image, "label": int(label)}

    body = {"pkg_dir_path": None, "_split_generators": split_generators, "_generate_examples": generate_examples}
    # the data set's name follows from the class's name
    builder = types.new_class(stock.__name__, (stock,), {"skip_registration": True}, lambda space: space.update(body))
    skip = tfds.download.ComputeStatsMode.SKIP
    builder(data_dir=folder).download_and_prepare(
        download_config=tfds.download.DownloadConfig(compute_stats=skip, num_shards=1)
    )


def write_folder(folder, classes=("cat", "dog"), images=6, size=(40, 30), seed=0) -> None:
    """Write folder/{train,test}/CLASS/NUMBER.png, random pictures in which each class has a colour of its own."""
    rng = np.random.default_rng(seed)
    for split in ("train", "test"):
        for index, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for i in range(images):
                pixels = rng.integers(0, 100, (size[1], size[0], 3), dtype="uint8")
                pixels[..., index % 3] += 150
                Image.fromarray(pixels).save(folder / split / name / f"{i}.png")
