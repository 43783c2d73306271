"""Batch normalisation that uses the kernels of TensorFlow and PyTorch for images, and
can share its statistics between several devices.
"""

import dataclasses
import math
from collections.abc import Callable

import keras
from keras import ops


@dataclasses.dataclass(frozen=True)
class Statistics:
    """How a layer computes the statistics of a batch that several devices share.

    Args:
        moments: Function of inputs and axes that returns the mean and variance over the
            batches of all devices. None: the backend's moments of the batch that the
            layer gets.
        groups: Number of equal parts of the batch. Each part has its own statistics;
            the moving statistics are updated with their mean.
        kernel: Differentiable function of images, gamma, beta and epsilon. It returns
            the normalised images, and the mean and variance over the batches of all
            devices. None: use `moments`, which works for all inputs.
    """

    moments: Callable | None = None
    groups: int = 1
    kernel: Callable | None = None


def synchronized_moments(all_reduce: Callable, replicas: int) -> Callable:
    """Return a function of inputs and axes that computes the mean and variance over
    `replicas` batches of equal size.

    `all_reduce` sums a tensor over the replicas and is differentiable.
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
    """`keras.layers.BatchNormalization` with a faster kernel where the backend has one.
    The values are the same.

    Keras computes moments, differences and products in separate passes over the map,
    and in mixed precision from a float32 copy of the map. TensorFlow and PyTorch have
    kernels for images with the channels last; all other inputs are computed as in
    Keras. In mixed precision the map and its gradient have 16 bits; the statistics,
    gamma, beta and their gradients are float32.

    If several devices share a batch, the active `keras_preact.distribution` decides
    whether they share its statistics. Neither the layer's config nor a saved model
    contains this setting.

    Args:
        relu_follows: Whether a ReLU follows this layer. TensorFlow then uses its kernel
            at inference as well, and fuses it with the ReLU and the convolution before
            it. If a tanh or sigmoid follows, TensorFlow 2.21 would fuse the three into
            an operation that it does not have on a CPU.
        **kwargs: Arguments of `keras.layers.BatchNormalization`.
    """

    #: How the layer computes statistics in training. A distribution sets it; no config contains it.
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
                "Batch normalisation cannot use a mask or renorm=True while several devices share "
                "a batch: train on one device, or use neither. Received: "
                f"mask={mask}, renorm={self.renorm}"
            )
        if active.groups > 1:
            return self._in_groups(inputs, active.groups)
        backend_kernel = None if shared else _KERNELS.get(keras.backend.backend())
        kernel = active.kernel or backend_kernel
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
            sizes = ops.shape(inputs)[:-1]  # on TensorFlow the batch size may be a tensor
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
                f"The batch size must be a multiple of {groups}, the number of devices that share "
                f"a batch. Received: a batch of {inputs.shape[0]}"
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
        """Whether the kernels can normalise these inputs."""
        is_image = len(inputs.shape) == 4 and self.axis in (-1, 3)
        more_than_one = (
            tuple(inputs.shape[:-1]) != (1, 1, 1) or not in_training
        )  # torch refuses a single value per channel
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
    """Normalise images with TensorFlow's kernel.

    Returns:
        The normalised images, and the mean and variance used. In training these are the
        statistics of the batch, and the returned variance has the divisor n - 1.
    """
    import tensorflow as tf

    if training:  # then the kernel takes no statistics
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
    """Normalise images with PyTorch's kernel; see `tensorflow_kernel`."""
    import torch

    if training:  # with a momentum of 1 the batch's statistics replace them
        mean, variance = torch.zeros_like(mean), torch.zeros_like(variance)
    images = x.permute(
        0, 3, 1, 2
    )  # a view in torch's memory format channels_last: nothing is copied
    y = torch.nn.functional.batch_norm(images, mean, variance, gamma, beta, training, 1.0, epsilon)
    return y.permute(0, 2, 3, 1), mean, variance


_KERNELS: dict[str, Callable] = {"tensorflow": tensorflow_kernel, "torch": torch_kernel}
