"""On PyTorch, everything is computed on Keras' device, wherever the user's arrays are. The
device `meta` stands for a GPU: it computes shapes alone, and an operation that mixes it with
tensors of the CPU fails.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

pytestmark = [
    pytest.mark.backend,
    pytest.mark.skipif(keras.backend.backend() != "torch", reason="a rule of PyTorch"),
]

IMAGES, TOKENS, FEATURES = (2, 8, 8, 4), (2, 6, 8), (2, 8)
RELU = {"activation": "relu"}


def unit(shape=IMAGES, **options):
    filters, shape = shape[-1], harness.with_streams(shape, options.get("shortcut", "identity"))
    return lambda: kp.ResidualUnit(filters, **harness.alone(options)), shape, {}


def units(shape=IMAGES, call=(), **options):
    return lambda: kp.UnitStack(kp.ResidualUnit(shape[-1]), 3, **options), shape, dict(call)


def layers(template, shape, call=(), **options):
    return lambda: kp.LayerStack(template(), 3, **options), shape, dict(call)


def network(name, shape, **options):
    return lambda: kp.create_model(name, **options), shape, {}


def added(shape):
    return {"perturbations": np.ones((3, *shape), "float32"), "return_outputs": True}


#: Name to what makes a layer, the shape of its input, and further arguments of its call.
LAYERS = (
    {f"arrangement {name}": unit(arrangement=name) for name in kp.ARRANGEMENTS}
    | {
        f"shortcut {name}": unit(arrangement="original", shortcut=name, strides=strides)
        for name in kp.SHORTCUTS
        for strides in (1, 2)
    }
    | {
        f"{name} {value}": unit(**{name: value})
        for name, value in [
            ("block", "bottleneck"),
            ("stochastic_depth", 0.5),
            ("dropout", 0.5),
            ("normalization", "group"),
            ("normalization", "layer"),
        ]
    }
    | {
        "shortcut factors": (
            lambda: kp.UnitStack(
                kp.ResidualUnit(4, shortcut="decayed_identity"), 3, shortcut_factors=[0.9, 0.8, 0.7]
            ),
            IMAGES,
            {},
        )
    }
    | {f"downsampling {way}": unit(downsampling=way, strides=2) for way in ("average", "blur")}
    | {
        "squeeze-and-excitation": unit(block=kp.blocks.Bottleneck(squeeze_excitation=2)),
        "dense": unit(FEATURES, block="dense"),
        "channels_first": unit((2, 4, 4, 4), data_format="channels_first"),
        "transformer": (lambda: kp.TransformerUnit(8, num_heads=2, causal=True), TOKENS, {}),
        "UnitStack": units(),
        "UnitStack, remat": units(remat=2),
        "UnitStack, perturbations": units(call=added(IMAGES)),
        "UnitStack, remat, perturbations": units(remat=2, call=added(IMAGES)),
        "LayerStack": layers(lambda: keras.layers.Dense(8, **RELU), FEATURES, remat=2),
        "LayerStack, perturbations": layers(
            lambda: keras.layers.Dense(8, **RELU), FEATURES, added(FEATURES)
        ),
        "resnet_cifar": network("cifar_resnet20_preact", (2, 32, 32, 3)),
        "resnet_cifar, stacked": network("cifar_resnet20_preact", (2, 32, 32, 3), stacked=True),
        "mean and std": network(
            "cifar_resnet20_preact", (2, 32, 32, 3), mean=[1.0, 2.0, 3.0], std=4.0
        ),
        "vision transformer": network("digits_transformer6_preln", (2, 8, 8, 1)),
        "whitening": network("cifar_fast_resnet8", (2, 32, 32, 3)),
    }
)


@pytest.mark.parametrize("name", list(LAYERS))
def test_arrays_on_the_cpu(name):
    """A train step's forward pass. (Keras cuts the gradient of a variable on `meta`.)"""
    import torch

    make, shape, call = LAYERS[name]
    with keras.device("meta"):
        call = {
            key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for key, value in call.items()
        }
        y = make()(torch.ones(shape), training=True, **call)
    assert y.device.type == "meta"


@pytest.mark.parametrize("name", ["Muon", "AdamW", "Lion"])
def test_updates(name):
    """(`CoupledSGD` reads its learning rate, which `meta` cannot.)"""
    import torch

    with keras.device("meta"):
        inputs = keras.Input((8,))
        x = kp.UnitStack(kp.ResidualUnit(8, block="dense"), 2)(inputs)
        model = keras.Model(inputs, keras.layers.Dense(3, name="dense")(x))
        optimizer, weights = getattr(kp.optimizers, name)(0.1), model.trainable_weights
        for _ in range(2):
            optimizer.apply([torch.empty_like(weight.value) for weight in weights], weights)
    assert {weight.value.device.type for weight in (*weights, *optimizer.variables)} == {"meta"}
