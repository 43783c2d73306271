"""Loops over stacked tensors on each backend.

A step is a function `(carry, slices) -> (carry, outputs)`. A loop of n steps takes
tensors with a leading axis of n and gives each step its slices. It returns the last
carry and the outputs of all steps, stacked along a leading axis of n. Slices and
outputs are nested structures of tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops, tree

Step = Callable[[Any, Any], tuple[Any, Any]]

#: Backends with a loop that traces and compiles its body once.
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
        step: Function `(carry, slices) -> (carry, outputs)`.
        carry: Carry of the first step, one tensor.
        stacked: A structure of tensors with a leading axis of `length`.
        length: Number of steps.
        outputs: A structure of `keras.KerasTensor`: shape and dtype of a step's
            outputs. A loop without remat does not need it.
        execution: `"scan"` or `"loop"`.
        remat: Number of steps per rematerialised segment; 0: no rematerialisation.
        unroll: Number of steps in the body of a scan.
    """
    rows = tree.flatten(stacked)
    count = len(rows)
    rows = rows or [ops.zeros((length,))]  # segments read their length from a row
    structure: list = []
    specs = [(spec.shape, spec.dtype) for spec in tree.flatten(outputs)]

    def flat_step(carry, slices):
        carry, result = step(carry, tree.pack_sequence_as(stacked, slices[:count]))
        # Not the tensors: JAX calls what leaves its loop in this way a leak.
        structure[:] = [tree.map_structure(lambda tensor: None, result)]
        return carry, tree.flatten(result)

    def unrolled(carry, rows):
        return _loop(flat_step, carry, rows, rows[0].shape[0], specs)

    def run(carry, rows, steps):
        if execution == "loop":
            return _loop(flat_step, carry, rows, steps, specs)
        if unroll > 1:
            return _in_segments(_scan, unrolled, unroll, carry, rows, steps, specs)
        return _scan(flat_step, carry, rows, steps, specs)

    if remat:
        over_segments = _loop if execution == "loop" else _scan
        segment = _remat(lambda carry, rows: run(carry, rows, rows[0].shape[0]), specs)
        carry, flat = _in_segments(over_segments, segment, remat, carry, rows, length, specs)
    else:
        carry, flat = run(carry, rows, length)
    return carry, tree.pack_sequence_as(structure[0], flat)


def _remat(segment: Step, outputs: Sequence) -> Step:
    """Return `segment` with rematerialisation: the gradient recomputes its inside."""
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

    recomputed = keras.remat(in_floats)

    def run(carry, rows):
        carry, results = recomputed(carry, rows)
        return carry, [
            tf.cast(result, dtype) for result, (_, dtype) in zip(results, outputs, strict=True)
        ]

    return run


def _in_segments(run: Callable, segment: Step, size: int, carry, stacked, length, outputs):
    """Do all `length` steps in segments: `run` calls `segment` for whole segments of
    `size` steps, and a last call does the remaining steps.
    """
    whole = length // size
    ends = whole * size
    rows = [ops.reshape(tensor[:ends], (whole, size, *ops.shape(tensor)[1:])) for tensor in stacked]
    segments_outputs = [((size, *shape), dtype) for shape, dtype in outputs]
    results: list = []
    if whole:
        carry, segment_results = run(segment, carry, rows, whole, segments_outputs)
        results = [
            ops.reshape(tensor, (ends, *ops.shape(tensor)[2:])) for tensor in segment_results
        ]
    if ends < length:
        carry, last = segment(carry, [tensor[ends:] for tensor in stacked])
        results = (
            [ops.concatenate(pair) for pair in zip(results, last, strict=True)] if whole else last
        )
    return carry, results


def _loop(step: Step, carry, stacked: list, length: int, outputs: Sequence):
    """Loop in Python: the graph has one copy of `step` per slice. Only a scan needs
    `outputs`.
    """
    rows = [_unstack(tensor, length) for tensor in stacked]
    results = []
    for i in range(length):
        carry, output = step(carry, [row[i] for row in rows])
        results.append(output)
    columns = zip(*results, strict=True)
    return carry, [None if column[0] is None else ops.stack(column) for column in columns]


def _unstack(tensor, length: int) -> list:
    if keras.backend.backend() == "jax":
        # The gradient of n single slices is a sum of n arrays of the full size, the gradient of a
        # split is one concatenation.
        return [ops.squeeze(part, 0) for part in ops.split(tensor, length)]
    return ops.unstack(tensor, length)


def _scan(step: Step, carry, stacked: list, length: int, outputs: Sequence):
    """Loop on the device: the graph has one copy of `step`."""
    if keras.backend.backend() == "tensorflow":
        return _scan_tensorflow(step, carry, stacked, length, outputs)
    import jax

    return jax.lax.scan(step, carry, stacked, length)


def _scan_tensorflow(step, carry, stacked, length, outputs):
    """Scan. `keras.ops.scan` fails on TensorFlow if the outputs differ in shape."""
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
