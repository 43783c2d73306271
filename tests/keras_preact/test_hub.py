"""A network of ours is a backbone of keras-hub: its maps, its presets, its tasks."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

keras_hub = pytest.importorskip("keras_hub")
from keras_preact import hub  # noqa: E402 (it imports keras-hub)

not_jax = pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="nothing of it depends on the backend; JAX compiles long",
)


def network(**options):
    options = {"width_factor": 1 / 8, "classes": 4, "input_shape": (40, 40, 3)} | options
    model = kp.models.resnet_imagenet((2, 3, 1, 1), block="basic", **options)
    harness.randomize(model)
    return model


def outputs(model, images):
    return keras.tree.map_structure(keras.ops.convert_to_numpy, model(images))


def check_equal_outputs(one, other, images=None):
    images = harness.images(2, 40, 40, 3) if images is None else images
    expected = outputs(one, images)
    assert expected.std() > 0.01
    np.testing.assert_allclose(outputs(other, images), expected, atol=1e-5)


@pytest.mark.backend
@pytest.mark.parametrize("stacked", [pytest.param(False, marks=not_jax), True])
def test_maps_and_pyramid_are_the_networks(stacked):
    model = network(stacked=stacked, mean=127.5, std=127.5)
    backbone = hub.PreActResNetBackbone.from_network(model)
    assert isinstance(backbone.network, kp.models.ResidualNetwork)
    pyramid = keras.Model(backbone.inputs[0], backbone.pyramid_outputs)
    ours = keras.Model(
        model.inputs[0],
        {f"P{i + 2}": x for i, x in enumerate(model.stage_outputs.values())}
        | {"maps": model.layers[-3].output},
    )
    images = harness.images(2, 40, 40, 3) * 60 + 128
    expected, found = outputs(ours, images), outputs(pyramid, images)
    np.testing.assert_allclose(outputs(backbone, images), expected.pop("maps"), atol=1e-5)
    assert list(found) == ["P2", "P3", "P4", "P5"]
    for level, maps in found.items():
        np.testing.assert_allclose(maps, expected[level], atol=1e-4, err_msg=level)


@pytest.mark.backend
@not_jax
def test_levels_of_other_strides():
    """The last maps of every size: of strides in the last unit, those of the unit in
    front; with dilation fewer.
    """
    last = hub.PreActResNetBackbone.from_network(network(strided_unit="last"))
    sides = {level: maps.shape[1] for level, maps in last.pyramid_outputs.items()}
    assert sides == {"P2": 10, "P3": 5, "P4": 3, "P5": 2}
    dilated = hub.PreActResNetBackbone.from_network(network(output_stride=8))
    assert {level: maps.shape[1] for level, maps in dilated.pyramid_outputs.items()} == {
        "P2": 10,
        "P3": 5,
    }
    with pytest.raises(ValueError, match="powers of two"):
        hub.PreActResNetBackbone([(8, 1, 3)], image_shape=(40, 40, 3))


@pytest.mark.backend
@not_jax
def test_presets(tmp_path):
    """In a directory; found by the class and by keras-hub's own."""
    backbone = hub.PreActResNetBackbone.from_network(network(normalization="group", stacked=True))
    backbone.save_to_preset(str(tmp_path / "preset"))
    for cls in (hub.PreActResNetBackbone, keras_hub.models.Backbone):
        loaded = cls.from_preset(str(tmp_path / "preset"))
        assert type(loaded) is hub.PreActResNetBackbone
        assert loaded.get_config() == backbone.get_config()
        check_equal_outputs(backbone, loaded)
    other = hub.PreActResNetBackbone.from_preset(
        str(tmp_path / "preset"), image_shape=(64, 64, 3), dtype="bfloat16"
    )
    assert other.output_shape == (None, 2, 2, 64)
    assert {other.compute_dtype, other.get_layer("stem_conv").compute_dtype} == {"bfloat16"}
    untrained = hub.PreActResNetBackbone.from_preset(str(tmp_path / "preset"), load_weights=False)
    assert [weight.shape for weight in untrained.weights] == [
        weight.shape for weight in backbone.weights
    ]


@pytest.mark.backend
@not_jax
def test_keras_files_and_frozen_layers(tmp_path):
    backbone = hub.PreActResNetBackbone.from_network(network())
    backbone.get_layer("stage1_unit1").trainable = False
    backbone.save(tmp_path / "backbone.keras")
    loaded = keras.saving.load_model(tmp_path / "backbone.keras")
    assert [layer.name for layer in loaded.layers if not layer.trainable] == ["stage1_unit1"]
    check_equal_outputs(backbone, loaded)


@pytest.mark.backend
@not_jax
@pytest.mark.filterwarnings(
    "ignore:`shuffle=True` was passed:UserWarning"
)  # by keras-hub's fit, with a data set
def test_a_classifier_on_top(tmp_path):
    """keras-hub's task trains it, and brings it back from a preset."""
    backbone = hub.PreActResNetBackbone.from_network(network())
    assert keras_hub.models.ImageClassifier(backbone=backbone, num_classes=3).output_shape == (
        None,
        3,
    )
    classifier = hub.PreActResNetImageClassifier(backbone=backbone, num_classes=3)
    images = harness.images(4, 40, 40, 3)
    before = backbone.get_layer("stem_conv").get_weights()[0]
    classifier.compile(
        optimizer="sgd",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[],
    )
    classifier.fit(images, np.array([0, 1, 2, 0]), verbose=0)
    assert np.abs(backbone.get_layer("stem_conv").get_weights()[0] - before).max() > 0
    classifier.save_to_preset(str(tmp_path / "preset"))
    loaded = keras_hub.models.ImageClassifier.from_preset(str(tmp_path / "preset"))
    assert isinstance(loaded, hub.PreActResNetImageClassifier)
    check_equal_outputs(classifier, loaded, images)


@pytest.mark.backend
def test_own_weights_are_copies_of_the_networks_policy():
    model = network(dtype="mixed_bfloat16")
    backbone = hub.PreActResNetBackbone.from_network(model)
    assert backbone.compute_dtype == backbone.get_layer("stem_conv").compute_dtype == "bfloat16"
    backbone.get_layer("stem_conv").kernel.assign(np.zeros((7, 7, 3, 64)))
    assert np.abs(model.get_layer("stem_conv").get_weights()[0]).max() > 0


@pytest.mark.backend
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"classes": 3}, "Received: classes"),
        ({"pooling": "avg", "include_top": True}, "Received: include_top, pooling"),
        ({"stem": "9x9"}, "Unknown stem"),
    ],
    ids=str,
)
def test_wrong_arguments(arguments, named):
    assert named in harness.error_of(lambda: hub.PreActResNetBackbone([(8, 1, 1)], **arguments))


@pytest.mark.backend
def test_not_a_network():
    assert "must be a ResidualNetwork" in harness.error_of(
        lambda: hub.PreActResNetBackbone.from_network(keras.Sequential())
    )


def test_a_backbone_without_a_name_has_that_of_its_class():
    stages = [(8, 1, 1)]
    backbone = hub.PreActResNetBackbone(stages, block="basic", image_shape=(32, 32, 3))
    assert backbone.name.startswith("pre_act_res_net_backbone")
    named = hub.PreActResNetBackbone(stages, block="basic", image_shape=(32, 32, 3), name="mine")
    assert named.name == named.network.name == "mine"
