"""Encoded images to pixels, with TensorFlow operations alone, for the graph that is
served.

Nothing is decoded before its header has been read: some KB can hold an image of any
size. What is wrong ends in an InvalidArgumentError; of those that the graph raises
itself, the sentence for the client stands between `<<` and `>>`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from keras_preact import _checks
from keras_preact.export import _gif
from keras_preact.export._guards import ensure
from keras_preact.preprocessing import Preprocessing, resize_image

#: Height times width of the largest image that is decoded.
MAX_PIXELS = 50_000_000


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of image files.

    Args:
        name: What it is called.
        magic: What a file may begin with.
        read_header: From a file and what messages call it to the file to decode and its
            canvas, int64 `(4,)`: height, width, and the pixels' distances from above
            and from the left.
        decode: From these two and a number of channels, 1 or 3, to uint8 `(height,
            width, channels)`.
        channels: What `decode` takes.
        limits: Bytes to how often a file may hold them, of what costs time whatever the
            size of the image.
    """

    name: str
    magic: tuple[bytes, ...]
    read_header: Callable[[Any, Any], tuple[Any, Any]]
    decode: Callable[[Any, Any, int], Any]
    channels: tuple[int, ...]
    limits: Mapping[bytes, int] = dataclasses.field(default_factory=dict)


def _png_header(file, name):
    import tensorflow as tf

    header = tf.strings.substr(tf.strings.join([file, bytes(8)]), 16, 8)
    width_height = tf.ensure_shape(tf.io.decode_raw(header, tf.int32, little_endian=False), [2])
    return file, tf.concat([tf.cast(tf.reverse(width_height, [0]), tf.int64), [0, 0]], axis=0)


def _jpeg_header(file, name):
    import tensorflow as tf

    return file, tf.concat(
        [tf.image.extract_jpeg_shape(file, output_type=tf.int64)[:2], [0, 0]], axis=0
    )


def _decode_jpeg(file, canvas, channels):
    import tensorflow as tf

    if channels == 3:
        return tf.io.decode_jpeg(file, channels=3)
    return tf.cond(
        tf.image.extract_jpeg_shape(file)[2] == 4,  # the decoder turns CMYK into colours only
        lambda: tf.image.rgb_to_grayscale(tf.io.decode_jpeg(file, channels=3)),
        lambda: tf.io.decode_jpeg(file, channels=1),
    )


def _decode_png(file, canvas, channels):
    import tensorflow as tf

    if channels < 4:
        return tf.io.decode_png(file, channels=channels)
    # What is opaque in a file of fewer than 8 bits a channel, the decoder gives another value.
    with_alpha = tf.io.decode_raw(tf.strings.substr(file, 25, 1), tf.uint8)[0] & 4 > 0
    before_data = tf.strings.split(file, b"IDAT", maxsplit=1)[0]
    transparent = tf.size(tf.strings.split(before_data, b"tRNS", maxsplit=1)) > 1
    return tf.cond(
        with_alpha | transparent,
        lambda: tf.io.decode_png(file, channels=4),
        lambda: _opaque(tf.io.decode_png(file, channels=3)),
    )


def _opaque(colours):
    """Return uint8 (height, width, 4)."""
    import tensorflow as tf

    return tf.pad(colours, [[0, 0], [0, 0], [0, 1]], constant_values=255)


def _decode_gif(file, canvas, channels):
    import tensorflow as tf

    pixels = _gif.decode(file, canvas)
    return pixels if channels == 3 else tf.image.rgb_to_grayscale(pixels)


