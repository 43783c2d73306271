"""Decode image files with TensorFlow operations, for the served graph.

The header is read before anything is decoded: a few KB can hold an image of any size.
A wrong file raises an InvalidArgumentError. If the graph raises it itself, the sentence
for the client is between `<<` and `>>`.
"""

import dataclasses

from keras_preact import _checks
from keras_preact.preprocessing import Preprocessing, resize_image

#: Height times width of the largest image that is decoded.
MAX_PIXELS = 50_000_000


def ensure(condition, value, *words):
    """Return `value`, or raise an InvalidArgumentError with a sentence between `<<` and
    `>>` if the condition is false.

    Args:
        condition: Boolean scalar.
        value: The tensor that must not be used otherwise. What does not depend on a
            check may run without it.
        words: The sentence, strings or string tensors.
    """
    import tensorflow as tf

    holds = tf.raw_ops.Assert(condition=condition, data=[tf.strings.join(["<<", *words, ">>"])])
    with tf.control_dependencies([holds]):
        return tf.identity(value)


#: First bytes of the files.
PNG, JPEG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\xff\xd8\xff"

#: Texts in a PNG, unpacked to 8 MB each before they are dropped; how many of a kind may be there.
_TEXTS, _MOST_TEXTS = (b"zTXt", b"iTXt"), 20
#: Scans in a JPEG, each of which may cover the whole image. A progressive file has about ten. The
#: length and the number of channels, 1 to 4, belong to the mark: its first two bytes alone are in
#: any large profile, thumbnail or video that a phone adds.
_SCANS, _MOST_SCANS = tuple(b"\xff\xda\0%c%c" % (6 + 2 * n, n) for n in (1, 2, 3, 4)), 50


def _png_size(file, name):
    """Return the height and width of a PNG, int64 (2,), or refuse it."""
    import tensorflow as tf

    few = [_count(file, mark, _MOST_TEXTS) <= _MOST_TEXTS for mark in _TEXTS]
    file = ensure(tf.reduce_all(few), file, name, " is a PNG with too many parts")
    header = tf.strings.substr(tf.strings.join([file, bytes(8)]), 16, 8)
    width_height = tf.ensure_shape(tf.io.decode_raw(header, tf.int32, little_endian=False), [2])
    return tf.cast(tf.reverse(width_height, [0]), tf.int64)


def _jpeg_size(file, name):
    """Return the height and width of a JPEG, int64 (2,), or refuse it."""
    import tensorflow as tf

    scans = tf.add_n([_count(file, mark, _MOST_SCANS) for mark in _SCANS])
    file = ensure(scans <= _MOST_SCANS, file, name, " is a JPEG with too many parts")
    return tf.image.extract_jpeg_shape(file, output_type=tf.int64)[:2]


def _count(file, mark: bytes, most: int):
    """Return how often `mark` is in a file; counting ends after `most`."""
    import tensorflow as tf

    return tf.size(tf.strings.split(file, mark, maxsplit=most + 1)) - 1


def _decode_png(file, channels):
    """Return uint8 (height, width, channels)."""
    import tensorflow as tf

    if channels < 4:
        return tf.io.decode_png(file, channels=channels)
    # What is opaque in a file of fewer than 8 bits a channel, the decoder gives another value.
    with_alpha = tf.io.decode_raw(tf.strings.substr(file, 25, 1), tf.uint8)[0] & 4 > 0
    before_data = tf.strings.split(file, b"IDAT", maxsplit=1)[0]
    return tf.cond(
        with_alpha | (_count(before_data, b"tRNS", 1) > 0),
        lambda: tf.io.decode_png(file, channels=4),
        lambda: _opaque(tf.io.decode_png(file, channels=3)),
    )


def _decode_jpeg(file, channels):
    """Return uint8 (height, width, channels)."""
    import tensorflow as tf

    if channels == 4:
        return _opaque(tf.io.decode_jpeg(file, channels=3))
    if channels == 3:
        return tf.io.decode_jpeg(file, channels=3)
    return tf.cond(
        tf.image.extract_jpeg_shape(file)[2] == 4,  # the decoder turns CMYK into colours only
        lambda: tf.image.rgb_to_grayscale(tf.io.decode_jpeg(file, channels=3)),
        lambda: tf.io.decode_jpeg(file, channels=1),
    )


def _opaque(colours):
    """Return uint8 (height, width, 4)."""
    import tensorflow as tf

    return tf.pad(colours, [[0, 0], [0, 0], [0, 1]], constant_values=255)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Turns image files into the pixels that a network was evaluated on.

    The files are PNG or JPEG, read as in training: of 16 bits per channel the upper 8
    count, and with 1 or 3 channels transparency is dropped. With 4 channels, an image
    without transparency is opaque. The orientation in a photograph's EXIF data is not
    applied.

    Args:
        size: Height and width of the result.
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
            InvalidArgumentError: (when it runs) for no image, a file of another type,
                an image of no pixels or more than `max_pixels`, a damaged or
                incomplete file.
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
        is_png, is_jpeg = (tf.strings.substr(file, 0, len(kind)) == kind for kind in (PNG, JPEG))
        file = ensure(is_png | is_jpeg, file, name, " is no PNG or JPEG")
        size = tf.cond(is_png, lambda: _png_size(file, name), lambda: _jpeg_size(file, name))
        height, width = tf.unstack(tf.ensure_shape(size, [2]))
        sides = (tf.strings.as_string(width), " x ", tf.strings.as_string(height))
        words = [name, " is ", *sides, " pixels"]
        file = ensure((height > 0) & (width > 0), file, *words)
        # A quotient: the product could be too large for 64 bits.
        small = height <= self.max_pixels // tf.maximum(width, 1)
        file = ensure(small, file, *words, f"; at most {self.max_pixels} pixels are decoded")
        pixels = tf.cond(
            is_png,
            lambda: _decode_png(file, self.channels),
            lambda: _decode_jpeg(file, self.channels),
        )
        pixels = tf.ensure_shape(pixels, [None, None, self.channels])
        return resize_image(pixels, self.preprocessing, self.size)
