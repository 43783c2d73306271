"""The paper's optimiser: SGD with momentum and coupled weight decay."""

from collections.abc import Sequence

import keras
from keras import ops


@keras.saving.register_keras_serializable("keras_preact")
class CoupledSGD(keras.optimizers.SGD):
    """SGD whose weight decay is part of the gradient and passes through the momentum.

        g = gradient + weight_decay * w
        v = momentum * v - learning_rate * g
        w = w + v                      (Nesterov: w + momentum * v - learning_rate * g)

    The paper, the released code and Torch's SGD decay like this.
    `keras.optimizers.SGD(weight_decay=...)` shrinks the weights outside the momentum:
    with momentum 0.9, about ten times less. `keras.regularizers.L2(c)` adds the
    gradient `2 c w`, twice as much, and changes the loss.

    With `gradient_accumulation_steps`, schedules and the moving average of `use_ema`
    count updates; Keras' SGD counts the parts of an update. Before the first update
    there is no average: `finalize_variable_values` then leaves the weights unchanged,
    and Keras' SGD sets them to zero.

    Args:
        learning_rate: A number or a schedule.
        momentum: Share of the last update that is kept.
        nesterov: Whether to use Nesterov momentum, as in the 4.62 % recipe.
        coupled_weight_decay: Factor on w, 1e-4 in the paper.
        exclude_from_decay: Words; a weight with one of them in its path is not decayed.
            The released code decays all weights; `("norm",)` excludes those of
            normalisations.
        **kwargs: As in `keras.optimizers.SGD`, without `weight_decay`.

    Example:

    >>> import keras_preact as kp
    >>> kp.optimizers.CoupledSGD(0.1, coupled_weight_decay=1e-4).momentum
    0.9

    Source: appendix of arXiv 1603.05027, Sec. 3.4 of arXiv 1512.03385.
    """

    def __init__(
        self,
        learning_rate=0.1,
        momentum: float = 0.9,
        nesterov: bool = False,
        coupled_weight_decay: float = 1e-4,
        exclude_from_decay: Sequence[str] = (),
        name: str = "coupled_sgd",
        **kwargs,
    ):
        if kwargs.pop("weight_decay", None) is not None:
            raise ValueError(
                "CoupledSGD takes `coupled_weight_decay`; `weight_decay` is Keras' decay outside "
                "the momentum."
            )
        if coupled_weight_decay < 0:
            raise ValueError(
                f"`coupled_weight_decay` must not be negative. Received: {coupled_weight_decay}"
            )
        super().__init__(
            learning_rate, momentum=float(momentum), nesterov=nesterov, name=name, **kwargs
        )
        if self.ema_overwrite_frequency and self.gradient_accumulation_steps:
            # Keras would overwrite the weights at every part of an update, the first ones before
            # there is an average.
            raise ValueError(
                "`ema_overwrite_frequency` is not for accumulated gradients: use it without "
                f"`gradient_accumulation_steps`. Received: {self.ema_overwrite_frequency} and "
                f"{self.gradient_accumulation_steps}"
            )
        self.coupled_weight_decay = coupled_weight_decay
        self.exclude_from_decay = list(exclude_from_decay)

    def build(self, variables):
        super().build(variables)
        # By index: on TensorFlow, `update_step` gets backend variables, which have no path.
        self._decayed = [
            not any(word in variable.path for word in self.exclude_from_decay)
            for variable in variables
        ]

    def update_step(self, gradient, variable, learning_rate):
        if self.coupled_weight_decay and self._decayed[self._get_variable_index(variable)]:
            decay = ops.cast(self.coupled_weight_decay, gradient.dtype)
            gradient = ops.add(gradient, ops.multiply(ops.cast(variable, gradient.dtype), decay))
        super().update_step(gradient, variable, learning_rate)

    def _get_current_learning_rate(self):
        if isinstance(self._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            # Keras would count the parts of accumulated gradients.
            return self._learning_rate(self.iterations)
        return super()._get_current_learning_rate()

    def _update_model_variables_moving_average(self, trainable_variables):
        if not self.use_ema:
            return
        # Keras counts every part of an accumulated gradient as an update.
        parts = self.gradient_accumulation_steps or 1
        updated = ops.equal(ops.mod(ops.add(self._iterations, 1), parts), 0)
        new_share = ops.where(ops.equal(self.iterations, 0), 1.0, 1.0 - self.ema_momentum)
        new_share = ops.where(updated, new_share, 0.0)
        averages = self._model_variables_moving_average
        for variable, average in zip(trainable_variables, averages, strict=True):
            if average is not None:  # None: the variable is overwritten by its gradient
                dtype = keras.backend.result_type(average.dtype, "float32")
                old, new = ops.cast(average, dtype), ops.cast(variable, dtype)
                self.assign(average, old + ops.cast(new_share, dtype) * (new - old))

    def finalize_variable_values(self, var_list):
        if self.use_ema and not int(ops.convert_to_numpy(self.iterations)):
            return  # Keras would assign the zeros that the averages start with
        super().finalize_variable_values(var_list)
        if self.use_ema and keras.backend.backend() == "jax":
            # A weight and its average are now one array, which the next step would donate twice.
            for average in self._model_variables_moving_average:
                if average is not None:
                    average.assign(ops.copy(average))

    def get_config(self):
        return super().get_config() | {
            "coupled_weight_decay": self.coupled_weight_decay,
            "exclude_from_decay": list(self.exclude_from_decay),
        }
