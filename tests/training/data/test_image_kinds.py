"""Every kind of image file, by every way: the check of a folder's headers, the decoder of
the training, its crops, and the decoder of an export, which the server runs.

A kind is read the same way by all, or is refused with a sentence: PNG, JPEG and WebP by none,
others by the server, and those of `REFUSED` also by the training.
"""

import functools
import io
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from keras_preact.export._images import decoder
from tests.keras_preact.export import image_files
from training.config import Data
from training.data import broken, images, load
from training.data.image_data import ImageData, as_it_is
from training.data.readers import Files
from training.errors import UserError

SERVED, NOT_SERVED = image_files.served(), image_files.not_served()
KINDS = SERVED | NOT_SERVED
BMP = "it is a BMP with a palette, 16 bits or compression: save it as PNG"
WEBP = "it is an animated WebP: save one of its pictures as PNG"
REFUSED = {
    "gif": "its content is GIF, not JPEG, PNG, BMP or WebP",
    "gif animated": "its content is GIF, not JPEG, PNG, BMP or WebP",
    "tiff": "its content is TIFF, not JPEG, PNG, BMP or WebP",
    "bmp 1 bit": BMP,
    "bmp 8 bits palette": BMP,
    "bmp 8 bits compressed": BMP,
    "bmp 16 bits": BMP,
    "bmp 16 bits 565": BMP,
    "bmp 32 bits xbgr": BMP,
    "webp animated": WEBP,
    "webp animated alpha": WEBP,
}


@functools.cache
def served():
    return tf.function(
        decoder((12, 20), 3),
        input_signature=[tf.TensorSpec([None], tf.string)],
        autograph=False,
    )


def folder(tmp_path, content: bytes):
    """Return a folder with an image of this content among sound ones."""
    for place in ("train/other", "train/class", "test/class"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "sound.png").write_bytes(SERVED["png rgb"])
    (tmp_path / "train/class/it.png").write_bytes(content)
    return tmp_path


def pixels(paths) -> list[np.ndarray]:
    reader = Files(paths, [0] * len(paths), Path())
    return [image for image, _ in reader.open().as_numpy_iterator()]


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - REFUSED.keys()))
def test_read(kind, tmp_path):
    path = folder(tmp_path, KINDS[kind]) / "train/class/it.png"
    for skip_broken in (False, True):
        data = load(Data("folder", dir=tmp_path, skip_broken=skip_broken))
        assert path in data.train.paths
        data.check()
    assert not data.broken
    (read,) = pixels([path])
    if kind != "png gray 16 bits":  # which Pillow converts otherwise
        # without transparency, and JPEG files with another rounding
        image = Image.open(io.BytesIO(KINDS[kind])).convert("RGBA").convert("RGB")
        np.testing.assert_allclose(read, image, atol=16 if "jpeg" in kind else 0)
    data = ImageData("", ("a",), 3, None, as_it_is(12, 3), *2 * [Files([path], [0], Path())])
    reader = data.train
    crop = images.resized_crop_flip(reader, reader.fetch(0)[0], ((1, 2), (3, 4)), data, 8)
    assert crop.shape == (8, 8, 3)
    if kind in SERVED:
        np.testing.assert_array_equal(served()(tf.constant([KINDS[kind]]))[0], read)


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_refused(kind, tmp_path):
    path = folder(tmp_path, KINDS[kind]) / "train/class/it.png"
    with pytest.raises(UserError, match="1 broken image") as caught:
        load(Data("folder", dir=tmp_path)).check()
    assert f"{path}: {REFUSED[kind]}. Repair" in str(caught.value)
    data = load(Data("folder", dir=tmp_path, skip_broken=True))
    assert path not in data.train.paths
    assert data.train.size == 2
    assert f"{path}: {REFUSED[kind]}." in data.notes[0]


@pytest.mark.parametrize("kind", sorted(NOT_SERVED))
def test_not_served(kind):
    reason = "an animated WebP" if "webp" in kind else "no PNG, JPEG or WebP"
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"<<image 0 is {reason}>>"):
        served()(tf.constant([KINDS[kind]]))


@pytest.mark.parametrize("kind", ["webp animated", "webp animated alpha"])
def test_an_animation_that_comes_later_is_an_error_and_no_crash(kind, tmp_path):
    path = folder(tmp_path, KINDS[kind]) / "train/class/it.png"
    with pytest.raises(tf.errors.InvalidArgumentError):
        pixels([path])


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - REFUSED.keys() - {"jpeg of several"}))
def test_a_part_of_a_file_is_left_out(kind, tmp_path):
    part = KINDS[kind][: len(KINDS[kind]) * 2 // 3]
    path = folder(tmp_path, part) / "train/class/it.png"
    assert list(broken.faults([path], decode=False)) == [path]
    data = load(Data("folder", dir=tmp_path, skip_broken=True))
    assert path not in data.train.paths
    assert f"1 broken image: {path}: " in data.notes[0]
    with pytest.raises(tf.errors.InvalidArgumentError):
        served()(tf.constant([part]))
