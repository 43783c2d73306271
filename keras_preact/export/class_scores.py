"""The scores of the named classes of an exported model. Needs no Keras."""

import numpy as np


def of_classes(probabilities: np.ndarray, classes: int) -> np.ndarray:
    """Return a score for each named class, `(n, classes)`.

    Args:
        probabilities: Outputs of the model, `(n, outputs)`.
        classes: Number of names. A binary classifier has one output, and may have two
            names, of the classes 0 and 1.
    """
    if probabilities.shape[-1] == 1 and classes == 2:
        return np.concatenate([1 - probabilities, probabilities], axis=-1)
    return probabilities
