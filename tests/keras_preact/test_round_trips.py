"""A unit and a network survive their config, and a network its `.keras` file."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

CUSTOM = kp.Arrangement(
    first=("activation",), between=("norm",), last=("activation", "norm"), head=("activation",)
)

#: Objects, and options that hypothesis does not draw in test_configurations.py.
OPTIONS = [
    {"arrangement": CUSTOM},
    {"shortcut": "exclusive_gating", "gate_bias": -3.0},
    {"shortcut": kp.shortcuts.ConstantScaling(0.25, 2.0)},
    {"shortcut": kp.shortcuts.ShortcutOnlyGating(bias=-1.0, normalization="batch")},
    {
        "shortcut": kp.shortcuts.Conv1x1(
            normalization="group", kernel_initializer=keras.initializers.HeNormal(seed=1)
        )
    },
    {"shortcut": kp.shortcuts.Dropout(rate=0.25, seed=3)},
    {"shortcut": kp.shortcuts.HyperConnections(2, "permutations", "map")},
    {"normalization": keras.layers.BatchNormalization(momentum=0.7, epsilon=0.01)},
    {"normalization": keras.layers.GroupNormalization(groups=2)},
    {"activation": keras.activations.silu},
    {"block": "bottleneck", "groups": 2, "base_width": 32, "stride_on": "3x3"},
    {"dropout": 0.3, "dropout_at": "before_addition", "use_bias": True},
    {"dropout": 0.3, "dropout_varies": True},
    {"kernel_initializer": keras.initializers.HeNormal(seed=1)},
    {"data_format": "channels_first"},
    {"dtype": "mixed_bfloat16"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=harness.label)
def test_unit(options):
    unit = harness.unit_of(4, strides=2, name="a_name", **options)
    copy = kp.ResidualUnit.from_config(unit.get_config())
    assert copy.get_config() == unit.get_config()
    assert copy.name == "a_name"
    x = harness.images(2, 4, 4, 4)
    unit.build(x.shape)
    copy.build(x.shape)
    assert harness.paths(copy) == harness.paths(unit)
    harness.randomize(unit)
    copy.set_weights(unit.get_weights())
    np.testing.assert_array_equal(harness.numpy(copy(x)), harness.numpy(unit(x)))


def test_config_of_a_built_unit_makes_an_unbuilt_one():
    """The config of a built normalisation keeps neither its weights nor its shape."""
    norm = keras.layers.BatchNormalization(momentum=0.7)
    norm.build((2, 3))
    unit = kp.ResidualUnit(4, normalization=norm)
    unit.build((2, 6, 6, 4))
    copy = kp.ResidualUnit.from_config(unit.get_config())
    assert not copy.weights
    copy.build((2, 6, 6, 8))
    assert copy.first[0].momentum == 0.7


def test_arrangement():
    assert kp.Arrangement.from_config(CUSTOM.get_config()) == CUSTOM
    assert kp.arrangements.get(kp.arrangements.serialize(CUSTOM)) == CUSTOM
    config = kp.ResidualUnit(4, arrangement=kp.ARRANGEMENTS["original"]).get_config()
    assert config["arrangement"] == "original"  # a known arrangement is its name


NETWORK_OPTIONS = [
    {"include_top": False, "arrangement": CUSTOM},
    {"include_top": False, "pooling": "max", "shortcut": kp.shortcuts.Dropout(0.25, seed=3)},
    {"classifier_activation": "softmax", "classes": 3, "activation": keras.activations.silu},
    {
        "mean": (1, 2, 3),
        "std": np.float32(2),
        "name": "a_name",
        "normalization": keras.layers.BatchNormalization(momentum=0.7, epsilon=0.01),
    },
    {"input_shape": (None, None, 1), "shortcut": "exclusive_gating", "gate_bias": -3.0},
]


@pytest.mark.parametrize("options", NETWORK_OPTIONS, ids=harness.label)
def test_network(options, tmp_path):
    """The registered models are saved and loaded in test_registry.py."""
    model = kp.models.resnet_cifar(8, width_factor=0.25, **options)
    harness.randomize(model)
    x = harness.images(2, *(size or 6 for size in model.input_shape[1:]))
    harness.check_copies(model, x, harness.numpy(model(x)), tmp_path)


def test_a_network_is_not_quantized():
    """Its file would not load."""
    model = kp.models.resnet_cifar(8, width_factor=0.25, input_shape=(8, 8, 1))
    assert "cannot be quantized" in harness.error_of(lambda: model.quantize("int8"))


#: Layers with dense layers inside, which Keras quantizes with the model around them.
WITH_DENSE_LAYERS = {
    "unit": lambda: kp.ResidualUnit(8, block="dense"),
    "transformer_unit": lambda: kp.TransformerUnit(8, num_heads=2),
    "unit_stack": lambda: kp.UnitStack(kp.ResidualUnit(8, block="dense"), 2),
    "layer_stack": lambda: kp.LayerStack(keras.layers.Dense(8), 2),
    "network": lambda: kp.models.dense_resnet(4, width=8, input_shape=(8,)),
}


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
@pytest.mark.parametrize(
    "name",
    [
        *("unit", "unit_stack", "layer_stack", "network"),
        pytest.param("transformer_unit", marks=pytest.mark.soak),  # takes Keras seconds
    ],
)
def test_a_layer_with_quantized_layers_inside_is_not_saved(name, tmp_path):
    """Its file would not load."""
    layer = WITH_DENSE_LAYERS[name]()
    inputs = keras.Input((8,) if isinstance(layer, keras.Model) else (4, 8))
    model = keras.Model(inputs, layer(inputs))
    model.quantize("int8")
    message = harness.error_of(lambda: model.save(tmp_path / "model.keras"))
    assert "cannot be saved or copied" in message
    assert message == harness.error_of(lambda: keras.models.clone_model(model))


def test_a_folder_as_keras_uploads_it_to_hugging_face(tmp_path):
    """`model.save("hf://USER/MODEL")` uploads such a folder, and `load_model` downloads it."""
    model = kp.models.resnet_cifar(8, width_factor=0.25, input_shape=(8, 8, 1))
    harness.randomize(model)
    keras.saving.save_model(model, tmp_path / "model", zipped=False)
    loaded = keras.saving.load_model(tmp_path / "model")
    assert type(loaded) is type(model)
    x = harness.images(2, 8, 8, 1)
    np.testing.assert_array_equal(harness.numpy(loaded(x)), harness.numpy(model(x)))
