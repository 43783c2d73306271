"""A network of this library as a backbone of keras-hub: feature maps, presets, tasks."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

keras_hub = pytest.importorskip("keras_hub")
from keras_preact import hub  # noqa: E402 (it imports keras-hub)

IMAGES = harness.images(4, 40, 40, 3)


def backbone(**options):
    options = {"width_factor": 1 / 8, "classes": 4, "input_shape": (40, 40, 3)} | options
    model = kp.models.resnet_imagenet((2, 3, 1, 1), block="basic", **options)
    harness.randomize(model)
    return hub.PreActResNetBackbone.from_network(model), model


def check_equal_outputs(one, other):
    expected = harness.numpy(one(IMAGES))
    assert expected.std() > 0.01
    np.testing.assert_allclose(harness.numpy(other(IMAGES)), expected, atol=1e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_maps_and_pyramid_are_the_networks(stacked):
    found, model = backbone(stacked=stacked, mean=127.5, std=127.5)
    assert isinstance(found.network, kp.models.ResidualNetwork)
    pyramid = keras.Model(found.inputs[0], found.pyramid_outputs | {"maps": found.output})
    levels = {f"P{i + 2}": maps for i, maps in enumerate(model.stage_outputs.values())}
    ours = keras.Model(model.inputs[0], levels | {"maps": model.layers[-3].output})
    images = IMAGES * 60 + 128
    expected, got = ours(images), pyramid(images)
    assert list(got) == ["P2", "P3", "P4", "P5", "maps"]
    for name, maps in got.items():
        harness.close(harness.numpy(maps), harness.numpy(expected[name]), 1e-4, name)
    stem = found.get_layer("stem_conv")
    stem.set_weights([0 * stem.get_weights()[0]])  # the other network has its own weights
    assert np.abs(model.get_layer("stem_conv").get_weights()[0]).max() > 0


def test_levels_of_a_dilated_network():
    pyramid = backbone(output_stride=8)[0].pyramid_outputs
    assert {level: maps.shape[1] for level, maps in pyramid.items()} == {"P2": 10, "P3": 5}


def test_presets(tmp_path):
    """The class and keras-hub's `Backbone` load a preset from a directory."""
    own, _ = backbone(normalization="group", stacked=True)
    own.save_to_preset(preset := str(tmp_path / "preset"))
    for cls in (hub.PreActResNetBackbone, keras_hub.models.Backbone):
        loaded = cls.from_preset(preset)
        assert type(loaded) is hub.PreActResNetBackbone
        assert loaded.get_config() == own.get_config()
        check_equal_outputs(own, loaded)
    options = {"image_shape": (64, 64, 3), "dtype": "bfloat16"}
    other = hub.PreActResNetBackbone.from_preset(preset, **options)
    assert other.output_shape == (None, 2, 2, 64)
    assert {other.compute_dtype, other.get_layer("stem_conv").compute_dtype} == {"bfloat16"}


@pytest.mark.filterwarnings(
    "ignore:`shuffle=True` was passed:UserWarning"
)  # keras-hub's fit passes a data set and `shuffle`
def test_a_classifier_on_top(tmp_path):
    """keras-hub's task trains it, and loads it from a preset."""
    own, _ = backbone()
    own.get_layer("stage1_unit1").trainable = False
    classifier = hub.PreActResNetImageClassifier(backbone=own, num_classes=3)
    before = own.get_layer("stem_conv").get_weights()[0]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    classifier.compile(optimizer="sgd", loss=loss, metrics=[])
    classifier.fit(IMAGES, np.array([0, 1, 2, 0]), verbose=0)
    assert np.abs(own.get_layer("stem_conv").get_weights()[0] - before).max() > 0
    classifier.save_to_preset(str(tmp_path / "preset"))
    loaded = keras_hub.models.ImageClassifier.from_preset(str(tmp_path / "preset"))
    assert isinstance(loaded, hub.PreActResNetImageClassifier)
    check_equal_outputs(classifier, loaded)
    own.save(tmp_path / "backbone.keras")
    loaded = keras.saving.load_model(tmp_path / "backbone.keras")
    assert [layer.name for layer in loaded.layers if not layer.trainable] == ["stage1_unit1"]


def test_names_and_wrong_arguments():
    build = hub.PreActResNetBackbone
    stages = [(8, 1, 1)]
    named = build(stages, block="basic", image_shape=(32, 32, 3), name="mine")
    assert named.name == named.network.name == "mine"
    for call, word in (
        (lambda: build(stages, classes=3), "classes"),
        (lambda: build(stages, pooling="avg", include_top=True), "include_top, pooling"),
        (lambda: build([(8, 1, 3)], image_shape=(40, 40, 3)), "powers of two"),
        (lambda: build.from_network(keras.Sequential()), "must be a ResidualNetwork"),
    ):
        assert word in harness.error_of(call)
