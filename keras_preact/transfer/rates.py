"""Learning rates by layer: any Keras optimizer whose rate is multiplied by a factor for
each part of a network.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import keras

from keras_preact.models.base import UnitNetwork
from keras_preact.transfer import _places

if TYPE_CHECKING:
    from keras.optimizers import Optimizer as _Optimizer
else:
    _Optimizer = object  # the class that it is mixed into brings the optimizer


@keras.saving.register_keras_serializable("keras_preact")
class LayerwiseRates(_Optimizer):
    """Mixed into an optimizer by `layerwise_rates`: multiplies the rate of each weight by
    the factor of its layer.

    A factor holds for the layer of its name and for layers whose names begin with it and
    `_`: `"stage3"` for `stage3_unit1` too. The longest name that fits counts; without
    one, the factor is 1.

    Attributes:
        factors: Name to factor.
    """

    factors: dict[str, float]

    def build(self, variables: Sequence[keras.Variable]) -> None:
        super().build(variables)
        # by index: TensorFlow hands `update_step` variables of its own, which have no path
        self._factor_of = [_factor(self.factors, variable.path) for variable in variables]

    def update_step(self, gradient, variable, learning_rate) -> None:
        factor = self._factor_of[self._get_variable_index(variable)]
        super().update_step(gradient, variable, learning_rate * factor)

    def _apply_weight_decay(self, variables) -> None:
        """Shrink the weights, by their own rates: Keras' decay is `learning_rate *
        weight_decay * w`.
        """
        groups: dict[float, list] = {}
        if keras.backend.backend() == "torch":
            # Keras takes no empty list there; elsewhere its answer is kept, and TensorFlow is to be
            # asked by a variable's path
            variables = list(filter(self._use_weight_decay, variables))
        for variable in variables:
            groups.setdefault(self._factor_of[self._get_variable_index(variable)], []).append(
                variable
            )
        try:
            for self._decay_factor, group in groups.items():
                super()._apply_weight_decay(group)
        finally:
            self._decay_factor = None

    _decay_factor: float | None = None

    def _get_current_learning_rate(self):
        rate = super()._get_current_learning_rate()
        return rate if self._decay_factor is None else rate * self._decay_factor

    def get_config(self) -> dict:
        """Return the config of the optimizer that this was made of, and the factors."""
        plain = _plain_class(type(self)).from_config(super().get_config())
        return {"optimizer": keras.optimizers.serialize(plain), "factors": dict(self.factors)}

    @classmethod
    def from_config(cls, config: dict, custom_objects=None) -> Any:
        return _mixed(
            keras.optimizers.deserialize(dict(config["optimizer"]), custom_objects),
            config["factors"],
        )


def layerwise_rates(
    optimizer: keras.optimizers.Optimizer,
    model: UnitNetwork,
    *,
    decay: float | None = None,
    factors: Mapping[str, float] | None = None,
) -> keras.optimizers.Optimizer:
    """Return a copy of an optimizer that multiplies each weight's update, decay
    included, by a factor of its layer.

    The first layers of a trained network are general and need little change for a new
    task; a new classifier needs much.

    Args:
        optimizer: Any Keras optimizer that changes a weight by its rate times a
            direction. Its state is not copied. Put a `LossScaleOptimizer` around the
            result, not in it.
        model: The network to train.
        decay: Factor from one part to the part before it: the head has 1, the last
            stage `decay`, the stage before it `decay ** 2`, and so on to the stem.
        factors: Instead of `decay`: `"stem"`, a stage, a unit or `"head"` to its
            factor, 0 or more; others have 1. A unit's factor overrides its stage's. 0
            keeps the weights; `freeze` keeps moving statistics too, and saves time.

    Returns:
        An optimizer of the class of `optimizer` and `LayerwiseRates`. `.keras` files
        keep it.

    Raises:
        ValueError: for an unknown place, a unit inside a stack, a wrong factor or
            decay, both or none of them, and a LossScaleOptimizer.

    Example:

    >>> import keras
    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20)
    >>> sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    >>> optimizer = kp.transfer.layerwise_rates(sgd, model, decay=0.5)
    >>> optimizer.factors
    {'stem': 0.0625, 'stage1': 0.125, 'stage2': 0.25, 'stage3': 0.5, 'head': 1.0}
    >>> optimizer = kp.transfer.layerwise_rates("adam", model, factors={"stem": 0.0, "stage1": 0.1})

    Source: discriminative fine-tuning, Sec. 3.2 of arXiv 1801.06146.
    """
    parts = ["stem", *_places.stages(model), "head"]
    plain = keras.optimizers.get(optimizer)
    if isinstance(plain, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "Put the LossScaleOptimizer around it: LossScaleOptimizer(layerwise_rates(optimizer, "
            "...))."
        )
    if (decay is None) == (factors is None):
        raise ValueError(
            f"Give either `decay` or `factors`. Received: decay={decay!r}, factors={factors!r}"
        )
    if factors is None:
        if not _is_number(decay) or not 0 < decay <= 1:
            raise ValueError(
                f"`decay` must be a number above 0, at most 1. Received: decay={decay!r}"
            )
        factors = {name: float(decay) ** (len(parts) - 1 - i) for i, name in enumerate(parts)}
    for name, factor in factors.items():
        _places.last_layer(model, name, "factors")  # refuses a unit inside a stack
        if not _is_number(factor) or not 0 <= factor < math.inf:
            raise ValueError(
                f"A factor must be a number, 0 or more. Received: factors[{name!r}]={factor!r}"
            )
    layers = {
        name: segment.name for name, segment in _places.ends(model).items() if name not in parts
    }
    return _mixed(plain, {layers.get(name, name): float(each) for name, each in factors.items()})


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _factor(factors: Mapping[str, float], path: str) -> float:
    layer = path.partition("/")[0]
    fitting = [name for name in factors if layer == name or layer.startswith(f"{name}_")]
    return factors[max(fitting, key=len)] if fitting else 1.0


def _mixed(plain: keras.optimizers.Optimizer, factors: Mapping[str, float]) -> Any:
    optimizer = _mixed_class(_plain_class(type(plain))).from_plain(plain.get_config())
    optimizer.factors = dict(factors)
    return optimizer


def _plain_class(kind: type) -> Any:
    """Return the class without what is mixed in, and without what Keras puts in on
    torch.

    That updates all weights at one rate; the public classes update one weight after
    another.
    """
    return next(
        each
        for each in kind.__mro__
        if not issubclass(each, LayerwiseRates)
        and not each.__module__.startswith("keras.src.backend.")
    )


@functools.cache
def _mixed_class(plain: type) -> Any:
    def from_plain(cls, config):
        return super(LayerwiseRates, cls).from_config(config)

    made = type(
        f"Layerwise{plain.__name__}",
        (LayerwiseRates, plain),
        {"from_plain": classmethod(from_plain)},
    )
    # files name LayerwiseRates, whose `from_config` makes any of these again
    return keras.saving.register_keras_serializable("keras_preact", "LayerwiseRates")(made)
