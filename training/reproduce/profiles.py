"""Measures the size of every x_l of a network and of its gradient before training.

The argument is the settings of a record as JSON. The record is one line of JSON on
stdout. The command `depth` runs this module in a process per network.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .. import backends, children, disk
from ..config import Data

if TYPE_CHECKING:
    from keras_preact.analysis import Propagation

    from ..data.image_data import ImageData
    from ..data.readers import Arrays

FORMAT = 2


@dataclasses.dataclass(frozen=True)
class Network:
    """A kind of network, at any depth.

    Args:
        label: Its name in tables and figures.
        arguments: Arguments of the builder, besides those that all networks have.
        deepest: Largest number of layers at which its gradients fit into float32.
    """

    label: str
    arguments: Mapping[str, Any]
    deepest: float = math.inf


Name = Literal["preact", "preact_scaled", "original", "plain"]

NETWORKS: Mapping[Name, Network] = {
    "preact": Network("pre-activation", {"arrangement": "full_preactivation"}),
    "preact_scaled": Network(
        "pre-activation, scaled weights",
        {
            "arrangement": "full_preactivation",
            "kernel_initializer": "keras_preact>DepthScaledHe",
        },
    ),
    "original": Network("original", {"arrangement": "original"}),
    # its gradients grow by a factor of 10 in 15 layers
    "plain": Network(
        "plain, no shortcut", {"arrangement": "original", "shortcut": "none"}, deepest=506
    ),
}

#: Arguments of every network, for the digits' 8 x 8 pixels: 4, 8, 16 channels; bottlenecks return
#: four times as many.
ARGUMENTS: Mapping[str, Any] = {
    "block": "bottleneck",
    "width_factor": 0.25,
    "input_shape": [8, 8, 1],
}

#: Approximate number of units in a file: evenly spaced ones, the first and the last.
POINTS = 400


def settings_of(network: Name, layers: int, batch: int = 16, seed: int = 0) -> dict[str, Any]:
    """Return the settings that determine a measurement, besides the code: network, data
    and backend.
    """
    import keras

    return {
        "network": network,
        "layers": layers,
        "builder": "resnet_cifar",
        "arguments": {"depth": layers, **ARGUMENTS, **NETWORKS[network].arguments},
        "data": "digits",
        "batch": batch,
        "seed": seed,
        "backend": keras.backend.backend(),
    }


def measure(settings: Mapping[str, Any]) -> dict:
    """Measure one network in this process; return its record without the state of the
    code.

    Args:
        settings: See `settings_of`.
    """
    import keras

    import keras_preact as kp

    start = time.perf_counter()
    keras.utils.set_random_seed(settings["seed"])
    x, labels, images = first_images(settings["data"], settings["batch"])
    loaded = time.perf_counter()
    model = getattr(kp.models, settings["builder"])(**settings["arguments"])
    built = time.perf_counter()
    signals = kp.analysis.propagation(model, x, labels)
    measured = time.perf_counter()
    return {
        "format": FORMAT,
        "settings": dict(settings),
        **profile(signals),
        "parameters": int(sum(np.prod(weight.shape) for weight in model.trainable_weights)),
        "data": {"name": images.name, "hash": images.hash},
        "device": backends.described("keras-preact"),
        "cost": {
            "seconds": round(measured - loaded, 3),
            "build_seconds": round(built - loaded, 3),
            "load_seconds": round(loaded - start, 3),
            "peak_resident_bytes": backends.peak_resident(),
        },
    }


def first_images(name: str, batch: int) -> "tuple[np.ndarray, np.ndarray, ImageData]":
    """Return the first training images of a data set in memory, as the network reads them,
    their labels, and the data set.
    """
    from .. import data

    images = data.load(Data(name))
    assert images.in_memory is not None
    x, labels = standardised(images, images.in_memory)
    return x[:batch], labels[:batch], images


def standardised(data: "ImageData", split: "Arrays") -> tuple[np.ndarray, np.ndarray]:
    """Return the images of a split of a data set as the network reads them, and their
    labels.
    """
    preprocessing = data.preprocessing
    x = (split.images - np.array(preprocessing.mean)) / np.array(preprocessing.std)
    return x.astype("float32"), split.labels


def profile(signals: "Propagation") -> dict[str, Any]:
    """Return the part of a record that describes the signals of a network of L units.

    Returns:
        `loss`; the number of `units`; `growth`, rms(x_L) / rms(x_1), where rms is the
        root mean square; `gradient_ratio`, `||dE/dx_1|| / ||dE/dx_L||`; and `profile`,
        with lists for about `POINTS` units: `unit` (0 for x_0, the input of the first
        unit), `activation_rms` and `gradient_norm`. Values that are not finite are None.
    """
    rms, gradient = np.hypot(signals.x_mean, signals.x_std), signals.gradient_norm
    total = len(signals.units)
    kept = sorted({*range(0, total + 1, math.ceil(total / POINTS)), 1, total})
    with np.errstate(all="ignore"):
        growth, ratio = rms[total] / rms[1], gradient[1] / gradient[total]
    record = {
        "loss": signals.loss,
        "units": total,
        "growth": growth,
        "gradient_ratio": ratio,
        "profile": {
            "unit": kept,
            "activation_rms": rms[kept],
            "gradient_norm": gradient[kept],
        },
    }
    return disk.plain(record, digits=6)


if __name__ == "__main__":
    children.answer(lambda: measure(json.loads(sys.argv[1])))
