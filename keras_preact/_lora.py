"""Weights of layers with LoRA, for copies without it."""

from typing import Any

import keras

from keras_preact.backend import keras_private


def merged(layer: keras.Layer) -> dict[int, Any]:
    """Return the values of the weights of a layer by the ids of the variables. The
    products of LoRA's weights are added to the kernels; LoRA's weights are left out.
    """
    kernels: dict[int, Any] = {}
    left_out: set[int] = set()
    for inner in keras_private.layers(layer):
        if getattr(inner, "lora_enabled", False):
            kernels[id(keras_private.own_kernel(inner))] = inner.kernel
            left_out |= {id(inner.lora_kernel_a), id(inner.lora_kernel_b)}
    return {
        id(weight): kernels.get(id(weight), weight.value)
        for weight in layer.weights
        if id(weight) not in left_out
    }
