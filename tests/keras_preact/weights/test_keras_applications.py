"""keras.applications' ResNetV2 and ours compute the same, from models and files, here
and back.
"""

import json
import zipfile

import keras
import numpy as np
import pytest
from keras.src.applications import resnet
from keras.src.legacy.saving import legacy_h5_format

import keras_preact as kp
from keras_preact.weights import keras_applications, loading
from tests.keras_preact import harness

BACKEND = keras.backend.backend()

#: Each costs JAX seconds of compiling; the small stacked network is made of the same parts.
single = pytest.mark.skipif(BACKEND == "jax", reason="compiles long")


def small(shape=(48, 48, 3), **options) -> keras.Model:
    """A ResNetV2 of their parts with 2, 3 and 2 units, 8, 16 and 32 wide, and random
    weights.
    """

    def stack(x):
        x = resnet.stack_residual_blocks_v2(x, 8, 2, name="conv2")
        x = resnet.stack_residual_blocks_v2(x, 16, 3, name="conv3")
        return resnet.stack_residual_blocks_v2(x, 32, 2, stride1=1, name="conv4")

    options = {
        "weights": None,
        "classes": 5,
        "classifier_activation": None,
        "input_shape": shape,
    } | options
    model = resnet.ResNet(stack, True, True, **options)
    harness.randomize(model)
    return model


def outputs(model, shape=(48, 48, 3)) -> np.ndarray:
    return keras.ops.convert_to_numpy(model(harness.images(2, *shape)))


def check_equal_outputs(one, other, shape=(48, 48, 3)):
    expected = outputs(one, shape)
    assert expected.std() > 0.05
    np.testing.assert_allclose(outputs(other, shape), expected, atol=1e-4, rtol=1e-4)


def check_equal_weights(one, other):
    assert [weight.shape for weight in one.weights] == [weight.shape for weight in other.weights]
    for weight, its in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, its)


@pytest.mark.backend
@pytest.mark.parametrize("stacked", [pytest.param(False, marks=single), True])
def test_a_small_network(stacked):
    theirs = small()
    ours = kp.weights.from_keras_applications(theirs, stacked=stacked)
    assert isinstance(ours, kp.models.ResidualNetwork)
    assert ours.name == theirs.name
    check_equal_outputs(theirs, ours)


@pytest.mark.backend
@single
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"classifier_activation": "sigmoid"},
        {"include_top": False},
        {"include_top": False, "pooling": "avg"},
    ],
    ids=str,
)
def test_heads(options):
    theirs = small(**options)
    check_equal_outputs(theirs, kp.weights.from_keras_applications(theirs))


def test_a_sample_shows_another_activation():
    theirs = small()
    check = (harness.images(2, 48, 48, 3), outputs(theirs))
    kp.weights.from_keras_applications(theirs, check=check)

    def changed(layer):
        config = layer.get_config()
        swap = isinstance(layer, keras.layers.Activation) and config["activation"] == "relu"
        return type(layer).from_config(config | {"activation": "silu"} if swap else config)

    other = keras.models.clone_model(theirs, clone_function=changed)
    other.set_weights(theirs.get_weights())
    check = (check[0], outputs(other))
    message = harness.error_of(lambda: kp.weights.from_keras_applications(other, check=check))
    assert "largest difference" in message
    assert kp.weights.ASSUMPTIONS["keras_applications"] in message
    kp.weights.from_keras_applications(other, check=check, activation="silu")


@pytest.mark.backend
def test_pooling_by_the_maximum():
    theirs = small(include_top=False, pooling="max")
    ours = kp.weights.from_keras_applications(theirs)
    check_equal_outputs(theirs, ours)
    assert ours.output_shape == (None, 128)


@pytest.mark.backend
def test_other_channels_and_classes():
    theirs = small()
    ours = kp.weights.from_keras_applications(theirs, input_shape=(48, 48, 1), classes=3)
    assert ours.output_shape == (None, 3)
    grey = harness.images(2, 48, 48, 1)
    their_maps = keras.Model(theirs.inputs[0], theirs.get_layer("post_relu").output)(
        np.repeat(grey, 3, -1)
    )
    maps = keras.Model(ours.inputs[0], ours.get_layer("head_activation").output)(grey)
    np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, (maps, their_maps)), atol=1e-4)


@pytest.mark.backend
def test_without_the_classifier_of_the_source():
    theirs = small()
    maps = keras.Model(theirs.inputs[0], theirs.get_layer("post_relu").output)
    check_equal_outputs(maps, kp.weights.from_keras_applications(theirs, include_top=False))


@pytest.mark.backend
def test_a_source_without_classifier_gets_one_if_asked_for():
    theirs = small(include_top=False)
    assert kp.weights.from_keras_applications(theirs, classes=3).output_shape == (None, 3)
    with pytest.raises(loading.WeightsMismatch, match="2 missing: head_classifier/kernel"):
        kp.weights.from_keras_applications(theirs, include_top=True)


@pytest.mark.backend
def test_dilated_maps_are_those_of_the_strided_network_between_them():
    theirs = small(include_top=False, shape=(64, 64, 3))
    dilated = kp.weights.from_keras_applications(theirs, output_stride=8)
    maps = outputs(dilated, (64, 64, 3))
    assert maps.shape[1:3] == (8, 8)
    np.testing.assert_allclose(maps[:, ::2, ::2], outputs(theirs, (64, 64, 3)), atol=1e-4)


