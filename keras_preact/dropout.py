"""Dropout whose rate changes in training: the layer, and what sets its rate."""

from collections.abc import Callable

import keras
from keras import ops

from keras_preact import _checks
from keras_preact._objects import Hidden
from keras_preact.layers.chains import SameShape


class DropoutRate(keras.Variable):
    """The rate of a `VariableDropout`."""


@keras.saving.register_keras_serializable("keras_preact")
class VariableDropout(SameShape):
    """Dropout whose rate is a variable, so that the compiled train step reads it anew in
    each step. At rate 0, and at inference, the output is the input.

    As the state of a seed, the rate is one of the layer's `variables` and none of its
    `weights`: files of weights are those of a network with a constant rate.

    Args:
        initial: Rate at the start, in [0, 1).
        seed: Seed of the masks.
        **kwargs: Arguments of every Keras layer.
    """

    def __init__(self, initial: float, seed: int | None = None, **kwargs):
        super().__init__(**kwargs)
        _checks.fraction(initial, "initial")
        self.initial = _checks.plain(initial)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)
        self.supports_masking = True

    def build(self, input_shape):
        initializer = keras.initializers.Constant(self.initial)
        settings: dict = {"dtype": "float32", "trainable": False, "autocast": False}
        self._rate = Hidden(DropoutRate(initializer, (), name="rate", **settings))

    @property
    def variables(self) -> list[keras.Variable]:
        return [*super().variables, *([self._rate.value] if self.built else [])]

    def call(self, x, training=None):
        if not training:
            return x
        rate = ops.convert_to_tensor(self._rate.value)
        drawn = keras.random.uniform(ops.shape(x), dtype="float32", seed=self.seed_generator)
        # in float32: a rounded 1 / (1 - rate) would change the mean
        scaled = ops.cast(ops.cast(x, "float32") / (1 - rate), x.dtype)
        return ops.where(drawn < rate, ops.zeros_like(scaled), scaled)

    def get_config(self):
        return super().get_config() | {"initial": self.initial, "seed": self.seed}


def is_rate(variable: keras.Variable) -> bool:
    """Whether a variable is the rate of a dropout, or of those of all units of a stack."""
    return isinstance(getattr(variable, "of", variable), DropoutRate)


def set_dropout(model: keras.Layer, rate: float) -> None:
    """Set the rate of the dropout in all units with `dropout_varies=True`.

    The rate holds for the next train step, also one that is compiled already. A file or
    a copy of the model does not have it: it starts with the rate `dropout`.

    Args:
        model: A built model or layer that has such units: separate or stacked ones, or
            inside a nested model.
        rate: The rate, in [0, 1).

    Raises:
        ValueError: for a wrong rate, and for a model without such units.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.wide_resnet(10, 1, dropout=0.1, dropout_varies=True)
    >>> kp.set_dropout(model, 0.0)
    """
    _checks.fraction(rate, "rate")
    rates = list(filter(is_rate, model.variables))
    if not rates:
        raise ValueError(
            "The model has no dropout whose rate can change: give its builder, or its units, "
            f"`dropout_varies=True`, and build it first. Received: {model!r}"
        )
    for variable in rates:
        variable.assign(ops.full(variable.shape, rate, variable.dtype))


class DropoutSchedule(keras.callbacks.Callback):
    """Sets the rate of the dropout before each update, in all units with
    `dropout_varies=True`.

    A rate that falls to 0 early in training is early dropout: it reduces the variance of
    the gradients at the start, and lets the network fit the data later.

    The schedule counts updates, as that of a learning rate: `optimizer.iterations` is
    its argument. So it continues where it was if a model is loaded with its optimizer,
    or a run is resumed. Gradient accumulation makes one update of several steps. With a
    larger `steps_per_execution`, all updates of an execution have the rate of its first.

    Args:
        schedule: A function from the number of updates so far to a rate in [0, 1), such
            as a schedule of `kp.schedules` or of Keras.

    Raises:
        ValueError: for a schedule that is not callable; from `fit`, for a rate that is
            not in [0, 1), and for a model without such units.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import keras_preact as kp
    >>> model = kp.models.dense_resnet(4, width=8, dropout=0.1, dropout_varies=True)
    >>> model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> early = kp.DropoutSchedule(kp.schedules.linear_schedule(0.1, steps=1000))
    >>> x, y = np.zeros((8, 64), "float32"), np.zeros(8)
    >>> history = model.fit(x, y, batch_size=4, verbose=0, callbacks=[early])

    Source: Sec. 4 of arXiv 2303.01500.
    """

    def __init__(self, schedule: Callable):
        super().__init__()
        if not callable(schedule):
            raise ValueError(
                "`schedule` must be a function of the number of updates, such as "
                f"kp.schedules.linear_schedule(0.1, steps=1000). Received: schedule={schedule!r}"
            )
        self.schedule = schedule

    def on_train_begin(self, logs=None):
        self._rate: float | None = None

    def on_train_batch_begin(self, batch, logs=None):
        model = self.model  # on JAX, this access updates the variables
        step = int(ops.convert_to_numpy(model.optimizer.iterations))
        rate = float(ops.convert_to_numpy(self.schedule(step)))
        _checks.fraction(rate, f"schedule({step})")
        if rate != self._rate:
            set_dropout(model, rate)
            self._rate = rate
