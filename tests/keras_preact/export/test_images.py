"""Image files to pixels in TensorFlow's graph: against Pillow, against the training's
decoder, and against an attacker.
"""

import functools
import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from keras_preact.export._images import MAX_PIXELS, decoder
from keras_preact.preprocessing import PREPROCESSING, Preprocessing
from tests.keras_preact.export import image_files as files

tf = pytest.importorskip("tensorflow")


@functools.cache
def function(size=(12, 20), channels=3, preprocessing=None, max_pixels=MAX_PIXELS):
    """A decoder in a graph, as it is exported."""
    return tf.function(
        decoder(size, channels, preprocessing, max_pixels),
        input_signature=[tf.TensorSpec([None], tf.string, name="image_bytes")],
        autograph=False,
    )


def decode(*data: bytes, **options) -> np.ndarray:
    return function(**options)(tf.constant(list(data), tf.string)).numpy()


def error(*data: bytes, **options) -> str:
    """The message of the InvalidArgumentError that must come; of the graph's own
    sentences, that between the markers.
    """
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        decode(*data, **options)
    message = caught.value.message
    return message.partition("<<")[2].partition(">>")[0] or f"not ours: {message}"


KINDS = files.served()
GOOD = KINDS["png rgb"]


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if "jpeg" not in kind and "16" not in kind]
)
def test_as_pillow_decodes(kind):
    """To the last bit. Pillow decodes JPEG files and those of 16 bits otherwise: the
    training's evaluation, below, has them too.
    """
    image = Image.open(io.BytesIO(KINDS[kind])).convert("RGBA").convert("RGB")
    np.testing.assert_array_equal(decode(KINDS[kind])[0], np.asarray(image))
    gray = decode(KINDS[kind], channels=1)
    np.testing.assert_allclose(gray[0, ..., 0], image.convert("L"), atol=1)


class TestRefused:
    def test_what_is_no_image(self):
        junk = [b"", b"G", bytes(100), b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"BM" + bytes(60)]
        junk += [b"RIFF", b"RIFF1234WEBP"[:11]]
        for each in junk:
            assert error(GOOD, each) == "image 1 is no PNG, JPEG or WebP"
        for kind, each in files.not_served().items():
            reason = "an animated WebP" if "webp" in kind else "no PNG, JPEG or WebP"
            assert error(GOOD, each) == f"image 1 is {reason}"
        assert error() == "image_bytes holds no image"
        assert "not ours" in error(KINDS["jpeg cmyk"], channels=1)

    def test_images_without_pixels(self):
        assert error(files.png(0, 7, 8, 2, b"")) == "image 0 is 0 x 7 pixels"
        jpeg = bytearray(KINDS["jpeg rgb"])
        place = jpeg.index(b"\xff\xc0") + 5
        jpeg[place : place + 2] = b"\0\0"
        assert error(bytes(jpeg))

    def test_sizes_at_the_limit(self):
        message = "image 0 is 20 x 12 pixels; at most 239 pixels are decoded"
        # the three forms of WebP
        for kind in ("png rgb", "jpeg rgb", "webp lossy", "webp lossless", "webp lossy alpha"):
            assert error(KINDS[kind], max_pixels=239) == message
            assert decode(KINDS[kind], max_pixels=240).shape == (1, 12, 20, 3)

    def test_sizes_whose_product_is_beyond_64_bits(self):
        size = 2**31 - 1
        message = f"image 1 is {size} x {size} pixels; at most 50000000 pixels are decoded"
        assert error(GOOD, files.png(size, size, 8, 2, b"")) == message

    @pytest.mark.parametrize("place", [24, 27])
    def test_a_webp_whose_size_is_another_than_that_of_its_pixels(self, place):
        """A small size in the first header does not get a large image past the limit."""
        data = bytearray(KINDS["webp lossy alpha"])
        assert data[12:16] == b"VP8X"
        data[place] = 0
        assert "not ours" in error(bytes(data), max_pixels=239)
        no_chunk = b"RIFF" + struct.pack("<I", 22) + b"WEBPALPH" + bytes(14)
        assert error(no_chunk) == "image 0 is 0 x 0 pixels"

    def test_large_images_before_they_are_decoded(self, monkeypatch):
        """A few KB can hold any size: what is refused takes no memory."""

        def decode_image(*_, **__):
            raise AssertionError("decoded")

        monkeypatch.setattr(tf.io, "decode_image", decode_image)
        with pytest.raises(tf.errors.InvalidArgumentError, match="at most 239"):
            decoder((12, 20), 3, max_pixels=239)(tf.constant([GOOD]))
        with pytest.raises(AssertionError, match="decoded"):
            decoder((12, 20), 3)(tf.constant([GOOD]))

    def test_parts_that_take_long(self):
        """Texts in a PNG, scans in a progressive JPEG."""
        text = files.chunk(b"zTXt", b"k\0\0" + zlib.compress(b"some text"))
        assert decode(GOOD[:33] + 20 * text + GOOD[33:]).shape == (1, 12, 20, 3)
        png = GOOD[:33] + 21 * text + GOOD[33:]
        assert error(png) == "image 0 is a PNG with too many parts"
        data = KINDS["jpeg progressive"]
        scan = data[data.rindex(b"\xff\xda") : -2]
        jpeg = data[:-2] + 50 * scan + data[-2:]
        assert error(jpeg) == "image 0 is a JPEG with too many parts"

    def test_not_for_marks_of_scans_in_what_a_phone_adds(self):
        """Profiles, thumbnails and videos hold any bytes."""
        data = KINDS["jpeg rgb"]
        marks = b"\xff\xda" * 30_000
        segments = 20 * (b"\xff\xe2" + struct.pack(">H", 2 + len(marks)) + marks)
        np.testing.assert_array_equal(decode(data[:2] + segments + data[2:]), decode(data))
        np.testing.assert_array_equal(decode(data + segments), decode(data))


