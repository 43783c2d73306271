"""Checks inside a graph, whose sentences reach the client."""


def ensure(condition, value, *words):
    """Return `value`, or raise an InvalidArgumentError with a sentence between `<<` and
    `>>` where the condition is false.

    Args:
        condition: Boolean scalar.
        value: The tensor that must not be used otherwise: what does not depend on a
            check may run without it.
        words: The sentence, strings or string tensors.
    """
    import tensorflow as tf

    holds = tf.raw_ops.Assert(condition=condition, data=[tf.strings.join(["<<", *words, ">>"])])
    with tf.control_dependencies([holds]):
        return tf.identity(value)