WHOLE = [
    pytest.param("ResNet50V2", {"include_top": False}, marks=pytest.mark.soak),
    pytest.param("ResNet101V2", {"include_top": False, "pooling": "avg"}, marks=pytest.mark.soak),
    pytest.param(
        "ResNet152V2", {"classes": 3, "classifier_activation": None}, marks=pytest.mark.soak
    ),
    ("ResNet50V2", {"classes": 7}),
]


@pytest.mark.parametrize(("name", "options"), WHOLE, ids=str)
def test_whole_networks_and_back(name, options):
    """Equal outputs, and the weights that come back are the same bits."""
    theirs = getattr(keras.applications, name)(weights=None, input_shape=(64, 64, 3), **options)
    harness.randomize(theirs)
    ours = kp.weights.from_keras_applications(theirs)
    check_equal_outputs(theirs, ours, (64, 64, 3))
    back = kp.weights.to_keras_applications(ours)
    check_equal_weights(theirs, back)
    assert [layer.name for layer in back.layers][2:] == [
        layer.name if not layer.name.startswith("max_pooling2d") else own.name
        for layer, own in zip(theirs.layers[2:], back.layers[2:], strict=True)
    ]
    check_equal_outputs(theirs, back, (64, 64, 3))


@pytest.mark.parametrize("name", ["model.keras", "model.h5"])
def test_files_of_models(tmp_path, name):
    theirs = small()
    theirs.save(tmp_path / name)
    check_equal_outputs(theirs, kp.weights.from_keras_applications(tmp_path / name))


@pytest.mark.soak
@pytest.mark.parametrize("include_top", [True, False])
def test_files_of_weights(tmp_path, include_top):
    """As Keras 3 writes them, and as Keras 2 did, such as the downloads."""
    import h5py

    options = {"classes": 3, "input_shape": (64, 64, 1), "classifier_activation": None}
    theirs = keras.applications.ResNet50V2(weights=None, include_top=include_top, **options)
    harness.randomize(theirs)
    theirs.save_weights(tmp_path / "model.weights.h5")
    with h5py.File(tmp_path / "weights.h5", "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, theirs)
    wanted = kp.weights.from_keras_applications(theirs)
    for name in ("model.weights.h5", "weights.h5"):
        ours = kp.weights.from_keras_applications(tmp_path / name, input_shape=(64, 64, 1))
        assert ours.output_shape == wanted.output_shape
        check_equal_weights(ours, wanted)


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no such file"):
        kp.weights.from_keras_applications(tmp_path / "none.h5")
    (tmp_path / "text.h5").write_text("weights")
    with pytest.raises(ValueError, match=r"must be a \.keras, \.h5 or .weights.h5"):
        kp.weights.from_keras_applications(tmp_path / "text.h5")
    small().save_weights(tmp_path / "small.weights.h5")
    with pytest.raises(ValueError, match=r"has 53, 104, 155 convolutions. .* with 25"):
        kp.weights.from_keras_applications(tmp_path / "small.weights.h5")


def test_a_file_whose_configuration_is_nested_without_end(tmp_path):
    with zipfile.ZipFile(tmp_path / "deep.keras", "w") as file:
        file.writestr("metadata.json", json.dumps({"keras_version": keras.__version__}))
        file.writestr("config.json", "[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError, match=r"nested too deeply.*deep\.keras"):
        kp.weights.from_keras_applications(tmp_path / "deep.keras")


def test_models_that_are_none():
    with pytest.raises(ValueError, match="conv1_bn"):
        kp.weights.from_keras_applications(
            keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3))
        )
    inputs = keras.Input((48, 48, 3))
    scaled = small(shape=None, input_tensor=keras.layers.Rescaling(1 / 255)(inputs))
    with pytest.raises(
        ValueError, match=r"without other layers.* Received: a model with rescaling"
    ):
        kp.weights.from_keras_applications(scaled)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"strided_unit": "first"}, "strides in the last units"),
        ({"stem": "7x7"}, "stem='7x7' where it has '7x7_zero_padded'"),
        ({"normalization": "batch"}, "normalization='batch'"),
        ({"mean": 127.5, "std": 127.5}, "mean=127.5 where it has None"),
        ({"use_bias": True}, "use_bias=True where it has 'unless_norm'"),
        ({"activation": "swish"}, "activation="),
        ({"output_stride": 8}, "output_stride=8"),
        ({"include_top": True, "pooling": "max"}, "average pooling before a classifier"),
        ({"width_factor": 0.5}, "bottlenecks with 64, 128, 256 and 512 filters"),
    ],
    ids=str,
)
def test_to_keras_applications_refuses_what_computes_otherwise(options, named):
    """Most of these have weights of the same names and shapes."""
    recipe = {
        **keras_applications.FAMILY.options,
        "stride_on": "3x3",
        "strided_unit": "last",
        "include_top": False,
        "kernel_initializer": "zeros",
    }
    units = (
        50 if options.keys() & {"strided_unit", "width_factor"} else (1, 1, 1, 1)
    )  # else it is the stages that differ
    model = kp.models.resnet_imagenet(units, input_shape=(32, 32, 3), **recipe | options)
    assert named in harness.error_of(lambda: kp.weights.to_keras_applications(model))


def test_what_acts_in_training_alone_does_not_matter():
    options = {
        **keras_applications.FAMILY.options,
        "stochastic_depth": 0.2,
        "dropout": 0.1,
        "zero_init_last": True,
    }
    model = kp.models.resnet_imagenet((1, 1), input_shape=(32, 32, 3), **options)
    keras_applications.FAMILY.check(model)
