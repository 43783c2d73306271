"""Paths of weights."""

import keras


def below(layer: keras.Layer, variable: keras.Variable) -> str:
    """Return the path of a variable below its layer, such as `branch/conv_1/kernel`."""
    return f"/{variable.path}".split(f"/{layer.name}/", 1)[-1].lstrip("/")
