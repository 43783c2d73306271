"""Draw the singular values of the weights of models by layer."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_preact.analysis.figures import style
from keras_preact.analysis.weight_spectra import WeightSpectra


def spectral_norms(spectra: Mapping[str, WeightSpectra]) -> Any:
    """Draw the largest singular value (above) and the stable rank (below) of every weight
    matrix, from the first layer to the last, one line per model.

    Args:
        spectra: Label to what `kp.analysis.weight_spectra` returned.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: if there is no model to draw.

    Example:

    >>> import keras_preact as kp
    >>> from keras_preact.analysis import figures
    >>> model = kp.models.resnet_cifar(8, input_shape=(8, 8, 1), kernel_initializer="ones")
    >>> figure = figures.spectral_norms({"ones": kp.analysis.weight_spectra(model)})
    >>> figure.axes[1].lines[0].get_ydata().round(6).tolist()[:3]
    [1.0, 1.0, 1.0]
    """
    style.need(spectra, "model")
    panels = []
    for title, name, label in (
        ("Largest singular values", "sigma_max", r"$\sigma_{max}(W)$"),
        ("Stable ranks", "stable_rank", r"$\|W\|_F^2\ /\ \sigma_{max}^2$"),
    ):
        series = {model: getattr(each, name) for model, each in spectra.items()}
        spread = style.spread(np.concatenate(list(series.values())))
        panels.append(style.Panel(f"{title}: {spread}", label, series))
    return style.depth_figure(panels, "Weight matrix", height=5.2)
