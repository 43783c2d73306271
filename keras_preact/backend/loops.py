"""Loops over stacked tensors on each backend.

A step is a function `(carry, slices) -> (carry, outputs)`. A loop of n steps takes
tensors with a leading axis of n and gives each step its slices; it returns the last
carry and, with such an axis again, what the steps returned. Slices and outputs are
nested structures of tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops, tree

Step = Callable[[Any, Any], tuple[Any, Any]]

#: Backends that have a loop whose body is traced and compiled once.
SCAN_BACKENDS = ("jax", "tensorflow")


def repeat(
    step: Step,
    carry,
    stacked,
    length: int,
    outputs,
    *,
    execution: str,
    remat: int = 0,
    unroll: int = 1,
):
    """Run `step` for each slice in turn.

    Args:
        step: The step.
        carry: What the first step gets, one tensor.
        stacked: A structure of tensors with a leading axis of `length`.
        length: Number of steps.
        outputs: A structure of `keras.KerasTensor`: shape and dtype of what a step
            returns beside its carry. A loop does not need it.
        execution: `"scan"` or `"loop"`.
        remat: Steps per segment whose inside is recomputed for the gradient; 0 for
            none.
        unroll: Steps in the body of a scan.
    """
    returned: list = []
    specs = [(spec.shape, spec.dtype) for spec in tree.flatten(outputs)]

    def flat_step(carry, slices):
        carry, result = step(carry, tree.pack_sequence_as(stacked, slices))
        returned[:] = [result]
        return carry, tree.flatten(result)

    def unrolled(carry, rows):
        return _loop(flat_step, carry, rows, rows[0].shape[0], specs)

    def run(carry, rows, steps):
        if execution == "loop":
            return _loop(flat_step, carry, rows, steps, specs)
        if unroll > 1:
            return _in_segments(_scan, unrolled, unroll, carry, rows, steps, specs)
        return _scan(flat_step, carry, rows, steps, specs)

    rows = tree.flatten(stacked)
    if remat:
        over_segments = _loop if execution == "loop" else _scan
        segment = _remat(lambda carry, rows: run(carry, rows, rows[0].shape[0]), specs)
        carry, flat = _in_segments(over_segments, segment, remat, carry, rows, length, specs)
    else:
        carry, flat = run(carry, rows, length)
    return carry, tree.pack_sequence_as(returned[0], flat)


def _remat(segment: Step, outputs: Sequence) -> Step:
    """Return `segment` as one whose inside is computed again for the gradient."""
    if keras.backend.backend() != "tensorflow":
        return keras.remat(segment)
    import tensorflow as tf

    # An integer output, such as a seed, has no gradient inside a tf.while_loop, not even 0:
    # `tf.recompute_grad` fails there.
    def in_floats(carry, rows):
        carry, results = segment(carry, rows)
        return carry, [
            tf.cast(result, tf.float64) if result.dtype.is_integer else result for result in results
        ]

    computed_again = keras.remat(in_floats)

    def run(carry, rows):
        carry, results = computed_again(carry, rows)
        return carry, [
            tf.cast(result, dtype) for result, (_, dtype) in zip(results, outputs, strict=True)
        ]

    return run


def _in_segments(run: Callable, segment: Step, size: int, carry, stacked, length, outputs):
    """`run` the `segment`, which takes slices of up to `size` steps, until all `length`
    steps are done.
    """
    whole = length // size
    ends = whole * size
    rows = [ops.reshape(tensor[:ends], (whole, size, *ops.shape(tensor)[1:])) for tensor in stacked]
    segments_outputs = [((size, *shape), dtype) for shape, dtype in outputs]
    results: list = []
    if whole:
        carry, parts = run(segment, carry, rows, whole, segments_outputs)
        results = [ops.reshape(part, (ends, *ops.shape(part)[2:])) for part in parts]
    if ends < length:
        carry, rest = segment(carry, [tensor[ends:] for tensor in stacked])
        results = (
            [ops.concatenate(pair) for pair in zip(results, rest, strict=True)] if whole else rest
        )
    return carry, results


def _loop(step: Step, carry, stacked: list, length: int, outputs: Sequence):
    """As many copies of `step` in the graph as there are slices; `outputs` is for a
    scan alone.
    """
    rows = [_unstack(tensor, length) for tensor in stacked]
    results = []
    for i in range(length):
        carry, output = step(carry, [row[i] for row in rows])
        results.append(output)
    return carry, [ops.stack(column) for column in zip(*results, strict=True)]


def _unstack(tensor, length: int) -> list:
    if keras.backend.backend() == "jax":
        # The gradient of n single slices is a sum of n arrays of the full size, the gradient of a
        # split is one concatenation.
        return [ops.squeeze(part, 0) for part in ops.split(tensor, length)]
    return ops.unstack(tensor, length)


def _scan(step: Step, carry, stacked: list, length: int, outputs: Sequence):
    """One copy of `step` in the graph."""
    if keras.backend.backend() == "tensorflow":
        return _scan_tensorflow(step, carry, stacked, length, outputs)
    import jax

    return jax.lax.scan(step, carry, stacked, length)


def _scan_tensorflow(step, carry, stacked, length, outputs):
    """As `keras.ops.scan`, which fails on TensorFlow where outputs differ in shape."""
    import tensorflow as tf

    # Slices come from TensorArrays: the gradient of indexing a tensor in a loop is a sum of n
    # tensors of the full size.
    rows = [
        tf.TensorArray(tensor.dtype, length, element_shape=tensor.shape[1:]).unstack(tensor)
        for tensor in stacked
    ]
    results = [tf.TensorArray(dtype, length, element_shape=shape) for shape, dtype in outputs]
    shape = carry.shape

    def body(i, carry, *results):
        carry, output = step(carry, [row.read(i) for row in rows])
        written = (result.write(i, tensor) for result, tensor in zip(results, output, strict=True))
        return i + 1, tf.ensure_shape(carry, shape), *written

    start = (tf.constant(0), carry, *results)
    _, carry, *results = tf.while_loop(
        lambda i, *_: i < length, body, start, maximum_iterations=length
    )
    return carry, [result.stack() for result in results]