FORMATS = (
    Format(
        name="PNG",
        magic=(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",),
        read_header=_png_header,
        decode=_decode_png,
        channels=(1, 3, 4),
        limits={b"zTXt": 20, b"iTXt": 20},  # texts, unpacked to 8 MB each before they are dropped
    ),
    Format(
        name="JPEG",
        magic=(b"\xff\xd8\xff",),
        read_header=_jpeg_header,
        decode=_decode_jpeg,
        channels=(1, 3),
        limits={
            b"\xff\xda": 50
        },  # scans, each of which may go over the whole image; a progressive file has about ten
    ),
    Format(
        name="GIF",
        magic=(b"GIF87a", b"GIF89a"),
        read_header=_gif.first_frame,
        decode=_decode_gif,
        channels=(1, 3),
    ),
)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Encoded images to the pixels that a network was evaluated on.

    The files are PNG, JPEG or GIF. They are read as the training reads them: of 16 bits
    a channel the upper 8 count, and with 1 or 3 channels transparency is dropped. With
    4 channels, an image without transparency is opaque. A GIF gives its first frame,
    black where that is transparent. The orientation in a photograph's EXIF data is not
    applied.

    Args:
        size: Height and width of the pixels that leave.
        channels: 1, 3 or 4.
        preprocessing: How images of another size are brought to it (`resize_image`).
            None: as a whole.
        max_pixels: Height times width of the largest image that is decoded.

    Raises:
        ValueError: for arguments other than these.
    """

    size: tuple[int, int]
    channels: int
    preprocessing: Preprocessing | None = None
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        height, width = self.size
        _checks.positive_int(height, "size")
        _checks.positive_int(width, "size")
        _checks.one_of(self.channels, (1, 3, 4), "channels")
        _checks.positive_int(self.max_pixels, "max_pixels")

    def __call__(self, image_bytes):
        """Return pixels from 0 to 255, float32 `(n, height, width, channels)`.

        Args:
            image_bytes: String tensor `(n,)`, a file each.

        Raises:
            InvalidArgumentError: (when it runs) for no image; an image of another
                format, of more than `max_pixels`, of no pixels; a damaged one; never a
                part of one.
        """
        import tensorflow as tf

        with tf.device("/CPU:0"):  # where the operations of images are, all of them
            number = tf.shape(image_bytes)[0]
            image_bytes = ensure(number > 0, image_bytes, "image_bytes holds no image")
            # One at a time: the memory is that of one image, however many come.
            return tf.map_fn(
                lambda numbered: self._decode(*numbered),
                (tf.range(number), image_bytes),
                fn_output_signature=tf.TensorSpec((*self.size, self.channels), tf.float32),
                parallel_iterations=1,
            )

    def _decode(self, number, file):
        """Return the pixels of one file, float32 (height, width, channels)."""
        import tensorflow as tf

        name = tf.strings.join(["image ", tf.strings.as_string(number)])
        fits = [
            tf.reduce_any([tf.strings.substr(file, 0, len(magic)) == magic for magic in row.magic])
            for row in FORMATS
        ]
        *others, last = [row.name for row in FORMATS]
        file = ensure(tf.reduce_any(fits), file, name, f" is no {', '.join(others)} or {last}")
        which = tf.argmax(tf.cast(fits, tf.int32), output_type=tf.int32)
        file, canvas = tf.switch_case(
            which, [functools.partial(_read_header, row, file, name) for row in FORMATS]
        )
        canvas = tf.ensure_shape(canvas, [4])
        height, width = canvas[0], canvas[1]
        words = [
            name,
            " is ",
            tf.strings.as_string(width),
            " x ",
            tf.strings.as_string(height),
            " pixels",
        ]
        file = ensure((height > 0) & (width > 0), file, *words)
        # A quotient, as a product could be too large for 64 bits.
        small = height <= self.max_pixels // tf.maximum(width, 1)
        file = ensure(small, file, *words, f"; at most {self.max_pixels} pixels are decoded")
        pixels = tf.switch_case(
            which, [functools.partial(self._read, row, file, canvas) for row in FORMATS]
        )
        return resize_image(pixels, self.preprocessing, self.size)

    def _read(self, row: Format, file, canvas):
        """Return the pixels of a file at its own size, uint8 (height, width, channels)."""
        import tensorflow as tf

        if self.channels in row.channels:
            pixels = row.decode(file, canvas, self.channels)
        else:
            pixels = _opaque(row.decode(file, canvas, 3))
        return tf.ensure_shape(pixels, [None, None, self.channels])


def _read_header(row: Format, file, name):
    import tensorflow as tf

    for part, most in row.limits.items():
        pieces = tf.size(tf.strings.split(file, part, maxsplit=most + 1))
        file = ensure(pieces <= most + 1, file, name, f" is a {row.name} with too many parts")
    return row.read_header(file, name)
