"""The moving average of the weights that the optimizer keeps, made fit to be evaluated: it needs batch statistics of its own.

The moving statistics of batch normalisation belong to the weights that are trained. With those, the averaged weights are of
no use; with statistics computed anew from training images they are (Sec. 3.2 of arXiv 1803.05407).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import keras
import numpy as np
from keras import ops

import keras_preact as kp
from keras_preact import _autodiff, _batch_norm

from .variables import Tensors, read, write

Batches = Callable[[], Iterable]


class BatchStatistics:
    """Computes the statistics of a model's batch normalisation anew, whatever they have been.

    Each becomes the mean over the batches of what the batch has where the model trains, dropout included. Nothing else of
    the model changes. With several devices or processes, each of them computes the same.

    Args:
        model: Built.
        batches: Returns the batches of images, as arrays: the same ones whenever it is called, in all processes.
    """

    def __init__(self, model: keras.Model, batches: Batches):
        self.model = model
        self.batches = batches
        self._places = [i for i, variable in enumerate(model.non_trainable_variables) if _is_statistic(variable)]
        self._pass = _autodiff.compiled(self._one_batch)

    def renew(self) -> None:
        """Compute the statistics from the weights that the model has, and leave them in it.

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
        with _of_each_batch(self.model), _no_random_numbers_used(), _autodiff.without_gradients():
            for count, images in enumerate(self.batches(), 1):
                state, means = self._pass(weights, state, means, np.array(count, "float32"), images)
        if not count:
            raise ValueError("Batch statistics need images to be computed from. Received: no batches")
        for i, mean in zip(self._places, means, strict=True):
            variables[i].assign(mean)

    def _one_batch(self, weights, state, means, count, images):
        """Return the state that a batch leaves, and the means over the batches with this one, the `count`-th."""
        weights, state = list(weights), list(state)
        _, state = self.model.stateless_call(weights, state, ops.convert_to_tensor(images), training=True)
        new = [ops.cast(state[i], "float32") for i in self._places]
        count = ops.convert_to_tensor(count)
        means = [ops.convert_to_tensor(mean) for mean in means]
        return state, [mean + (value - mean) / count for mean, value in zip(means, new, strict=True)]


class Averages(keras.callbacks.Callback):
    """Has the averages of the weights evaluated, in place of the weights, with batch statistics of their own.

    In `fit`, this is so in every validation. As long as the optimizer has made no update, there are no averages: the weights
    are evaluated as they are.

    Args:
        batches: As `BatchStatistics` takes them, of training images. The same images each time make a run that goes on from
            a checkpoint come to the same figures.
    """

    def __init__(self, batches: Batches):
        super().__init__()
        self.batches = batches
        self._statistics: BatchStatistics | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Give the model its averaged weights and their statistics, and then, to the bit, everything back that it had."""
        model = self.model  # on JAX, what the model holds is up to date from here on
        pairs = averages(model)
        if not pairs:
            yield
            return
        variables = [Tensors(each, each.path) for each in [*model.trainable_variables, *model.non_trainable_variables]]
        own = [_copies(each) for each in variables]
        try:
            for variable, average in pairs:
                write(Tensors(variable, variable.path), _copies(Tensors(average, average.path)))
            self._renew()
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
        """Behind `fit`, where Keras has put the averages into the weights: compute their statistics, and leave them."""
        if averages(self.model):
            self._renew()

    def _renew(self) -> None:
        if self._statistics is None or self._statistics.model is not self.model:
            self._statistics = BatchStatistics(self.model, self.batches)
        self._statistics.renew()


def averages(model: keras.Model) -> list[tuple[keras.Variable, keras.Variable]]:
    """Return the weights of a compiled model and their averages; nothing before the first update, when there are none."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if not optimizer.use_ema or not int(ops.convert_to_numpy(optimizer.iterations)):
        return []
    pairs = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
    return [(variable, average) for variable, average in pairs if average is not None]


def _is_statistic(variable: keras.Variable) -> bool:
    return variable.path.rsplit("/", 1)[-1] in ("moving_mean", "moving_variance")


def _copies(tensors: Tensors) -> list[np.ndarray]:
    return [np.array(array) for array in read(tensors)]  # which may be views of what the variable holds


@contextlib.contextmanager
def _of_each_batch(model: keras.Model) -> Iterator[None]:
    """While active, the moving statistics of a model in training become those of the batch, of one device's alone."""
    layers = [each for layer in model._flatten_layers() for each in _with_pattern(layer)]
    layers = [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]
    momenta = [layer.momentum for layer in layers]
    with _batch_norm.statistics(_batch_norm.Statistics()):
        try:
            for layer in layers:
                layer.momentum = 0.0
            yield
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum


def _with_pattern(layer: keras.Layer) -> list[keras.Layer]:
    """Return a layer, for a stack also the layers of the unit that it runs, which Keras does not know of."""
    return [layer, *layer.pattern._flatten_layers()] if isinstance(layer, kp.UnitStack) else [layer]


@contextlib.contextmanager
def _no_random_numbers_used() -> Iterator[None]:
    """While active, random numbers outside of the model's variables, PyTorch's, are always the same; then they go on."""
    if keras.backend.backend() != "torch":
        yield
        return
    import torch

    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(0)
        yield
