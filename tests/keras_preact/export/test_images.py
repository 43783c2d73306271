"""Image files to pixels in TensorFlow's graph: against Pillow, against the training's
decoder, and against an attacker.
"""

import functools
import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from keras_preact.export._images import MAX_PIXELS, Decoder
from keras_preact.preprocessing import Preprocessing
from tests.keras_preact.export import image_files as files

tf = pytest.importorskip("tensorflow")

FILES = tf.TensorSpec([None], tf.string, name="image_bytes")


@functools.cache
def decoder(size=(12, 20), channels=3, preprocessing=None, max_pixels=MAX_PIXELS):
    """A Decoder in a graph, as it is exported."""
    return tf.function(
        Decoder(size, channels, preprocessing, max_pixels), input_signature=[FILES], autograph=False
    )


def decode(*data: bytes, **options) -> np.ndarray:
    return decoder(**options)(tf.constant(list(data), tf.string)).numpy()


def error(*data: bytes, **options) -> str:
    """The message of the InvalidArgumentError that must come; of the graph's own
    sentences, that between the markers.
    """
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        decode(*data, **options)
    message = caught.value.message
    return message.partition("<<")[2].partition(">>")[0] or f"not ours: {message}"


@functools.cache
def kinds() -> dict[str, bytes]:
    """Files of 12 x 20 pixels of every kind."""
    colour, gray = files.noise(), files.noise(channels=1)
    with_palette = Image.fromarray(colour).quantize(16)
    deep = np.random.default_rng(2).integers(0, 2**16, (12, 20, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in deep)
    return {
        "png rgb": files.encode(colour),
        "png gray": files.encode(gray),
        "png gray alpha": files.encode(files.noise(channels=2)),
        "png rgba": files.encode(files.noise(channels=4)),
        "png 1 bit": files.encode(Image.fromarray(gray).convert("1")),
        "png palette": files.encode(with_palette),
        "png palette transparent": files.encode(
            with_palette, transparency=bytes(range(0, 160, 10))
        ),
        "png gray 16 bits": files.encode(deep[..., 0].astype("uint16")),
        "png rgb 16 bits": files.png(20, 12, 16, 2, rows),
        "jpeg rgb": files.encode(colour, "JPEG"),
        "jpeg gray": files.encode(gray, "JPEG"),
        "jpeg fine": files.encode(colour, "JPEG", quality=95, subsampling=0),
        "jpeg progressive": files.encode(colour, "JPEG", progressive=True),
        "jpeg cmyk": files.encode(Image.fromarray(colour).convert("CMYK"), "JPEG"),
    }


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("channels", [1, 3])
def test_as_the_training_decodes(kind, channels):
    data = kinds()[kind]
    found = decode(data, channels=channels)
    assert found.dtype == np.float32
    assert found.shape == (1, 12, 20, channels)
    try:
        want = tf.io.decode_image(
            data, channels=channels, expand_animations=False
        ).numpy()  # as training.data.readers has it
    except tf.errors.InvalidArgumentError:  # CMYK does not become gray there
        want = tf.image.rgb_to_grayscale(
            tf.io.decode_image(data, channels=3, expand_animations=False)
        )
    np.testing.assert_array_equal(found[0], want)


@pytest.mark.parametrize(
    "kind", [kind for kind in kinds() if "jpeg" not in kind and "16" not in kind]
)
def test_as_pillow_decodes(kind):
    data = kinds()[kind]
    image = Image.open(io.BytesIO(data))
    rgba = np.asarray(image.convert("RGBA"))
    want = rgba[..., :3]
    assert ("alpha" in kind or "transparent" in kind or "rgba" in kind) == (
        rgba[..., 3].min() < 255
    )
    np.testing.assert_array_equal(decode(data)[0], want)
    np.testing.assert_array_equal(decode(data, channels=4)[0], rgba)
    if image.mode in ("L", "1"):
        np.testing.assert_array_equal(
            decode(data, channels=1)[0, ..., 0], np.asarray(image.convert("L"))
        )
    else:
        gray = np.asarray(Image.fromarray(want).convert("L"), "float32")
        np.testing.assert_allclose(decode(data, channels=1)[0, ..., 0], gray, atol=1)


@pytest.mark.parametrize("kind", [kind for kind in kinds() if "jpeg" in kind or "16" in kind])
def test_others_are_opaque(kind):
    colours, opaque = decode(kinds()[kind])[0], np.full((12, 20), 255)
    np.testing.assert_array_equal(
        decode(kinds()[kind], channels=4)[0], np.dstack([colours, opaque])
    )


class TestRefused:
    @pytest.mark.parametrize(
        "junk",
        [
            b"",
            b"G",
            b"no image",
            bytes(100),
            b"\x89PNG\r\n\x1a\n",
            b"\xff\xd8",
            b"BM" + bytes(60),
        ],
    )
    def test_what_is_no_image(self, junk):
        assert error(files.encode(files.noise()), junk) == "image 1 is no PNG or JPEG"

    @pytest.mark.parametrize("kind", ["GIF", "BMP", "WEBP", "TIFF"])
    def test_other_formats(self, kind):
        assert error(files.encode(files.noise(), kind)) == "image 0 is no PNG or JPEG"

    def test_no_image(self):
        assert error() == "image_bytes holds no image"

    def test_images_without_pixels(self):
        empty = files.png(0, 7, 8, 2, b"")
        assert error(empty) == "image 0 is 0 x 7 pixels"
        jpeg = bytearray(files.encode(files.noise(), "JPEG"))
        place = jpeg.index(b"\xff\xc0") + 5
        jpeg[place : place + 2] = b"\0\0"
        assert error(bytes(jpeg))

    def test_sizes_at_the_limit(self):
        for kind in ("PNG", "JPEG"):
            data = files.encode(files.noise(), kind)
            assert (
                error(data, max_pixels=239)
                == "image 0 is 20 x 12 pixels; at most 239 pixels are decoded"
            )
            assert decode(data, max_pixels=240).shape == (1, 12, 20, 3)

    @pytest.mark.parametrize(
        ("width", "height"),
        [(50_000, 50_000), (2**31 - 1, 2**31 - 1), (MAX_PIXELS + 1, 1), (1, MAX_PIXELS + 1)],
    )
    def test_sizes_in_a_png(self, width, height):
        message = error(files.encode(files.noise()), files.png(width, height, 8, 2, b""))
        assert (
            message == f"image 1 is {width} x {height} pixels; at most 50000000 pixels are decoded"
        )

    def test_texts_in_a_png_that_take_long(self):
        text = files.chunk(b"zTXt", b"k\0\0" + zlib.compress(b"some text"))
        data = files.encode(files.noise())
        assert decode(data[:33] + 20 * text + data[33:]).shape == (1, 12, 20, 3)
        assert error(data[:33] + 21 * text + data[33:]) == "image 0 is a PNG with too many parts"

    def test_scans_of_a_jpeg_that_take_long(self):
        data = files.encode(files.noise(), "JPEG", progressive=True)
        scan = data[data.rindex(b"\xff\xda") : -2]
        assert error(data[:-2] + 50 * scan + data[-2:]) == "image 0 is a JPEG with too many parts"

    def test_marks_of_scans_in_what_a_phone_adds(self):
        """Profiles, thumbnails and videos hold any bytes."""
        data = files.encode(files.noise(), "JPEG")
        marks = b"\xff\xda" * 30_000
        segments = 20 * (b"\xff\xe2" + struct.pack(">H", 2 + len(marks)) + marks)
        expected = decode(data)
        np.testing.assert_array_equal(decode(data[:2] + segments + data[2:]), expected)
        np.testing.assert_array_equal(decode(data + segments), expected)


@pytest.mark.parametrize(
    "kind", ["png rgb", "png palette transparent", "jpeg rgb", "jpeg progressive"]
)
def test_no_part_of_a_truncated_file(kind):
    data = kinds()[kind]
    whole = decode(data)
    decode_one = decoder()
    for length in [
        *range(0, len(data), max(1, len(data) // 60)),
        *range(len(data) - 20, len(data)),
    ]:
        try:
            pixels = decode_one(tf.constant([data[:length]])).numpy()
        except tf.errors.InvalidArgumentError:
            continue
        np.testing.assert_array_equal(pixels, whole)
        assert length >= len(data) - 1


FUZZED = {
    "max_pixels": 10_000,
    "preprocessing": Preprocessing((0.0,) * 3, (1.0,) * 3, 8, resize=9, crop="center"),
    "size": (8, 8),
}


def decodes_or_raises(data: bytes) -> None:
    try:
        pixels = decode(data, **FUZZED)
    except tf.errors.InvalidArgumentError:
        return
    assert pixels.shape == (1, 8, 8, 3)
    assert pixels.min() >= 0
    assert pixels.max() <= 255


@settings(max_examples=100, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(kinds())))
def test_corruptions(data, name):
    file = bytearray(kinds()[name])
    for _ in range(data.draw(st.integers(1, 4), "changes")):
        place = data.draw(st.integers(0, len(file) - 1), "place")
        change = data.draw(st.sampled_from(["byte", "cut", "insert", "double"]), "change")
        if change == "byte":
            file[place] = data.draw(st.integers(0, 255), "byte")
        elif change == "cut":
            del file[place : place + data.draw(st.integers(1, 30), "length")]
        elif change == "insert":
            file[place:place] = data.draw(st.binary(min_size=1, max_size=30), "bytes")
        else:
            file[place:place] = file[place : place + 200]
        if not file:
            break
    decodes_or_raises(bytes(file))


BOMBS = """
import resource, sys
from pathlib import Path
import numpy as np
import tensorflow as tf
from keras_preact.export._images import Decoder
from keras_preact.preprocessing import PREPROCESSING

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

spec = [tf.TensorSpec([None], tf.string)]
decoders = [Decoder((224, 224), 3, row) for row in (PREPROCESSING["imagenet"], None)]
decoders = [tf.function(decoder, input_signature=spec, autograph=False) for decoder in decoders]
good, *paths = sorted(Path(sys.argv[1]).iterdir())
for decode in decoders:
    assert decode([good.read_bytes()]).shape == (1, 224, 224, 3)
ballast = np.ones(1000 * 2**17)  # at least as much as the process has used at its highest
usual = peak()
# What would take any memory finds an end, here and not in the machine.
address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (address_space + 2 * 2**30,) * 2)
for path in paths:
    for decode in decoders:
        try:
            decode([path.read_bytes()])
            done = "decoded"
        except tf.errors.InvalidArgumentError as error:
            done = error.message.partition("<<")[2].partition(">>")[0] or error.message
        print(f"{path.name}: {peak() - usual} MB more: {done}")
"""


@pytest.mark.soak
def test_bombs_take_no_memory(tmp_path):
    """The highest use of memory of a process, beside the same process before it: of
    files that could take GB.
    """
    rows = bytes(50_001) * 1000  # of 50,000: the header is what counts
    bombs = {
        "large.png": (files.png(50_000, 50_000, 8, 0, rows), "image 0 is 50000 x 50000 pixels"),
        "strip.png": (files.encode(Image.new("L", (1_000_000, 1))), "decoded"),
        "tower.png": (files.encode(Image.new("L", (1, 1_000_000))), "decoded"),
        "strip.jpeg": (files.encode(Image.new("L", (65_000, 1)), "JPEG"), "decoded"),
    }
    (tmp_path / "0 good.png").write_bytes(files.encode(files.noise(600, 800)))
    for name, (data, _) in bombs.items():
        assert len(data) < 20 * 2**20
        (tmp_path / name).write_bytes(data)
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", BOMBS, str(tmp_path)], capture_output=True, text=True, cwd=root
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(bombs)
    for line in lines:
        name, more, outcome = line.split(": ", 2)
        assert int(more.split()[0]) < 250, line
        assert outcome.startswith(bombs[name][1]), line


def freeze(function):
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    return convert_variables_to_constants_v2(function)


def test_saved_and_frozen_it_refuses_the_same(tmp_path):
    """No operation calls Python, and no check is lost with the graph that nothing
    depends on.
    """
    module = tf.Module()
    module.decode = decoder()
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    concrete = loaded.decode.get_concrete_function()
    graph = concrete.graph.as_graph_def()
    operations = {
        node.op
        for part in [graph, *graph.library.function]
        for node in getattr(part, "node_def", None) or part.node
    }
    assert {"DecodePng", "DecodeJpeg", "Assert"} <= operations
    assert not any("PyFunc" in operation for operation in operations)
    good, large = files.encode(files.noise()), files.png(50_000, 50_000, 8, 2, b"")
    for run in (loaded.decode, freeze(concrete)):
        np.testing.assert_array_equal(
            np.asarray(run(tf.constant([good]))).reshape(12, 20, 3), files.noise()
        )
        for bad, message in (
            (b"junk", "is no PNG"),
            (large, "50000 x 50000"),
            (good[:-5], "Invalid PNG"),
        ):
            with pytest.raises(tf.errors.InvalidArgumentError, match=message):
                run(tf.constant([good, bad]))
        with pytest.raises(tf.errors.InvalidArgumentError, match="holds no image"):
            run(tf.constant([], tf.string))


def test_the_same_pixels_as_in_the_training_s_evaluation(tmp_path):
    """Files of all kinds, sizes and shapes, through both, to the last bit."""
    from training.config import Data
    from training.data import evaluation_batches, load

    shapes = [
        (60, 80),
        (81, 60),
        (37, 90),
        (28, 28),
        (32, 32),
        (5, 4),
        (300, 299),
        (29, 1000),
        (1, 700),
        (700, 2),
    ]
    data = [
        files.encode(files.noise(*shape, seed=i), ("PNG", "JPEG")[i % 2])
        for i, shape in enumerate(shapes)
    ]
    data += kinds().values()
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        for i, each in enumerate(data):
            (tmp_path / split / "a" / f"{i:03}.png").write_bytes(each)
        (tmp_path / split / "b").mkdir()
        (tmp_path / split / "b" / "other.png").write_bytes(data[0])
    source = load(Data("folder", dir=tmp_path))
    want, _ = next(evaluation_batches(source, source.test, len(data), 28).as_numpy_iterator())
    np.testing.assert_array_equal(decode(*data, size=(28, 28), preprocessing=source.standard), want)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"size": (0, 8)}, ("`size`", "size=0")),
        ({"channels": 2}, ("`channels` must be one of 1, 3, 4", "channels=2")),
        ({"max_pixels": 0}, ("`max_pixels`", "max_pixels=0")),
    ],
)
def test_bad_arguments(arguments, parts):
    with pytest.raises(ValueError, match="Received") as caught:
        Decoder(**{"size": (8, 8), "channels": 3} | arguments)
    assert all(part in str(caught.value) for part in parts)
