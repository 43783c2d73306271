"""Batch normalisation keeps its moving statistics bit by bit if it is frozen, and at
inference. What is frozen inside layers stays frozen in copies, files and stacks.
"""

import functools

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.export import _flat
from keras_preact.health.weights import Places
from tests.keras_preact import harness


@pytest.mark.backend
@pytest.mark.parametrize("arrangement", ["original", "full_preactivation"])
def test_frozen_unit_in_training(arrangement):
    x = harness.images(2, 5, 6, 3)
    gate = kp.shortcuts.ShortcutOnlyGating(normalization="batch")
    unit = harness.unit_on(x, 4, arrangement=arrangement, strides=2, shortcut=gate)
    unit.trainable = False
    before = unit.get_weights()
    inference = harness.numpy(unit(x, training=False))
    # Inference uses other kernels, which may round differently.
    harness.close(unit(x, training=True), inference, tolerance=1e-6)
    for value, old in zip(unit.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)
    assert not unit.trainable_weights
    assert not kp.ResidualUnit.from_config(unit.get_config()).trainable


def test_a_frozen_template_freezes_the_norms_alone():
    unit = kp.ResidualUnit(4, normalization=keras.layers.BatchNormalization(trainable=False))
    unit.build((2, 5, 6, 4))
    trained = [weight.path.rsplit("/", 2)[1] for weight in unit.trainable_weights]
    assert trained == ["conv_1", "conv_2"]


# --- What is frozen inside layers, through every copy


def freeze_norms(model):
    """The loop of many tutorials."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False


def freeze_first_weights(model):
    for layer in model._flatten_layers():
        if layer.name in ("conv_1", "stem_conv"):
            layer.trainable = False


def freeze_first_stage(model):
    kp.transfer.freeze(model, up_to="stage1")


WAYS = (freeze_norms, freeze_first_weights, freeze_first_stage)


def network(stacked):
    options = {"block": "basic", "input_shape": (6, 6, 3), "classes": 4, "stacked": stacked}
    model = kp.models.ResidualNetwork([(4, 3), (4, 3, 2)], stem="3x3", stem_filters=4, **options)
    harness.randomize(model)
    return model


def from_file(model, folder):
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras")


def nested(model, folder):
    """A layer of another model, from that model's file."""
    inputs = keras.Input((6, 6, 3))
    return from_file(keras.Model(inputs, model(inputs)), folder).layers[-1]


def built_of_layers(model, folder):
    """A model of Keras, not of this package, from its file."""
    return from_file(keras.Model(model.input, model.output), folder)


COPIES = {
    "file": from_file,
    "config": lambda model, _: type(model).from_config(model.get_config()),
    "nested": nested,
    "of layers": built_of_layers,
    "changed_copy": lambda model, _: kp.models.changed_copy(model, dropout=0.5),
    "reset_classifier": lambda model, _: kp.transfer.reset_classifier(model, 4),
    "stack": lambda model, _: kp.models.stack(model),
    "unstack": lambda model, _: kp.models.unstack(model),
}


@functools.cache
def all_trained(stacked) -> set[str]:
    """What a network that nothing has frozen trains."""
    return trained_weights(network(stacked))


def trained_weights(model) -> set[str]:
    find = Places(model)
    return {place.name for weight in model.trainable_weights for place in find.of(weight)}


@functools.cache
def frozen(way, stacked):
    """A partly frozen network. Copies leave it as it is."""
    model = network(stacked)
    way(model)
    return model


@pytest.mark.parametrize(
    ("copy", "way", "stacked"),
    [
        # separate and stacked units in turn; the other half is slow
        pytest.param(
            copy,
            way,
            stacked,
            id=f"{copy}-{way.__name__}-{'stacked' if stacked else 'separate'}",
            marks=pytest.mark.soak if (i + j + stacked) % 2 else (),
        )
        for i, copy in enumerate(COPIES)
        for j, way in enumerate(WAYS)
        for stacked in (False, True)
    ],
)
def test_copies_keep_what_is_frozen(copy, way, stacked, tmp_path):
    model = frozen(way, stacked)
    expected = trained_weights(model)
    assert expected < all_trained(stacked)
    assert trained_weights(COPIES[copy](model, tmp_path)) == expected


