"""The first frame of a GIF, found with TensorFlow operations.

TensorFlow's decoder unpacks every frame of the file, whatever it is asked for: some KB
of empty frames fill any memory. So what lies behind the first frame is cut off.
TensorFlow also takes the largest frame for the whole image; the frame is put to its
place on the GIF's screen here.
"""

from keras_preact.export._guards import ensure

#: Runs of equal blocks in a file that are followed before it is refused. Files have a handful, or a
#: few hundred with metadata.
MAX_RUNS = 10_000
#: Blocks of a run that are looked at together.
WINDOW = 4096

EXTENSION, IMAGE = 0x21, 0x2C
HEADER = 13
DESCRIPTOR = 10


def first_frame(file, name):
    """Return a GIF without what follows its first frame, and where on its screen that
    frame belongs.

    Args:
        file: Scalar string that begins as a GIF.
        name: Scalar string, what messages call the image.

    Returns:
        `(file, canvas)`: a scalar string, a GIF that is filled by its one frame; and
            int64 `(4,)`, height and width of the
        screen, grown where the frame exceeds it, and the frame's distances from above
        and from the left.

    Raises:
        InvalidArgumentError: (when it runs) if there is no whole frame.
    """
    import tensorflow as tf

    start, end = _find(file)
    length = tf.strings.length(file)
    file = ensure(
        (start > 0) & (end <= length), file, name, " is a GIF without a whole first frame"
    )
    screen = tf.reverse(_numbers(tf.strings.substr(file, 6, 4), 2), [0])
    box = _numbers(tf.strings.substr(file, start + 1, 8), 4)
    place, extent = (
        tf.gather(box, [1, 0]),
        tf.gather(box, [3, 2]),
    )  # from above and from the left, height and width
    extent = ensure(tf.reduce_all(extent > 0), extent, name, " is a GIF with an empty first frame")
    canvas = tf.concat([tf.maximum(screen, place + extent), place], axis=0)
    parts = [
        tf.strings.substr(file, 0, start + 1),
        bytes(4),
        tf.strings.substr(file, start + 5, end - start - 5),
        b";",
    ]
    return tf.strings.join(parts), canvas


def decode(file, canvas):
    """Return uint8 `(height, width, 3)` of what `first_frame` returned; black where
    nothing is drawn.
    """
    import tensorflow as tf

    frame = tf.io.decode_gif(file)[0]
    size, place = tf.split(tf.cast(canvas, tf.int32), 2)
    after = size - place - tf.shape(frame)[:2]
    return tf.pad(frame, tf.stack([[place[0], after[0]], [place[1], after[1]], [0, 0]]))


def _numbers(text, count):
    """Return the 16-bit numbers in a string, as int64."""
    import tensorflow as tf

    return tf.cast(
        tf.ensure_shape(tf.io.decode_raw(text, tf.uint16, little_endian=True), [count]), tf.int64
    )


def _find(file):
    """Return the places of the first frame's descriptor and behind its data, int32; the
    second exceeds a file cut off there.

    The first is 0 where there is no frame.
    """
    import tensorflow as tf

    length = tf.strings.length(file)
    # What is read behind the end is 0: it ends a chain of blocks, and is neither an extension nor a
    # frame.
    data = tf.io.decode_raw(tf.strings.join([file, bytes(HEADER + DESCRIPTOR)]), tf.uint8)

    def byte(place):
        return tf.cast(data[place], tf.int32)

    def table(place):
        """The length of the colour table that the flags at this place speak of."""
        flags = byte(place)
        return tf.where(flags >= 128, 3 * tf.bitwise.left_shift(2, flags % 8), 0)

    def go_on(at, start, in_blocks, done):
        return ~done

    def step(at, start, in_blocks, done):
        return tf.cond(in_blocks, lambda: blocks(at, start), lambda: record(at))

    def record(at):
        """An extension or a frame: what follows both is a chain of blocks, each with
        its length before it.
        """
        kind = byte(at)
        is_image = kind == IMAGE
        behind = at + tf.where(is_image, DESCRIPTOR + table(at + DESCRIPTOR - 1) + 1, 2)
        known = is_image | (kind == EXTENSION)
        return tf.minimum(behind, length), tf.where(is_image, at, 0), known, ~known

    def blocks(at, start):
        """As many blocks of the same length as follow one another; or the empty one,
        which ends the chain.
        """
        size = byte(at)
        run = data[at : at + WINDOW * (size + 1) : size + 1]
        same = tf.math.cumprod(tf.cast(run == data[at], tf.int32))
        last = size == 0
        behind = at + tf.where(last, 1, tf.reduce_sum(same) * (size + 1))
        return tf.where(last, behind, tf.minimum(behind, length)), start, ~last, last & (start > 0)

    first = tf.minimum(HEADER + table(10), length)
    state = (first, tf.constant(0), tf.constant(False), tf.constant(False))
    at, start, _, done = tf.while_loop(
        go_on, step, state, maximum_iterations=MAX_RUNS, parallel_iterations=1
    )
    return tf.where(done, start, 0), at
