"""Paths of weights."""

import keras


def below(layer: keras.Layer, part: keras.Variable | keras.Layer) -> str:
    """Return the path of a variable or an inner layer below its layer, such as
    `branch/conv_1/kernel`.
    """
    return f"/{part.path}".split(f"/{layer.name}/", 1)[-1].lstrip("/")
