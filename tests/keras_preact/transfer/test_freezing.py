"""What is frozen stays as it is to the bit, weights and moving statistics, and what
stands behind is trained.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import transfer
from tests.keras_preact import harness

pytestmark = pytest.mark.backend


def network(units=(2, 2, 1), **options):
    """Of a CIFAR network's parts; most units are of one shape, for which JAX compiles
    once.
    """
    stages = [
        (width, each, strides)
        for (width, strides), each in zip([(4, 1), (4, 1), (8, 2)], units, strict=True)
    ]
    options |= {"block": "basic", "input_shape": (6, 6, 3), "classes": 4}
    model = kp.models.ResidualNetwork(stages, stem="3x3", stem_filters=4, **options)
    harness.randomize(model)
    return model


def changed_by_fit(model, **options) -> set[str]:
    """Train for some steps; return the paths of the weights that are not what they
    were, moving statistics among them.

    Step by step if not told otherwise: tracing takes TensorFlow seconds.
    """
    before = harness.weights(model)
    options = options or {"run_eagerly": True}
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **options,
    )
    model.fit(harness.images(8, 6, 6, 3), np.arange(8) % 4, batch_size=4, verbose=0)
    return {
        path
        for path, value in harness.weights(model).items()
        if not np.array_equal(value, before[path])
    }


def behind(model, frozen: tuple[str, ...]) -> set[str]:
    return {weight.path for weight in model.weights if not weight.path.startswith(frozen)}


STEM = ("preprocessing", "stem")
FROZEN = {
    "stem": STEM,
    "stage1": (*STEM, "stage1"),
    "stage2_unit1": (*STEM, "stage1", "stage2_unit1"),
    "stage2_unit4": (*STEM, "stage1", "stage2"),
    "head": (*STEM, "stage", "head_norm"),
}


@pytest.mark.parametrize(
    ("up_to", "stacked", "options"),
    [
        ("stem", False, {}),
        ("stage2_unit1", False, {}),
        ("head", False, {}),
        ("stage1", True, {}),
        ("stage2_unit1", True, {}),
        ("stage2_unit4", True, {"jit_compile": False}),
    ],
)
def test_up_to_a_place(up_to, stacked, options):
    model = network((2, 4, 1), stacked=stacked, mean=0.1)
    assert harness.longest_stack(model) == (3 if stacked else 0)
    transfer.freeze(model, up_to)
    assert changed_by_fit(model, **options) == behind(model, FROZEN[up_to])


@pytest.mark.parametrize("stacked", [False, True])
def test_files_copies_and_new_classifiers_keep_it(stacked, tmp_path):
    model = network((1, 4, 1), stacked=stacked)
    transfer.freeze(model, "stage2")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    other = kp.models.unstack(model) if stacked else kp.models.stack(model)
    for each in (loaded, other, transfer.reset_classifier(model, 4)):
        assert changed_by_fit(each) == behind(each, FROZEN["stage2_unit4"])


def test_inside_a_stack():
    model = network((1, 3, 1), stacked=True)
    message = harness.error_of(lambda: transfer.freeze(model, "stage2_unit2"))
    assert "kp.models.unstack(model)" in message
    assert "Name its stage, stage2" in message
    assert all(layer.trainable for layer in model.layers)
    single = kp.models.unstack(model)
    transfer.freeze(single, "stage2_unit2")
    assert [unit.trainable for unit in single.units] == [False] * 3 + [True] * 2


def test_unfreeze():
    model = network()
    transfer.freeze(model)
    transfer.unfreeze(model)
    assert changed_by_fit(model) == {weight.path for weight in model.weights}


NORMS = ("gamma", "beta", "moving_mean", "moving_variance")


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_batch_norm(stacked, again, tmp_path):
    model = network((1, 4, 1), stacked=stacked)
    before = harness.weights(model)
    frozen = transfer.freeze_batch_norm(model)
    for path, value in harness.weights(frozen).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)
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


def test_other_normalisations():
    for kind, found in (("layer", "LayerNormalization"), ("none", "none")):
        message = harness.error_of(
            lambda kind=kind: transfer.freeze_batch_norm(network(normalization=kind))
        )
        assert f"with {found}" in message


def test_unknown_places():
    model = network()
    assert "Did you mean 'stage3'" in harness.error_of(lambda: transfer.freeze(model, "stage4"))
    assert "Received: up_to=None" in harness.error_of(lambda: transfer.freeze(model, None))
