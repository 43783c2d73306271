"""Evaluate the optimizer's moving average of the weights, with batch statistics of its
own.

The moving statistics of batch normalisation belong to the trained weights and do not
fit the averaged ones, which need statistics recomputed from training images (Sec. 3.2
of arXiv 1803.05407).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import keras
import numpy as np
from keras import ops

import keras_preact as kp
from keras_preact.wrapped_optimizer import unwrapped

from . import backends
from .variables import Tensors, read, write

Batches = Callable[[], Iterable]


class BatchStatistics:
    """Recomputes the statistics of a model's batch normalisation.

    Each becomes the mean of the batches' statistics in training mode, dropout included.
    Nothing else of the model changes. With several devices or processes, each of them
    computes the same.

    Args:
        model: Built.
        batches: Returns batches of images, as arrays: the same ones in every call and
            process.
    """

    def __init__(self, model: keras.Model, batches: Batches):
        self.model = model
        self.batches = batches
        self._places = [
            i for i, variable in enumerate(model.non_trainable_variables) if _is_statistic(variable)
        ]
        self._pass = backends.compiled(self._one_batch)

    def renew(self) -> None:
        """Assign the statistics that belong to the model's weights.

        Raises:
            ValueError: if there are no batches.
        """
        if not self._places:
            return
        variables = self.model.non_trainable_variables
        weights = [ops.convert_to_tensor(variable) for variable in self.model.trainable_variables]
        state = [ops.convert_to_tensor(variable) for variable in variables]
        means = [np.zeros(variables[i].shape, "float32") for i in self._places]
        count = 0
        with _of_each_batch(self.model), _no_random_numbers_used():
            for count, images in enumerate(self.batches(), 1):
                state, means = self._pass(weights, state, means, np.array(count, "float32"), images)
        if not count:
            raise ValueError(
                "Batch statistics need images to be computed from. Received: no batches"
            )
        for i, mean in zip(self._places, means, strict=True):
            variables[i].assign(mean)

    def _one_batch(self, weights, state, means, count, images):
        """Return the state after a batch, and the means over the batches up to this
        one, the `count`-th.
        """
        weights, state = list(weights), list(state)
        _, state = self.model.stateless_call(
            weights, state, ops.convert_to_tensor(images), training=True
        )
        new = [ops.cast(state[i], "float32") for i in self._places]
        count = ops.convert_to_tensor(count)
        means = [ops.convert_to_tensor(mean) for mean in means]
        return state, [
            mean + (value - mean) / count for mean, value in zip(means, new, strict=True)
        ]


class Averages(keras.callbacks.Callback):
    """Evaluates the averages of the weights instead of the weights, with batch
    statistics of their own.

    This happens in every validation of `fit`. Before the first update there are no
    averages: the weights themselves are evaluated.

    Args:
        network: Network in the model of `fit`.
        batches: Argument of `BatchStatistics`: training images. With the same images in
            each call, a resumed run has the same figures.
    """

    def __init__(self, network: keras.Model, batches: Batches):
        super().__init__()
        self.network = network
        self._statistics = BatchStatistics(network, batches)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Give the model its averaged weights and their statistics; afterwards, to the
        bit, its own again.
        """
        model = self.model  # on JAX this brings the model's variables up to date
        pairs = averages(model)
        if not pairs:
            yield
            return
        variables = [
            Tensors(each, each.path)
            for each in [
                *self.network.trainable_variables,
                *self.network.non_trainable_variables,
            ]
        ]
        own = [_copies(each) for each in variables]
        try:
            for variable, average in pairs:
                write(Tensors(variable, variable.path), _copies(Tensors(average, average.path)))
            self._statistics.renew()
            yield
        finally:
            for each, arrays in zip(variables, own, strict=True):
                write(each, arrays)

    def on_test_begin(self, logs=None):
        self._active = self.active()
        self._active.__enter__()

    def on_test_end(self, logs=None):
        self._active.__exit__(None, None, None)

    def finish(self) -> None:
        """Recompute the statistics after `fit`, in which Keras has assigned the
        averages to the weights.
        """
        if averages(self.model):
            self._statistics.renew()


def averages(model: keras.Model) -> list[tuple[keras.Variable, keras.Variable]]:
    """Return the weights of a compiled model and their averages; nothing before the
    first update.
    """
    optimizer = unwrapped(model.optimizer)
    if not optimizer.use_ema or not int(ops.convert_to_numpy(optimizer.iterations)):
        return []
    pairs = zip(
        optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True
    )
    return [(variable, average) for variable, average in pairs if average is not None]


def _is_statistic(variable: keras.Variable) -> bool:
    return variable.path.rsplit("/", 1)[-1] in ("moving_mean", "moving_variance")


def _copies(tensors: Tensors) -> list[np.ndarray]:
    return [np.array(array) for array in read(tensors)]  # `read` may return views of the variable


@contextlib.contextmanager
def _of_each_batch(model: keras.Model) -> Iterator[None]:
    """Make the moving statistics of a model in training those of the batch of one
    device.
    """
    layers = [each for layer in model._flatten_layers() for each in _with_pattern(layer)]
    layers = [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]
    momenta = [layer.momentum for layer in layers]
    with kp.distribution.with_statistics(model, kp.distribution.Statistics()):
        try:
            for layer in layers:
                layer.momentum = 0.0
            yield
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum


def _with_pattern(layer: keras.Layer) -> list[keras.Layer]:
    """Return a layer, and for a stack the layers of its unit, which Keras does not
    track.
    """
    return [layer, *layer.pattern._flatten_layers()] if isinstance(layer, kp.UnitStack) else [layer]


@contextlib.contextmanager
def _no_random_numbers_used() -> Iterator[None]:
    """Fix PyTorch's random numbers, which are no variables of the model, and restore
    their state afterwards.
    """
    if keras.backend.backend() != "torch":
        yield
        return
    import torch

    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(0)
        yield
