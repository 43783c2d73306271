"""Batch normalisation of images with the kernels that TensorFlow and PyTorch have for it."""

from collections.abc import Callable

import keras
from keras import ops


@keras.saving.register_keras_serializable("keras_preact")
class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization`, faster: the same values from one kernel where the backend has one.

    Keras computes moments, differences and products one by one, each a pass over the map. There are kernels for float32
    images, channels last, on TensorFlow (in training) and PyTorch; everything else is Keras' own computation.
    """

    def call(self, inputs, training=None, mask=None):
        in_training = bool(training and self.trainable)
        kernel = _KERNELS.get((keras.backend.backend(), in_training))
        if kernel is None or mask is not None or not self._is_plain(inputs, in_training):
            return super().call(inputs, training=training, mask=mask)
        channels = (inputs.shape[-1],)
        gamma = ops.convert_to_tensor(self.gamma) if self.scale else ops.ones(channels, "float32")
        beta = ops.convert_to_tensor(self.beta) if self.center else ops.zeros(channels, "float32")
        mean, variance = ops.convert_to_tensor(self.moving_mean), ops.convert_to_tensor(self.moving_variance)
        outputs, batch_mean, batch_variance = kernel(inputs, gamma, beta, mean, variance, self.epsilon, in_training)
        if in_training:
            # The kernels divide by n - 1 for the moving variance, Keras by n.
            n = ops.cast(ops.prod(ops.shape(inputs)[:-1]), "float32")
            batch_variance = batch_variance * ((n - 1) / n)
            self.moving_mean.assign(mean * self.momentum + batch_mean * (1.0 - self.momentum))
            self.moving_variance.assign(variance * self.momentum + batch_variance * (1.0 - self.momentum))
        return outputs

    def _is_plain(self, inputs, in_training: bool) -> bool:
        """Whether there is a kernel for this."""
        is_image = len(inputs.shape) == 4 and self.axis in (-1, 3)
        more_than_one = tuple(inputs.shape[:-1]) != (1, 1, 1) or not in_training  # torch refuses one value a channel
        dtypes = (self.compute_dtype, keras.backend.standardize_dtype(inputs.dtype))
        return is_image and more_than_one and dtypes == ("float32", "float32") and not (self.renorm or self.synchronized)


def _tensorflow(x, gamma, beta, mean, variance, epsilon: float, training: bool):
    import tensorflow as tf

    empty = tf.zeros((0,))
    y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=x, scale=gamma, offset=beta, mean=empty, variance=empty, epsilon=epsilon, is_training=training
    )
    return y, mean, variance


def _torch(x, gamma, beta, mean, variance, epsilon: float, training: bool):
    import torch

    if training:  # with a momentum of 1 the batch's own statistics take their place
        mean, variance = torch.zeros_like(mean), torch.zeros_like(variance)
    images = x.permute(0, 3, 1, 2)  # what torch calls the memory format channels_last: nothing is copied
    y = torch.nn.functional.batch_norm(images, mean, variance, gamma, beta, training, 1.0, epsilon)
    return y.permute(0, 2, 3, 1), mean, variance


#: Backend and whether in training to kernel. TensorFlow 2.21 fuses its own, at inference on a CPU, with a convolution in front
#: and a tanh or sigmoid behind into an operation that it does not have.
_KERNELS: dict[tuple[str, bool], Callable] = {
    ("tensorflow", True): _tensorflow,
    ("torch", True): _torch,
    ("torch", False): _torch,
}
