"""A unit and a network survive their config, and a network its `.keras` file."""

import warnings

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

CUSTOM = kp.Arrangement(
    first=("activation",), between=("norm",), last=("activation", "norm"), head=("activation",)
)

OPTIONS = [
    *({"arrangement": name} for name in kp.ARRANGEMENTS),
    {"arrangement": CUSTOM},
    *({"shortcut": name} for name in kp.SHORTCUTS),
    {"shortcut": "exclusive_gating", "gate_bias": -3.0},
    {"shortcut": kp.shortcuts.ConstantScaling(0.25, 2.0)},
    {"shortcut": kp.shortcuts.ShortcutOnlyGating(bias=-1.0, normalization="batch")},
    {
        "shortcut": kp.shortcuts.Conv1x1(
            normalization="group", kernel_initializer=keras.initializers.HeNormal(seed=1)
        )
    },
    {"shortcut": kp.shortcuts.Dropout(rate=0.25, seed=3)},
    {"normalization": "layer"},
    {"normalization": keras.layers.BatchNormalization(momentum=0.7, epsilon=0.01)},
    {"normalization": keras.layers.GroupNormalization(groups=2)},
    {"activation": "gelu"},
    {"activation": keras.activations.silu},
    {"shape_shortcut": "zero_pad", "activate_shape_shortcut": False},
    {"block": "bottleneck", "groups": 2, "base_width": 32, "stride_on": "3x3"},
    {"block": "single"},
    {"dropout": 0.3, "dropout_at": "before_addition", "use_bias": True},
    {"kernel_initializer": keras.initializers.HeNormal(seed=1)},
    {"kernel_initializer": "glorot_uniform"},
    {"data_format": "channels_first"},
    {"dtype": "mixed_bfloat16"},
]


@pytest.mark.backend
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


@pytest.mark.backend
def test_config_of_a_built_unit_makes_an_unbuilt_one():
    """The pattern of a built normalisation or shortcut holds no weights and no axis of
    its own.
    """
    norm = keras.layers.BatchNormalization(momentum=0.7)
    norm.build((2, 3))
    unit = kp.ResidualUnit(4, normalization=norm, shortcut=kp.shortcuts.Conv1x1())
    unit.build((2, 6, 6, 4))
    assert len(unit.weights) == 2 * 4 + 2 + 1  # the pattern's own four are not among them
    copy = kp.ResidualUnit.from_config(unit.get_config())
    assert not copy.weights
    copy.build((2, 6, 6, 8))
    assert copy.first[0].momentum == 0.7


@pytest.mark.backend
def test_config_holds_names_where_there_are_names():
    config = kp.ResidualUnit(4, arrangement=kp.ARRANGEMENTS["original"]).get_config()
    assert config["arrangement"] == "original"
    assert config["normalization"] == "batch"
    assert config["activation"] == "relu"


@pytest.mark.backend
def test_arrangement():
    assert kp.Arrangement.from_config(CUSTOM.get_config()) == CUSTOM
    assert kp.arrangements.get(kp.arrangements.serialize(CUSTOM)) == CUSTOM
    assert kp.arrangements.get(CUSTOM) is CUSTOM
    for name, row in kp.ARRANGEMENTS.items():
        assert kp.arrangements.serialize(row) == name


NETWORK_OPTIONS = [
    {"include_top": False, "arrangement": CUSTOM},
    {"include_top": False, "pooling": "max", "shortcut": kp.shortcuts.Dropout(0.25, seed=3)},
    {"classifier_activation": "softmax", "classes": 3, "activation": keras.activations.silu},
    {
        "mean": [1.0, 2.0, 3.0],
        "std": 2.0,
        "name": "a_name",
        "normalization": keras.layers.BatchNormalization(momentum=0.7, epsilon=0.01),
    },
    {"input_shape": (None, None, 1), "shortcut": "exclusive_gating", "gate_bias": -3.0},
]


def small_cifar(**options):
    depth = {"bottleneck": 11, "single": 5}.get(options.get("block"), 8)
    return kp.models.resnet_cifar(depth, **{"width_factor": 0.25} | options)


@pytest.mark.backend
@pytest.mark.parametrize(
    "options",
    [*NETWORK_OPTIONS, *(pytest.param(each, marks=pytest.mark.soak) for each in OPTIONS)],
    ids=harness.label,
)
def test_network(options, tmp_path):
    """The registered models are saved and loaded in test_registry.py."""
    model = small_cifar(**options)
    harness.randomize(model)
    shape = [6 if size is None else size for size in model.input_shape[1:]]
    x = harness.images(2, *shape)
    harness.check_copies(model, x, harness.numpy(model(x)), tmp_path)


def test_a_network_is_not_quantized(tmp_path):
    """Its file would not load; a plain model of its layers does."""
    model = kp.models.resnet_cifar(8, width_factor=0.25, input_shape=(8, 8, 1))
    with pytest.raises(ValueError, match=r"cannot be quantized.*Received: mode='int8'"):
        model.quantize("int8")
    plain = keras.Model(model.input, model.output)
    with warnings.catch_warnings():  # layers without quantisation
        warnings.simplefilter("ignore")
        plain.quantize("int8")
    plain.save(tmp_path / "plain.keras")
    loaded = keras.saving.load_model(tmp_path / "plain.keras")
    x = harness.images(2, 8, 8, 1)
    np.testing.assert_array_equal(harness.numpy(loaded(x)), harness.numpy(plain(x)))
