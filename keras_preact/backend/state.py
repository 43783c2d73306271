"""The variables of a model before Keras' loops, and after an error in them."""

import contextlib
from collections.abc import Iterator

import keras

from keras_preact.backend import keras_private


@contextlib.contextmanager
def kept(model: keras.Model) -> Iterator[None]:
    """Return a context in which an error, such as one of a data pipeline, leaves a model its
    variables.

    On JAX, Keras takes the values out of the variables while it trains or evaluates, and
    loses them if there is an error.
    """
    if keras.backend.backend() != "jax":
        yield
        return
    optimizer = getattr(model, "optimizer", None)
    of_optimizer = optimizer.variables if optimizer is not None else []
    variables = (*model.variables, *of_optimizer, *model.metrics_variables)
    before = [(each, keras_private.value_or_none(each)) for each in variables]
    try:
        yield
    except BaseException:
        model.jax_state_sync()  # the values after the last complete step, if there was one
        keras_private.forget_jax_state(model)
        for variable, value in before:
            lost = keras_private.value_or_none(variable) is None
            if lost and value is not None and not value.is_deleted():
                variable.assign(value)
        raise


def build_optimizer(model: keras.Model) -> None:
    """Build the optimizer of a built model before TensorFlow traces its train step. If the
    trace makes variables, TensorFlow traces the step once more, which takes as long again.
    """
    if keras.backend.backend() != "tensorflow":
        return
    if model.optimizer is not None and not model.optimizer.built:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