@pytest.mark.parametrize("shape", [(1, 300_000), (300_000, 1)])
def test_strips_are_cut_before_they_are_scaled(shape):
    """Scaled as a whole, they would take 200 GB."""
    strip = files.encode(Image.new("L", shape))
    options = {"size": (224, 224), "preprocessing": PREPROCESSING["imagenet"]}
    assert decode(strip, **options).shape == (1, 224, 224, 3)


@pytest.mark.parametrize("kind", ["png palette alpha", "jpeg progressive"])
def test_no_part_of_a_truncated_file(kind):
    data = KINDS[kind]
    whole = decode(data)
    for length in [*range(0, len(data), len(data) // 20), *range(len(data) - 12, len(data))]:
        try:
            pixels = decode(data[:length])
        except tf.errors.InvalidArgumentError:
            continue
        np.testing.assert_array_equal(pixels, whole)
        assert length >= len(data) - 1


@settings(max_examples=60)
@given(data=st.data(), name=st.sampled_from(sorted(KINDS)))
def test_corruptions(data, name):
    """Any file is decoded to an image of the right form, or refused."""
    file = bytearray(KINDS[name])
    for _ in range(data.draw(st.integers(1, 4), "changes")):
        place = data.draw(st.integers(0, len(file)), "place")
        cut = data.draw(st.integers(0, 30), "length")
        file[place : place + cut] = data.draw(st.binary(max_size=30), "bytes")
    preprocessing = Preprocessing((0.0,) * 3, (1.0,) * 3, 8, resize=9, crop="center")
    try:
        pixels = decode(bytes(file), max_pixels=10_000, preprocessing=preprocessing, size=(8, 8))
    except tf.errors.InvalidArgumentError:
        return
    assert pixels.shape == (1, 8, 8, 3)
    assert 0 <= pixels.min() <= pixels.max() <= 255


def test_saved_it_refuses_the_same(tmp_path):
    """No operation calls Python, and no check is lost with the graph that nothing
    depends on.
    """
    module = tf.Module()
    module.decode = function()
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    graph = loaded.decode.get_concrete_function().graph.as_graph_def()
    inner = [node for each in graph.library.function for node in each.node_def]
    assert not [node for node in (*graph.node, *inner) if "PyFunc" in node.op]
    np.testing.assert_array_equal(loaded.decode(tf.constant([GOOD]))[0], files.noise())
    for bad, message in (
        ([GOOD, b"junk"], "is no PNG"),
        ([GOOD, files.png(50_000, 50_000, 8, 2, b"")], "50000 x 50000"),
        ([GOOD, GOOD[:-5]], "Invalid PNG"),
        ([], "holds no image"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            loaded.decode(tf.constant(bad, tf.string))


def test_the_same_pixels_as_in_the_training_s_evaluation(tmp_path):
    """Files of all kinds, sizes and shapes, through both, to the last bit."""
    from training.config import Data
    from training.data import evaluation_batches, load

    shapes = [(60, 80), (81, 60), (28, 28), (5, 4), (300, 299), (29, 1000), (1, 700), (700, 2)]
    data = [
        files.encode(files.noise(*shape, seed=i), ("PNG", "JPEG")[i % 2])
        for i, shape in enumerate(shapes)
    ]
    data += KINDS.values()
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        for i, each in enumerate(data):
            (tmp_path / split / "a" / f"{i:03}.png").write_bytes(each)
        (tmp_path / split / "b").mkdir()
        (tmp_path / split / "b" / "other.png").write_bytes(data[0])
    source = load(Data("folder", dir=tmp_path))
    want, _ = next(evaluation_batches(source, source.test, len(data), 28).as_numpy_iterator())
    np.testing.assert_array_equal(decode(*data, size=(28, 28), preprocessing=source.standard), want)
