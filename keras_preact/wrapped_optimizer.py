"""An optimizer that wraps another one, to act before and after its updates."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras


class WrappedOptimizer(keras.optimizers.Optimizer):
    """An optimizer that passes everything on to another one.

    Subclasses override `apply` and, for JAX, `stateless_apply`. Keras' own
    `LossScaleOptimizer` is such a wrapper with variables of its own. This one has none:
    callbacks read and set the attributes of the wrapped optimizer, and Keras builds and
    saves the wrapped optimizer. So a model can get the wrapper in the middle of
    training, and a file that is saved meanwhile loads without it.

    Args:
        optimizer: The optimizer that does the work.

    Attributes:
        __wrapped__: The wrapped optimizer. Keras does not save attributes with such
            names.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        # Keras' __init__ is not called, because it makes variables
        object.__setattr__(self, "__wrapped__", optimizer)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # while a copy is made, it is not set yet
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__wrapped__, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.__wrapped__)})

    @property
    def variables(self) -> list[keras.Variable]:
        return self.__wrapped__.variables

    @property
    def iterations(self) -> Any:
        return self.__wrapped__.iterations

    @property
    def learning_rate(self) -> Any:
        return self.__wrapped__.learning_rate

    def build(self, variables: Sequence[keras.Variable]) -> None:
        self.__wrapped__.build(variables)

    def apply(self, grads: Sequence, trainable_variables: Sequence | None = None) -> None:
        self.__wrapped__.apply(grads, trainable_variables)

    def stateless_apply(
        self, optimizer_variables: Sequence, grads: Sequence, trainable_variables: Sequence
    ) -> tuple[list, list]:
        return self.__wrapped__.stateless_apply(optimizer_variables, grads, trainable_variables)

    def scale_loss(self, loss: Any) -> Any:
        return self.__wrapped__.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        self.__wrapped__.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        return self.__wrapped__.get_config()

    def save_own_variables(self, store: Any) -> None:
        self.__wrapped__.save_own_variables(store)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        self.__wrapped__.load_own_variables(store)


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that updates the weights, inside all wrappers and a loss
    scale.
    """
    while isinstance(optimizer, WrappedOptimizer | keras.optimizers.LossScaleOptimizer):
        optimizer = (
            optimizer.__wrapped__
            if isinstance(optimizer, WrappedOptimizer)
            else optimizer.inner_optimizer
        )
    return optimizer
