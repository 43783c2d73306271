"""Batch normalisation of images with the kernels that TensorFlow and PyTorch have for
it, and over several devices.
"""

import dataclasses
from collections.abc import Callable

import keras
from keras import ops


@dataclasses.dataclass(frozen=True)
class Statistics:
    """How the statistics of a batch are taken while several devices share it.

    Args:
        moments: Function of inputs and axes to the mean and variance of all devices'
            batches together. None: the backend's own, of the batch that the layer gets.
        groups: Parts of the batch that have statistics each; of the moving ones the
            mean is kept.
    """

    moments: Callable | None = None
    groups: int = 1


def synchronized_moments(all_reduce: Callable, replicas: int) -> Callable:
    """Return the moments over `replicas` batches of one size; `all_reduce` sums a
    tensor over them, with its gradient.
    """

    def moments(inputs, axes):
        count = ops.cast(
            replicas * ops.prod([ops.shape(inputs)[axis] for axis in axes]), inputs.dtype
        )
        sums = ops.stack([ops.sum(inputs, axes), ops.sum(ops.square(inputs), axes)])
        mean, square = ops.unstack(all_reduce(sums) / count, 2)
        return mean, ops.maximum(square - ops.square(mean), 0.0)

    return moments


@keras.saving.register_keras_serializable("keras_preact")
class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization`, faster: the same values from one kernel where
    the backend has one.

    Keras computes moments, differences and products one by one, each a pass over the
    map, and in mixed precision from a copy of the map in float32. There are kernels for
    images, channels last, on TensorFlow (in training) and PyTorch; everything else is
    Keras' own computation. In mixed precision the map and its gradient are in 16 bits,
    the statistics, gamma, beta and their gradients in float32.

    Where several devices share a batch, the active `keras_preact.distribution` says
    whether its statistics are those of all devices or of each; nothing of it is in the
    layer, nor in what is saved.
    """

    #: How it takes statistics in training; a distribution sets it, and no config holds it.
    statistics = Statistics()

    def call(self, inputs, training=None, mask=None):
        in_training = bool(training and self.trainable)
        active = self.statistics if in_training else Statistics()
        if active != Statistics() and (mask is not None or self.renorm):
            raise ValueError(
                "Batch normalisation with a mask or renorm=True is not for a batch that several "
                f"devices share. Received: mask={mask}, renorm={self.renorm}"
            )
        if active.groups > 1:
            return self._in_groups(inputs, active.groups)
        kernel = None if active.moments else _KERNELS.get((keras.backend.backend(), in_training))
        if kernel is None or mask is not None or not self._is_plain(inputs, in_training):
            return super().call(inputs, training=training, mask=mask)
        channels = (inputs.shape[-1],)
        gamma = ops.convert_to_tensor(self.gamma) if self.scale else ops.ones(channels, "float32")
        beta = ops.convert_to_tensor(self.beta) if self.center else ops.zeros(channels, "float32")
        mean, variance = (
            ops.convert_to_tensor(self.moving_mean),
            ops.convert_to_tensor(self.moving_variance),
        )
        outputs, batch_mean, batch_variance = kernel(
            inputs, gamma, beta, mean, variance, self.epsilon, in_training
        )
        if in_training:
            # The kernels divide by n - 1 for the moving variance, Keras by n.
            n = ops.cast(ops.prod(ops.shape(inputs)[:-1]), "float32")
            self._move(batch_mean, batch_variance * ((n - 1) / n))
        return outputs

    def _moments(self, inputs, mask):
        moments = self.statistics.moments
        return (
            super()._moments(inputs, mask)
            if moments is None
            else moments(inputs, self._reduction_axes)
        )

    def _in_groups(self, inputs, groups: int):
        """Normalise each of `groups` equal parts of the batch by its own statistics."""
        if inputs.shape[0] % groups:
            raise ValueError(
                f"A batch of {groups} parts must divide by it. Received: a batch of "
                f"{inputs.shape[0]}"
            )
        x = ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        parts = ops.reshape(x, (groups, x.shape[0] // groups, *x.shape[1:]))
        axes = tuple(axis + 1 for axis in self._reduction_axes)
        mean, variance = ops.moments(parts, axes, keepdims=True)
        shape = [1] * len(parts.shape)
        shape[self.axis % len(x.shape) + 1] = -1
        factor = ops.rsqrt(variance + self.epsilon)
        if self.scale:
            factor = factor * ops.reshape(self.gamma, shape)
        outputs = (parts - mean) * factor
        if self.center:
            outputs = outputs + ops.reshape(self.beta, shape)
        self._move(*(ops.mean(ops.squeeze(moment, axes), 0) for moment in (mean, variance)))
        return ops.cast(ops.reshape(outputs, x.shape), self.compute_dtype)

    def _move(self, mean, variance) -> None:
        """Update the moving statistics."""
        for moving, new in ((self.moving_mean, mean), (self.moving_variance, variance)):
            moving.assign(
                ops.convert_to_tensor(moving) * self.momentum + new * (1.0 - self.momentum)
            )

    def _is_plain(self, inputs, in_training: bool) -> bool:
        """Whether there is a kernel for this."""
        is_image = len(inputs.shape) == 4 and self.axis in (-1, 3)
        more_than_one = (
            tuple(inputs.shape[:-1]) != (1, 1, 1) or not in_training
        )  # torch refuses one value a channel
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        return (
            is_image
            and more_than_one
            and dtype == self.compute_dtype
            and dtype in ("float32", "bfloat16", "float16")
            and self.variable_dtype == "float32"
            and not (self.renorm or self.synchronized)
        )


def _tensorflow(x, gamma, beta, mean, variance, epsilon: float, training: bool):
    import tensorflow as tf

    empty = tf.zeros((0,))
    y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=gamma,
        offset=beta,
        mean=empty,
        variance=empty,
        epsilon=epsilon,
        is_training=training,
    )
    return y, mean, variance


def _torch(x, gamma, beta, mean, variance, epsilon: float, training: bool):
    import torch

    if training:  # with a momentum of 1 the batch's own statistics take their place
        mean, variance = torch.zeros_like(mean), torch.zeros_like(variance)
    images = x.permute(
        0, 3, 1, 2
    )  # what torch calls the memory format channels_last: nothing is copied
    y = torch.nn.functional.batch_norm(images, mean, variance, gamma, beta, training, 1.0, epsilon)
    return y.permute(0, 2, 3, 1), mean, variance


#: Backend and whether in training to kernel. TensorFlow 2.21 fuses its own, at inference on a CPU,
#: with a convolution in front and a tanh or sigmoid behind into an operation that it does not have.
_KERNELS: dict[tuple[str, bool], Callable] = {
    ("tensorflow", True): _tensorflow,
    ("torch", True): _torch,
    ("torch", False): _torch,
}
