"""Learning rates that fall from the classifier to the stem."""

from keras_preact import _checks
from keras_preact.models.base import UnitNetwork
from keras_preact.transfer import _places


def rate_factors(model: UnitNetwork, decay: float) -> dict[str, float]:
    """Return the `rate_factors` of an optimizer of `kp.optimizers` for a network: 1 for the
    head. Each stage and the stem have `decay` times the factor of the part after them.

    The first layers of a trained network are general and need little change for a new
    task; a new classifier needs much. Parts that are frozen are left out: freeze first.

    Args:
        model: The network to train.
        decay: Factor from each part to the one before it, above 0 and at most 1.

    Raises:
        ValueError: for a decay out of range, and a model that is not a network of units.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(8, input_shape=(8, 8, 1))
    >>> factors = kp.transfer.rate_factors(model, decay=0.5)
    >>> factors
    {'stem': 0.0625, 'stage1': 0.125, 'stage2': 0.25, 'stage3': 0.5, 'head': 1.0}
    >>> optimizer = kp.optimizers.CoupledSGD(0.01, rate_factors=factors)

    Source: discriminative fine-tuning, Sec. 3.2 of arXiv 1801.06146.
    """
    parts = ["stem", *_places.stages(model), "head"]
    if not _checks.is_number(decay) or not 0 < decay <= 1:
        raise ValueError(f"`decay` must be a number above 0, at most 1. Received: decay={decay!r}")
    trained = {
        part
        for part in parts
        for layer in model.layers
        if layer.name.startswith(f"{part}_") and layer.trainable_weights
    }
    return {
        name: float(decay) ** (len(parts) - 1 - i)
        for i, name in enumerate(parts)
        if name in trained
    }
