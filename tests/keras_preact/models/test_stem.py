"""Stems of several convolutions, with the features that meet a stem."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.export import _flat
from tests.keras_preact import harness

#: The convolutions of a deep stem, with what comes after each in full pre-activation.
LAYERS = [
    *("stem_conv", "stem_norm_1", "stem_activation_1"),
    *("stem_conv_2", "stem_norm_2", "stem_activation_2"),
    *("stem_conv_3", "stem_norm", "stem_activation", "stem_pool"),
]
WIDTHS = {"deep": [32, 32, 64], "tiered": [24, 32, 64]}


def network(stem="deep", **options):
    options = {"width_factor": 1 / 8, "input_shape": (32, 32, 3), "classes": 3} | options
    return kp.models.resnet_imagenet((1, 3), stem=stem, downsampling="average", **options)


@pytest.mark.parametrize("stem", WIDTHS)
def test_layers(stem):
    model = network(stem, input_shape=(None, 32, 1))
    layers = [layer for layer in model.layers if layer.name.startswith("stem")]
    assert [layer.name for layer in layers] == LAYERS
    convolutions = [layer for layer in layers if "conv" in layer.name]
    assert [layer.filters for layer in convolutions] == WIDTHS[stem]
    assert [layer.strides for layer in convolutions] == [(2, 2), (1, 1), (1, 1)]
    assert model.first_input.shape[2] == 8


@pytest.mark.backend
@pytest.mark.parametrize("stacked", [False, True])
def test_shapes_files_precision_and_formats(stacked, tmp_path):
    def build(**options):
        first = options.get("data_format") == "channels_first"
        shape = (3, 32, 32) if first else (32, 32, 3)
        return network(input_shape=shape, stacked=stacked, **options)

    harness.check_model(build, tmp_path)


@pytest.mark.parametrize(
    "kernel", [None, keras.initializers.HeNormal(seed=1)], ids=["default", "given"]
)
def test_every_convolution_draws_its_own_values(kernel):
    harness.check_distinct(harness.kernels(network(kernel_initializer=kernel)))


def test_options_of_the_units_hold_in_the_whole_stem():
    model = network(
        arrangement="full_preactivation_raw_stem",
        use_bias="unless_norm",
        normalization="group",
        activation="gelu",
        standardize_weights=True,
        kernel_regularizer=keras.regularizers.L2(0.1),
    )
    layers = {layer.name: layer for layer in model.layers if layer.name.startswith("stem")}
    assert list(layers) == [*LAYERS[:7], "stem_pool"]
    convolutions = [layer for name, layer in layers.items() if "conv" in name]
    assert [layer.use_bias for layer in convolutions] == [False, False, True]
    assert all(layer.standardize and layer.kernel_regularizer for layer in convolutions)
    assert layers["stem_activation_2"].activation is keras.activations.gelu
    assert isinstance(layers["stem_norm_2"], keras.layers.GroupNormalization)
    without = network(normalization="none")
    assert not any("norm" in layer.name for layer in without.layers)


def test_features():
    """Freezing, an audit, features and an exported graph find the whole stem."""
    model, x = network(), harness.images(4, 32, 32, 3)
    report = kp.analysis.audit(model, x)
    assert (report.passed, report.arrangement) == (True, "full_preactivation")
    harness.randomize(model)
    folded = _flat.flat(model, fold=True)
    harness.close(harness.numpy(folded(x)), harness.numpy(model(x)), 1e-3)
    maps = kp.transfer.feature_extractor(model, ["stem"])(x)["stem"]
    assert maps.shape == (4, 8, 8, 64)
    kp.transfer.freeze(model, "stem")
    trained = {weight.path.split("/")[0] for weight in model.trainable_weights}
    assert trained == {"stage1_unit1", "stage2_unit1", "stage2_unit2", "stage2_unit3"} | {
        *("head_norm", "head_classifier")
    }
    before = {path: value for path, value in harness.weights(model).items() if "stem" in path}
    harness.compiled(model, run_eagerly=True)
    model.fit(x, np.arange(4) % 3, verbose=0)
    after = harness.weights(model)
    assert all(np.array_equal(after[path], value) for path, value in before.items())
