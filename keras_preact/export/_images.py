"""Decode image files with TensorFlow operations, for the served graph.

The header is read before anything is decoded: a few KB can hold an image of any size.
A wrong file raises an InvalidArgumentError. If the graph raises it itself, the sentence
for the client is between `<<` and `>>`.
"""

from collections.abc import Callable

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


def decoder(
    size: tuple[int, int],
    channels: int,
    preprocessing: Preprocessing | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Callable:
    """Return the function from image files to the pixels that a network was evaluated on:
    from a string tensor `(n,)`, a file each, to pixels from 0 to 255, float32
    `(n, height, width, channels)`.

    The files are PNG or JPEG, read as in training: of 16 bits per channel the upper 8
    count, and transparency is dropped. The orientation in a photograph's EXIF data is
    not applied. When it runs, the function raises an InvalidArgumentError for no image,
    a file of another type, an image of no pixels or more than `max_pixels`, a damaged or
    incomplete file, and a JPEG in CMYK for 1 channel.

    Args:
        size: Height and width of the result.
        channels: 1 or 3.
        preprocessing: How images of another size are brought to it (`resize_image`).
            None: as a whole.
        max_pixels: Height times width of the largest image that is decoded.
    """
    import tensorflow as tf

    def decode_one(numbered):
        number, file = numbered
        name = tf.strings.join(["image ", tf.strings.as_string(number)])
        file = _checked(file, name, max_pixels)
        pixels = tf.io.decode_image(file, channels=channels, expand_animations=False)
        return resize_image(tf.ensure_shape(pixels, [None, None, channels]), preprocessing, size)

    def decode(image_bytes):
        with tf.device("/CPU:0"):  # where the operations of images are, all of them
            number = tf.shape(image_bytes)[0]
            image_bytes = ensure(number > 0, image_bytes, "image_bytes holds no image")
            # One at a time: the memory is that of one image, however many come.
            return tf.map_fn(
                decode_one,
                (tf.range(number), image_bytes),
                fn_output_signature=tf.TensorSpec((*size, channels), tf.float32),
                parallel_iterations=1,
            )

    return decode


def _checked(file, name, max_pixels: int):
    """Return a file, or refuse it for what its header says."""
    import tensorflow as tf

    is_png, is_jpeg = (tf.strings.substr(file, 0, len(kind)) == kind for kind in (PNG, JPEG))
    file = ensure(is_png | is_jpeg, file, name, " is no PNG or JPEG")
    size = tf.cond(is_png, lambda: _png_size(file, name), lambda: _jpeg_size(file, name))
    height, width = tf.unstack(tf.ensure_shape(size, [2]))
    sides = (tf.strings.as_string(width), " x ", tf.strings.as_string(height))
    words = [name, " is ", *sides, " pixels"]
    file = ensure((height > 0) & (width > 0), file, *words)
    # A quotient: the product could be too large for 64 bits.
    small = height <= max_pixels // tf.maximum(width, 1)
    return ensure(small, file, *words, f"; at most {max_pixels} pixels are decoded")
