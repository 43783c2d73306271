"""What is frozen stays as it is to the bit, weights and moving statistics, and what
follows is trained.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import transfer
from tests.keras_preact import harness


def network(units=(2, 2, 1), **options):
    """Of a CIFAR network's parts; most units are of one shape, for which JAX compiles
    once.
    """
    stages = [(4, units[0], 1), (4, units[1], 1), (8, units[2], 2)]
    options |= {"block": "basic", "input_shape": (6, 6, 3), "classes": 4}
    model = kp.models.ResidualNetwork(stages, stem="3x3", stem_filters=4, **options)
    harness.randomize(model)
    return model


def changed_by_fit(model, run_eagerly=True) -> set[str]:
    """Train for some steps; return the paths of the weights that are not what they
    were, moving statistics among them. Tracing takes TensorFlow seconds.
    """
    before = harness.weights(model)
    options = {"run_eagerly": run_eagerly, "jit_compile": False}
    harness.compiled(model, keras.optimizers.Adam(0.01), **options)
    model.fit(harness.images(8, 6, 6, 3), np.arange(8) % 4, batch_size=4, verbose=0)
    return harness.changed(model, before)


def after(model, frozen: tuple[str, ...]) -> set[str]:
    return {weight.path for weight in model.weights if not weight.path.startswith(frozen)}


STEM = ("preprocessing", "stem")


@pytest.mark.parametrize(
    ("up_to", "stacked", "frozen"),
    [
        ("stem", False, ()),
        ("stage2_unit1", False, ("stage1", "stage2_unit1")),
        ("head", False, ("stage", "head_norm")),
        ("stage1", True, ("stage1",)),
        pytest.param("stage2_unit4", True, ("stage1", "stage2"), marks=pytest.mark.backend),
    ],
)
def test_up_to_a_place(up_to, stacked, frozen):
    model = network((2, 4, 1), stacked=stacked, mean=0.1)
    assert harness.longest_stack(model) == (3 if stacked else 0)
    transfer.freeze(model, up_to)
    found = changed_by_fit(model, run_eagerly=up_to != "stage2_unit4")
    assert found == after(model, (*STEM, *frozen))


def test_inside_a_stack():
    model = network((1, 3, 1), stacked=True)
    message = harness.error_of(lambda: transfer.freeze(model, "stage2_unit2"))
    assert "kp.models.unstack(model)" in message
    assert all(layer.trainable for layer in model.layers)
    single = kp.models.unstack(model)
    transfer.freeze(single, "stage2_unit2")
    assert [unit.trainable for unit in single.units] == [False] * 3 + [True] * 2
    transfer.unfreeze(single)
    trained = {weight.path for weight in single.trainable_weights}
    assert trained == {w.path for w in single.weights if "moving_" not in w.path}


NORMS = ("gamma", "beta", "moving_mean", "moving_variance")


@pytest.mark.parametrize(("again", "stacked"), [(False, True), (True, False), (True, True)])
def test_batch_norm(stacked, again, tmp_path):
    model = network((1, 4, 1), stacked=stacked)
    before = harness.weights(model)
    frozen = transfer.freeze_batch_norm(model)
    np.testing.assert_equal(harness.weights(frozen), before)
    if again:  # freezing the rest and training it again does not touch them
        transfer.freeze(frozen, "stage3")
        transfer.unfreeze(frozen)
        frozen.save(tmp_path / "model.keras")
        frozen = keras.saving.load_model(tmp_path / "model.keras")
        transfer.freeze(frozen)
        frozen(harness.images(2, 6, 6, 3))  # where a stack tells the unit that it calls
        transfer.unfreeze(frozen)
    assert changed_by_fit(frozen) == {path for path in before if not path.endswith(NORMS)}
    if not again:
        assert changed_by_fit(model) == set(before)


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("norm", ["BatchNormalization", "LayerNormalization", "RMSNormalization"])
def test_normalisations_that_were_frozen_from_the_start(norm, data_format):
    """Some of these layers have a class of this package, which depends on the data format."""
    shape = (3, 6, 6) if data_format == "channels_first" else (6, 6, 3)
    frozen = getattr(keras.layers, norm)(trainable=False)
    model = kp.models.resnet_cifar(
        8, width_factor=0.25, input_shape=shape, data_format=data_format, normalization=frozen
    )
    trained = [weight.path for weight in model.trainable_weights]
    assert not any("norm" in path for path in trained)
    transfer.freeze(model)
    transfer.unfreeze(model)
    assert [weight.path for weight in model.trainable_weights] == trained


def test_errors():
    model = network(normalization="none")
    assert "with none" in harness.error_of(lambda: transfer.freeze_batch_norm(model))
    assert "Did you mean 'stage3'" in harness.error_of(lambda: transfer.freeze(model, "stage4"))
    assert "up_to=None" in harness.error_of(lambda: transfer.freeze(model, None))
