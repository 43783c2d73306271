"""Decode image files with TensorFlow operations, for the served graph.

The header is read before anything is decoded: a few KB can hold an image of any size.
A wrong file raises an InvalidArgumentError. If a check here raises it, the sentence for
the client is between `<<` and `>>`.
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
        value: Tensor to return. Later operations must use the returned tensor:
            otherwise they may run although the check fails.
        words: Parts of the sentence, strings or string tensors.
    """
    import tensorflow as tf

    check = tf.raw_ops.Assert(condition=condition, data=[tf.strings.join(["<<", *words, ">>"])])
    with tf.control_dependencies([check]):
        return tf.identity(value)


#: First bytes of PNG and JPEG files.
PNG, JPEG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\xff\xd8\xff"

#: Types of text in a PNG, and the most texts of each type. Each text is unpacked, to up to 8 MB,
#: before it is dropped.
_TEXTS, _MOST_TEXTS = (b"zTXt", b"iTXt"), 20
#: Markers of scans in a JPEG, and the most scans. Each may cover the whole image. A progressive
#: file has about ten. The markers include the length and the number of channels, 1 to 4: the first
#: two bytes alone are also in any large profile, thumbnail or video that a phone adds.
_SCANS, _MOST_SCANS = tuple(b"\xff\xda\0%c%c" % (6 + 2 * n, n) for n in (1, 2, 3, 4)), 50


def _png_size(file, name):
    """Return the height and width of a PNG, int64 (2,), or refuse it."""
    import tensorflow as tf

    few_texts = [_count(file, mark, _MOST_TEXTS) <= _MOST_TEXTS for mark in _TEXTS]
    file = ensure(tf.reduce_all(few_texts), file, name, " is a PNG with too many parts")
    header = tf.strings.substr(tf.strings.join([file, bytes(8)]), 16, 8)
    width_height = tf.ensure_shape(tf.io.decode_raw(header, tf.int32, little_endian=False), [2])
    return tf.cast(tf.reverse(width_height, [0]), tf.int64)


def _jpeg_size(file, name):
    """Return the height and width of a JPEG, int64 (2,), or refuse it."""
    import tensorflow as tf

    scans = tf.add_n([_count(file, mark, _MOST_SCANS) for mark in _SCANS])
    file = ensure(scans <= _MOST_SCANS, file, name, " is a JPEG with too many parts")
    return tf.image.extract_jpeg_shape(file, output_type=tf.int64)[:2]


def _webp_size(file, name):
    """Return the height and width of a WebP, int64 (2,), or refuse it. They are 0 if it
    begins with none of the three chunks that may be the first one.
    """
    import tensorflow as tf

    start = _start(file)

    def number(place: int, length: int):
        return sum(start[place + i] * 256**i for i in range(length))

    bits = number(21, 4)
    sides = {
        b"VP8 ": (number(28, 2) % 2**14, number(26, 2) % 2**14),
        b"VP8L": (bits // 2**14 % 2**14 + 1, bits % 2**14 + 1),
        b"VP8X": (number(27, 3) + 1, number(24, 3) + 1),
    }
    size = sum(
        tf.stack(each) * tf.cast(_has(start, 12, mark), tf.int64) for mark, each in sides.items()
    )
    # with a free number of channels, TensorFlow decodes an animation beyond its memory
    is_animated = _has(start, 12, b"VP8X") & (start[20] & 2 > 0)
    return ensure(~is_animated, size, name, " is an animated WebP")


def _count(file, mark: bytes, most: int):
    """Return how often `mark` is in a file, at most `most` + 1."""
    import tensorflow as tf

    return tf.size(tf.strings.split(file, mark, maxsplit=most + 1)) - 1


def decoder(
    size: tuple[int, int],
    channels: int,
    preprocessing: Preprocessing | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Callable:
    """Return the function from image files to the pixels that an evaluation would use.

    It takes a string tensor `(n,)` with one file per entry, and returns pixels from 0
    to 255, float32 `(n, height, width, channels)`. The files are PNG, JPEG or WebP and
    are read as in training: only the upper 8 of 16 bits per channel count, and
    transparency is dropped. The orientation in a photograph's EXIF data is not applied.
    When it runs, the function raises an InvalidArgumentError for no image, a file of
    another type, an animation, an image of no pixels or more than `max_pixels`, a
    damaged or incomplete file, and a JPEG in CMYK for 1 channel.

    Args:
        size: Height and width of the result.
        channels: 1 or 3.
        preprocessing: How images of another size are resized (`resize_image`). None:
            the whole image is resized.
        max_pixels: Height times width of the largest image that is decoded.
    """
    import tensorflow as tf

    def decode_one(numbered):
        number, file = numbered
        name = tf.strings.join(["image ", tf.strings.as_string(number)])
        file = _checked(file, name, max_pixels)
        pixels = tf.cond(
            _is_webp(file),
            lambda: _decode_webp(file, channels),
            lambda: tf.io.decode_image(file, channels=channels, expand_animations=False),
        )
        return resize_image(tf.ensure_shape(pixels, [None, None, channels]), preprocessing, size)

    def decode(image_bytes):
        with tf.device("/CPU:0"):  # only there are all operations on images
            number = tf.shape(image_bytes)[0]
            image_bytes = ensure(number > 0, image_bytes, "image_bytes holds no image")
            # One at a time: the memory of one image is enough, however many come.
            return tf.map_fn(
                decode_one,
                (tf.range(number), image_bytes),
                fn_output_signature=tf.TensorSpec((*size, channels), tf.float32),
                parallel_iterations=1,
            )

    return decode


def _is_webp(file):
    start = _start(file)
    return _has(start, 0, b"RIFF") & _has(start, 8, b"WEBP")


def _start(file):
    """Return the first 30 bytes of a file, int64 (30,), followed by zeros if it is shorter."""
    import tensorflow as tf

    start = tf.strings.substr(file, 0, 30)
    return tf.cast(tf.io.decode_raw(start, tf.uint8, fixed_length=30), tf.int64)


def _has(start, place: int, mark: bytes):
    import tensorflow as tf

    return tf.reduce_all(start[place : place + len(mark)] == list(mark))


def _decode_webp(file, channels: int):
    """Return the pixels of a WebP. TensorFlow decodes it to colours, with transparency if it
    has that.
    """
    import tensorflow as tf

    pixels = tf.io.decode_image(file, expand_animations=False)
    pixels = tf.ensure_shape(pixels[..., :3], [None, None, 3])
    return tf.image.rgb_to_grayscale(pixels) if channels == 1 else pixels


def _checked(file, name, max_pixels: int):
    """Return a file, or refuse it because of its header."""
    import tensorflow as tf

    is_png, is_jpeg = (tf.strings.substr(file, 0, len(start)) == start for start in (PNG, JPEG))
    is_webp = _is_webp(file)
    file = ensure(is_png | is_jpeg | is_webp, file, name, " is no PNG, JPEG or WebP")
    size = tf.case(
        [
            (is_png, lambda: _png_size(file, name)),
            (is_webp, lambda: _webp_size(file, name)),
        ],
        lambda: _jpeg_size(file, name),
    )
    height, width = tf.unstack(tf.ensure_shape(size, [2]))
    sides = (tf.strings.as_string(width), " x ", tf.strings.as_string(height))
    words = [name, " is ", *sides, " pixels"]
    file = ensure((height > 0) & (width > 0), file, *words)
    # A quotient: the product could be too large for 64 bits.
    small = height <= max_pixels // tf.maximum(width, 1)
    return ensure(small, file, *words, f"; at most {max_pixels} pixels are decoded")
