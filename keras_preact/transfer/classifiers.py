"""A trained network with a new classifier."""

from typing import Any

from keras_preact import _checks
from keras_preact.models.base import UnitNetwork
from keras_preact.transfer import _places
from keras_preact.transfer.copies import changed_copy


def reset_classifier(model: UnitNetwork, classes: int, activation: Any = None) -> UnitNetwork:
    """Return a new network with another classifier and copies of everything else:
    weights, seeds, what is frozen.

    The new classifier is drawn as the network's builder draws it, and is trained.

    Args:
        model: A network of residual units, stacked or not, with a classifier or
            without. It stays as it is.
        classes: Of the new classifier. 0: for none; the network ends with its pooling
            and returns the embedding, `(batch, channels)`.
        activation: Behind the new classifier: None for logits, or `"softmax"`, ...

    Returns:
        A network of the same class, not compiled.

    Raises:
        ValueError: for classes that are no number of classes, a model that is no
            network of residual units, and one of a class without `include_top` where
            classes is 0.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20, classes=100)
    >>> kp.transfer.reset_classifier(model, 3).output_shape, kp.transfer.reset_classifier(model, 0).output_shape
    ((None, 3), (None, 64))
    """
    _places.check(model)
    if classes == 0 and not isinstance(classes, bool):
        config = model.get_config()
        if "include_top" not in config:
            raise ValueError(
                f"A {type(model).__name__} has a classifier: `classes` must be 1 or more. "
                "Received: classes=0"
            )
        return changed_copy(
            model, include_top=False, pooling=config["pooling"] or "avg", classifier_activation=None
        )
    _checks.positive_int(classes, "classes")
    changes = {"include_top": True} if "include_top" in model.get_config() else {}
    return changed_copy(
        model, ("head_classifier",), classes=classes, classifier_activation=activation, **changes
    )
