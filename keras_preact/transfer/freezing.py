"""Freeze a network: all layers up to a stage or unit, or its batch normalisations."""

import keras

from keras_preact.backend import keras_private
from keras_preact.layers import chains
from keras_preact.models.base import UnitNetwork, check_network
from keras_preact.models.copies import changed_copy
from keras_preact.transfer import _places


def freeze(model: UnitNetwork, up_to: str = "head") -> None:
    """Freeze the network up to and including a stem, stage, unit or head. The later
    layers stay as they are.

    Frozen weights do not change in training. Frozen batch normalisations use their
    moving statistics and do not update them. Compile the model afterwards. Frozen
    layers stay frozen in copies, in `.keras` files and after `reset_classifier`.

    Args:
        model: A network of residual units.
        up_to: `"stem"`, a stage (`"stage3"`), a unit (`"stage3_unit2"`), or `"head"`:
            all but the classifier. A stack is frozen as a whole, so only its last unit
            can be named.

    Raises:
        ValueError: for an unknown place, and for a unit inside a stack.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20)
    >>> kp.transfer.freeze(model, up_to="stage3")
    >>> [weight.path for weight in model.trainable_weights]
    ['head_norm/gamma', 'head_norm/beta', 'head_classifier/kernel', 'head_classifier/bias']
    """
    last = _places.last_layer(model, up_to, "up_to")
    for layer in model.layers[: last + 1]:
        layer.trainable = False


def unfreeze(model: UnitNetwork) -> None:
    """Undo `freeze`, but not `freeze_batch_norm`. Compile the model afterwards.

    Args:
        model: A network of residual units.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20)
    >>> kp.transfer.freeze(model)
    >>> kp.transfer.unfreeze(model)
    >>> all(layer.trainable for layer in model.layers)
    True
    """
    check_network(model)
    norm = _normalization(model)
    for layer in model.layers:
        if layer.trainable:
            continue
        layer.trainable = True
        if norm is not None and not norm.trainable:
            for inner in keras_private.layers(layer):
                if isinstance(inner, type(norm)):
                    inner.trainable = False


def freeze_batch_norm(model: UnitNetwork) -> UnitNetwork:
    """Return a copy of the network with frozen batch normalisations.

    Use it for batches so small that their statistics are noise. The normalisations of
    stem, units and head then use their moving statistics in training too, and their
    gamma and beta do not change.

    Args:
        model: A network with batch normalisation, stacked or not. It stays as it is.

    Returns:
        A network of the same class, not compiled, with copies of all weights and seeds.

    Raises:
        ValueError: for a network without batch normalisation.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.transfer.freeze_batch_norm(kp.models.resnet_cifar(20))
    >>> [weight.path for weight in model.get_layer("stage1_unit2").trainable_weights]
    ['stage1_unit2/branch/conv_1/kernel', 'stage1_unit2/branch/conv_2/kernel']
    """
    check_network(model)
    norm = _normalization(model)
    if not isinstance(norm, keras.layers.BatchNormalization):
        received = "none" if norm is None else type(norm).__name__
        raise ValueError(
            f"The network must have batch normalisation. Received: {model.name!r} with {received}"
        )
    return changed_copy(
        model, normalization=type(norm).from_config(norm.get_config() | {"trainable": False})
    )


def _normalization(model: UnitNetwork) -> keras.Layer | None:
    """Return a layer with the options of the network's normalisation, or None if it has none.
    The network's own layers are of its class, or of one that is derived from it.
    """
    kind = model.arguments.get("normalization", "none")
    return chains.normalization_template(chains.get_normalization(kind))
