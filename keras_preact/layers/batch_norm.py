"""Batch normalisation of images with the kernels that TensorFlow and PyTorch have for
it, and over several devices.
"""

import dataclasses
import math
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
        kernel: Function of images, gamma, beta and epsilon to the normalised images and
            the mean and variance of all devices' batches together, with a gradient.
            None: the computation from `moments`, which is for all inputs.
    """

    moments: Callable | None = None
    groups: int = 1
    kernel: Callable | None = None


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
    images, channels last, on TensorFlow and PyTorch; everything else is Keras' own
    computation. In mixed precision the map and its gradient are in 16 bits,
    the statistics, gamma, beta and their gradients in float32.

    If several devices share a batch, the active `keras_preact.distribution` decides
    whether they share its statistics. Neither the layer nor a saved model holds this.

    Args:
        relu_follows: Whether a ReLU follows this layer. TensorFlow then uses its kernel
            at inference as well, and fuses it with the ReLU and the convolution before
            it. If a tanh or sigmoid follows, TensorFlow 2.21 would fuse the three into
            an operation that it does not have on a CPU.
        **kwargs: Arguments of `keras.layers.BatchNormalization`.
    """

    #: How it takes statistics in training; a distribution sets it, and no config holds it.
    statistics = Statistics()

    def __init__(self, *, relu_follows: bool = False, **kwargs):
        super().__init__(**kwargs)
        self.relu_follows = relu_follows

    def call(self, inputs, training=None, mask=None):
        in_training = bool(training and self.trainable)
        active = self.statistics if in_training else Statistics()
        shared = active.moments is not None or active.groups > 1
        if shared and (mask is not None or self.renorm):
            raise ValueError(
                "Batch normalisation with a mask or renorm=True is not for a batch that several "
                f"devices share. Received: mask={mask}, renorm={self.renorm}"
            )
        if active.groups > 1:
            return self._in_groups(inputs, active.groups)
        own = None if shared else _KERNELS.get(keras.backend.backend())
        kernel = active.kernel or own
        if kernel is None or mask is not None or not self._is_plain(inputs, in_training):
            return super().call(inputs, training=training, mask=mask)
        channels = (inputs.shape[-1],)
        gamma = ops.convert_to_tensor(self.gamma) if self.scale else ops.ones(channels, "float32")
        beta = ops.convert_to_tensor(self.beta) if self.center else ops.zeros(channels, "float32")
        if active.kernel is not None:
            outputs, mean, variance = active.kernel(inputs, gamma, beta, self.epsilon)
            self._move(mean, variance)
            return outputs
        mean, variance = (
            ops.convert_to_tensor(self.moving_mean),
            ops.convert_to_tensor(self.moving_variance),
        )
        outputs, batch_mean, batch_variance = kernel(
            inputs, gamma, beta, mean, variance, self.epsilon, in_training
        )
        if in_training:
            # The kernels divide by n - 1 for the moving variance, Keras by n.
            sizes = ops.shape(inputs)[:-1]  # of TensorFlow, a batch's may be a tensor
            known = all(isinstance(size, int) for size in sizes)
            n = math.prod(sizes) if known else ops.cast(ops.prod(sizes), "float32")
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
        may_be_fused = keras.backend.backend() == "tensorflow" and not in_training
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        return (
            is_image
            and (self.relu_follows or not may_be_fused)
            and more_than_one
            and dtype == self.compute_dtype
            and dtype in ("float32", "bfloat16", "float16")
            and self.variable_dtype == "float32"
            and not (self.renorm or self.synchronized)
        )

    def get_config(self):
        return super().get_config() | {"relu_follows": self.relu_follows}


def tensorflow_kernel(x, gamma, beta, mean, variance, epsilon: float, training: bool):
    """Return the normalised images, and the mean and the variance that they were
    normalised by, in training with n - 1.
    """
    import tensorflow as tf

    if training:  # then the kernel wants none
        mean = variance = tf.zeros((0,))
    y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=gamma,
        offset=beta,
        mean=mean,
        variance=variance,
        epsilon=epsilon,
        is_training=training,
    )
    return y, mean, variance


def torch_kernel(x, gamma, beta, mean, variance, epsilon: float, training: bool):
    """Return the same as `tensorflow_kernel`."""
    import torch

    if training:  # with a momentum of 1 the batch's own statistics take their place
        mean, variance = torch.zeros_like(mean), torch.zeros_like(variance)
    images = x.permute(
        0, 3, 1, 2
    )  # what torch calls the memory format channels_last: nothing is copied
    y = torch.nn.functional.batch_norm(images, mean, variance, gamma, beta, training, 1.0, epsilon)
    return y.permute(0, 2, 3, 1), mean, variance


_KERNELS: dict[str, Callable] = {"tensorflow": tensorflow_kernel, "torch": torch_kernel}