@pytest.mark.backend
@pytest.mark.parametrize("way", WAYS)
def test_fit_changes_nothing_that_is_frozen(way):
    """In a stack too, with its moving statistics."""
    models = network(False), network(True)
    for model in models:
        way(model)
        before = harness.weights(model)
        # one of the ways in a graph: TensorFlow takes seconds to trace one
        eagerly = keras.backend.backend() == "tensorflow" and way is not freeze_norms
        harness.compiled(model, jit_compile=False, run_eagerly=eagerly)
        model.fit(harness.images(4, 6, 6, 3), np.arange(4), verbose=0)
        statistics = {w.path for w in model.weights if "moving_" in w.path}
        own = {weight.path for weight in model.trainable_weights}
        if way is freeze_first_weights:
            own |= statistics
        elif way is freeze_first_stage:
            own |= {path for path in statistics if path.startswith(("stage2", "head"))}
        assert harness.changed(model, before) == own


@pytest.mark.backend
@pytest.mark.parametrize("make", [kp.UnitStack, kp.LayerStack])
def test_stacks_of_frozen_units(make):
    unit = kp.ResidualUnit(4, trainable=False)
    stack = make(unit, 3)
    x = harness.images(2, 5, 6, 4)
    before = harness.numpy(stack(x, training=True))
    np.testing.assert_array_equal(before, harness.numpy(stack(x, training=True)))
    assert not stack.trainable_weights
    assert not make.from_config(stack.get_config()).trainable
    assert make(unit, 3, trainable=True).trainable
    built = kp.ResidualUnit(4, name="unit1")
    built.build(x.shape)
    freeze_norms(built)
    second = built.at("unit2")
    second.build(x.shape)
    for each in (make(built, 2), make.from_units([built, second])):
        each(x)
        trained = [weight.path.split("/")[-2] for weight in each.trainable_weights]
        assert trained == ["conv_1", "conv_2"]
        assert [w.path for w in each.unit(1).trainable_weights] == [
            "unit2/branch/conv_1/kernel",
            "unit2/branch/conv_2/kernel",
        ]
        each.trainable = False  # on TensorFlow, Keras ignores a value that it has already
        each.trainable = True
        assert len(each.trainable_weights) == 6


def test_layers_inside_a_transformer_unit():
    inputs = keras.Input((5, 4))
    model = keras.Model(inputs, kp.TransformerUnit(4, num_heads=2, name="unit")(inputs))
    model.layers[-1].attention.trainable = False
    copy = keras.Model.from_config(model.get_config())
    assert {weight.path.split("/")[1] for weight in copy.trainable_weights} == {"mlp"}


def test_units_of_a_stack_with_different_frozen_layers():
    model = network(stacked=False)
    freeze_norms(model.units[1])
    message = harness.error_of(lambda: kp.models.stack(model))
    assert "branch/norm_0, branch/norm_1 in stage1_unit2 and stage1_unit3" in message
    model.units[1].trainable = False
    message = harness.error_of(lambda: kp.models.stack(model))
    assert "Received: only stage1_unit2 frozen" in message


def test_copies_of_units_are_frozen_if_the_units_are():
    units = frozen(freeze_first_stage, True).copy_units()
    assert [unit.trainable for unit in units] == [False] * 3 + [True] * 3


def test_training_never_changes_a_whitening_stem():
    model = kp.models.fast_resnet(1, input_shape=(32, 32, 3), width_factor=0.125)
    kp.transfer.freeze(model)
    kp.transfer.unfreeze(model)
    model.trainable = True
    for each in (model, kp.models.changed_copy(model)):
        assert "stem_conv/kernel" not in [weight.path for weight in each.trainable_weights]


@pytest.mark.parametrize("stacked", [False, True], ids=["separate", "stacked"])
def test_layers_with_lora(stacked):
    """Copies and exports have one kernel, the sum. A stack refuses layers with LoRA."""
    model, x = network(stacked), harness.images(2, 6, 6, 3)
    for layer in model._flatten_layers():
        if layer.name == "conv_1":
            layer.enable_lora(2)
            if not stacked:
                layer.lora_kernel_b.assign(np.full(layer.lora_kernel_b.shape, 0.1))
    if stacked:
        assert "add LoRA to them, in separate units" in harness.error_of(lambda: model(x))
        return
    expected = harness.numpy(model(x))
    for copy in (kp.models.changed_copy(model), kp.models.stack(model), _flat.flat(model)):
        harness.close(harness.numpy(copy(x)), expected, 1e-5)
        assert "lora" not in str([weight.path for weight in copy.weights])
