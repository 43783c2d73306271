"""A load is of all weights or of none, the same whether or not units are stacked."""

import numpy as np
import pytest

import keras_preact as kp
from keras_preact.models.named_weights import STEM, Entry, WeightsMismatch, extract, load, named
from keras_preact.weights import layout
from tests.keras_preact import harness


def network(**options):
    """Four units in the first stage and two in the second; 34 pixels and more make
    maps of several pixels.
    """
    return kp.models.resnet_imagenet(
        (4, 2),
        block="basic",
        width_factor=1 / 16,
        **{"input_shape": (34, 34, 3), "classes": 4} | options,
    )


def values(model) -> dict[str, np.ndarray]:
    return {path: place.value() for path, place in named(model).items()}


def same_names(model) -> list[Entry]:
    return [Entry(path, f"their/{path}") for path in named(model)]


def random_state(model, seed=3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        f"their/{path}": rng.uniform(0.5, 1, value.shape).astype("float32")
        for path, value in values(model).items()
    }


@pytest.mark.backend
@pytest.mark.parametrize("stacked", [False, True])
def test_load_and_extract(stacked):
    model = network(stacked=stacked)
    state = random_state(model)
    load(model, state, same_names(model))
    single = harness.weights(kp.models.unstack(model))
    np.testing.assert_equal({f"their/{path}": value for path, value in single.items()}, state)
    np.testing.assert_equal(extract(model, same_names(model)), state)
    before, path = values(model), "stage1_unit3/branch/conv_1/kernel"
    named(model)[path].assign(np.ones(before[path].shape, "float32"))
    np.testing.assert_equal(values(model), before | {path: np.ones(before[path].shape, "float32")})


@pytest.mark.parametrize("shortcut", [*kp.SHORTCUTS])
def test_weights_of_every_shape_come_back(shortcut):
    """A shortcut may have a scalar as its weight."""
    source, target = (
        kp.models.resnet_cifar(8, input_shape=(8, 8, 1), width_factor=0.25, shortcut=shortcut)
        for _ in range(2)
    )
    harness.randomize(source)
    state = extract(source, same_names(source))
    expected = {f"their/{path}": value.shape for path, value in values(source).items()}
    assert {name: value.shape for name, value in state.items()} == expected
    load(target, state, same_names(target))
    np.testing.assert_equal(values(target), values(source))


@pytest.mark.parametrize("stacked", [False, True])
def test_missing_left_over_and_other_shapes_change_nothing(stacked):
    model = network(stacked=stacked)
    before, state, entries = values(model), random_state(model), same_names(model)
    entries[0] = Entry(STEM, f"their/{STEM}", layout.CONV_OIHW)
    state[entries[0].theirs] = layout.CONV_OIHW.to_theirs(state[entries[0].theirs])
    gamma, beta = "stage1_unit2/branch/norm_1/gamma", "head_norm/beta"
    for wrong, found in (
        ({k: v for k, v in state.items() if k != f"their/{gamma}"}, ([gamma], [], {})),
        (state | {"their/other": np.zeros(3)}, ([], ["their/other"], {})),
        (state | {f"their/{beta}": np.zeros((2, 2))}, ([], [], {beta: ((8,), (2, 2))})),
        # of another rank, where the transform itself cannot work
        (
            state | {entries[0].theirs: np.ones(5)},
            ([], [], {STEM: ((7, 7, 3, 64), (5,))}),
        ),
    ):
        with pytest.raises(WeightsMismatch, match=model.name) as error:
            load(model, wrong, entries)
        assert (error.value.missing, error.value.left_over, error.value.shapes) == found
        np.testing.assert_equal(values(model), before)


def test_extract_loses_nothing():
    model = network(use_bias=True)
    entries = [entry for entry in same_names(model) if not entry.ours.endswith("bias")]
    with pytest.raises(WeightsMismatch, match="stem_conv/bias") as error:
        extract(model, entries)
    assert all(path.endswith("bias") for path in error.value.missing)


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_a_stem_of_other_channels(channels):
    """For images whose channels are equal it computes what it did: exactly with one or
    a multiple of the known channels.
    """
    source, model = network(), network(input_shape=(34, 34, channels))
    harness.randomize(source)
    state, entries = extract(source, same_names(source)), same_names(source)
    load(model, state, entries)
    kernel, own = state["their/stem_conv/kernel"], values(model)["stem_conv/kernel"]
    for c in range(channels if channels > 1 else 0):
        np.testing.assert_allclose(own[:, :, c], kernel[:, :, c % 3] * 3 / channels, rtol=1e-6)
    if channels != 2:
        grey = harness.images(2, 34, 34, 1)
        outputs = [
            harness.numpy(net(np.repeat(grey, n, -1)))
            for net, n in ((source, 3), (model, channels))
        ]
        np.testing.assert_allclose(outputs[1], outputs[0], atol=2e-5)
    np.testing.assert_equal(values(source) | {"stem_conv/kernel": own}, values(model))


def test_a_classifier_of_other_classes_keeps_its_weights():
    source, model = network(), network(classes=7)
    harness.randomize(source)
    state = extract(source, same_names(source))
    own = {path: value for path, value in values(model).items() if "classifier" in path}
    load(model, state, same_names(source))
    np.testing.assert_equal(values(model), values(source) | own)
    # a source without one
    state = {name: value for name, value in state.items() if "classifier" not in name}
    with pytest.raises(WeightsMismatch, match="2 missing: head_classifier/kernel"):
        load(model, state, same_names(model))
    load(model, state, same_names(model), new_classifier=True)
    np.testing.assert_equal(values(model), values(source) | own)
