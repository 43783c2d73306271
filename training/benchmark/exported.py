"""Exports a network with new weights, in a process of its own. The argument is JSON, the
result one line of JSON on stdout: the folder of the version.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_preact as kp

from .. import children
from ..errors import checking
from . import candidates

#: Images that measure the ranges of the activations for 8 bits.
CALIBRATION = 64


def export(
    name: str, options: Mapping[str, Any], image_size: int | None, precision: str, folder: str
) -> dict:
    """Export a network. `precision` is one of `kp.export.save`, or `other`: Keras writes the
    SavedModel, as a user of another package does it.
    """
    keras.utils.set_random_seed(0)
    with checking():
        model = candidates.build(name, options, image_size)
    random = np.random.default_rng(0)
    for variable in model.variables:
        # as if trained: TensorFlow would drop biases of zero from the graph, and then could not
        # join a convolution with the activation after it
        if variable.dtype.startswith("float"):
            variable.assign(variable * random.uniform(0.9, 1.1, variable.shape) + 0.001)
    path = Path(folder)
    if precision == "other":
        model.export(path / "1", format="tf_saved_model", verbose=False)
        return {"version": str(path / "1")}
    shape = (CALIBRATION, *model.input_shape[1:])
    images = random.standard_normal(shape, "float32")
    classes = model.output_shape[-1]
    others: dict[str, Any] = {}
    if precision != "float32":
        # The classes of new weights are chance, and say nothing about the precision.
        others = {
            "validation_data": (images, np.zeros(CALIBRATION, "int32")),
            "max_accuracy_loss": 1.0,
        }
    if precision == "int8":
        others["calibration_images"] = images
    with checking():
        version = kp.export.save(
            model, path, classes=list(map(str, range(classes))), precision=precision, **others
        )
    return {"version": str(version)}


if __name__ == "__main__":
    children.answer(lambda: export(**json.loads(sys.argv[1])))
