"""Every kind of image file, by every way: the check of a folder's headers, the decoder of
the training, its crops, and the decoder of an export, which the server runs.

A kind is read the same way by all, or is refused with a sentence: PNG, JPEG and WebP by none,
others by the server, and those of `REFUSED` also by the training.
"""

import functools
import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from keras_preact.export._images import decoder
from tests.keras_preact.export import image_files
from training.data import folders, images
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
    """Return a folder with an image of this content and a sound one."""
    (tmp_path / "class").mkdir()
    for name, each in {"it.png": content, "sound.png": SERVED["png rgb"]}.items():
        (tmp_path / "class" / name).write_bytes(each)
    return tmp_path


def pixels(paths) -> list[np.ndarray]:
    return [image for image, _ in Files(paths, [0] * len(paths)).open().as_numpy_iterator()]


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - REFUSED.keys()))
def test_read(kind, tmp_path):
    path = folder(tmp_path, KINDS[kind]) / "class" / "it.png"
    for skip_broken in (False, True):
        paths = folders.images(tmp_path, skip_broken, print)
        assert path in paths
    folders.check_headers(paths)
    (read,) = pixels([path])
    if kind != "png gray 16 bits":  # which Pillow converts otherwise
        # without transparency, and JPEG files with another rounding
        image = Image.open(io.BytesIO(KINDS[kind])).convert("RGBA").convert("RGB")
        np.testing.assert_allclose(read, image, atol=16 if "jpeg" in kind else 0)
    data = ImageData("", ("a",), 3, None, as_it_is(12, 3), *2 * [Files([path], [0])])
    reader = data.train
    crop = images.resized_crop_flip(reader, reader.fetch(0)[0], ((1, 2), (3, 4)), data, 8)
    assert crop.shape == (8, 8, 3)
    if kind in SERVED:
        np.testing.assert_array_equal(served()(tf.constant([KINDS[kind]]))[0], read)


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_refused(kind, tmp_path):
    path = folder(tmp_path, KINDS[kind]) / "class" / "it.png"
    with pytest.raises(UserError, match="1 broken image") as caught:
        folders.check_headers(folders.images(tmp_path, False, print))
    assert f"{path}: {REFUSED[kind]}. Repair" in str(caught.value)
    said = []
    assert folders.images(tmp_path, True, said.append) == [path.with_name("sound.png")]
    assert f"{path}: {REFUSED[kind]}." in said[0]


@pytest.mark.parametrize("kind", sorted(NOT_SERVED))
def test_not_served(kind):
    reason = "an animated WebP" if "webp" in kind else "no PNG, JPEG or WebP"
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"<<image 0 is {reason}>>"):
        served()(tf.constant([KINDS[kind]]))


@pytest.mark.parametrize("kind", ["webp animated", "webp animated alpha"])
def test_an_animation_that_comes_later_is_an_error_and_no_crash(kind, tmp_path):
    path = folder(tmp_path, KINDS[kind]) / "class" / "it.png"
    with pytest.raises(tf.errors.InvalidArgumentError):
        pixels([path])


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - REFUSED.keys() - {"jpeg of several"}))
def test_a_part_of_a_file_is_left_out(kind, tmp_path):
    part = KINDS[kind][: len(KINDS[kind]) * 2 // 3]
    path = folder(tmp_path, part) / "class" / "it.png"
    said = []
    assert folders.images(tmp_path, True, said.append) == [path.with_name("sound.png")]
    assert f"1 broken image: {path}: " in said[0]
    with pytest.raises(tf.errors.InvalidArgumentError):
        served()(tf.constant([part]))
