"""A load is of all weights or of none, and the same whether or not units are stacked."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.weights import layout, loading
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
    return {path: place.value() for path, place in loading.named(model).items()}


def same_names(model) -> list[layout.Entry]:
    return [layout.Entry(path, f"their/{path}") for path in loading.named(model)]


def random_state(model, seed=3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        f"their/{path}": rng.uniform(0.5, 1, value.shape).astype("float32")
        for path, value in values(model).items()
    }


def check_equal(one, other):
    assert one.keys() == other.keys()
    for path, value in one.items():
        np.testing.assert_array_equal(value, other[path], path)


@pytest.mark.backend
def test_names_and_values_are_those_of_single_units():
    """Of the weights as Keras names them, and of no more: not the seeds of dropout."""
    model = network(dropout=0.1, use_bias=True)
    harness.randomize(model)
    stacked = kp.models.stack(model)
    assert harness.longest_stack(stacked) == 3
    own = harness.weights(model)
    check_equal(values(model), own)
    found = values(stacked)
    check_equal({path: found[path] for path in own}, own)
    assert found.keys() == own.keys()


@pytest.mark.backend
@pytest.mark.parametrize("stacked", [False, True])
def test_load_and_extract(stacked):
    model = network(stacked=stacked)
    state = random_state(model)
    assert loading.load(model, state, same_names(model)) == loading.Adapted()
    check_equal(
        {
            f"their/{path}": value
            for path, value in harness.weights(kp.models.unstack(model)).items()
        },
        state,
    )
    check_equal(loading.extract(model, same_names(model)), state)


@pytest.mark.backend
def test_one_place_of_a_stack_can_be_assigned_alone():
    model = network(stacked=True)
    before, path = values(model), "stage1_unit3/branch/conv_1/kernel"
    loading.named(model)[path].assign(np.ones(before[path].shape, "float32"))
    check_equal(values(model), before | {path: np.ones(before[path].shape, "float32")})


@pytest.mark.backend
@pytest.mark.parametrize("stacked", [False, True])
def test_nothing_is_assigned_where_anything_is_wrong(stacked):
    model = network(stacked=stacked)
    before, state = values(model), random_state(model)
    del state["their/stage1_unit2/branch/norm_1/gamma"]
    state["their/other"] = np.zeros(3)
    state["their/head_norm/beta"] = np.zeros((2, 2))
    with pytest.raises(loading.WeightsMismatch) as error:
        loading.load(model, state, same_names(model))
    assert error.value.missing == ["stage1_unit2/branch/norm_1/gamma"]
    assert error.value.left_over == ["their/other"]
    assert error.value.shapes == {"head_norm/beta": ((8,), (2, 2))}
    for part in (
        "1 missing",
        "1 left over: their/other",
        "head_norm/beta is (8,) here and (2, 2) there",
        model.name,
    ):
        assert part in str(error.value)
    check_equal(values(model), before)


@pytest.mark.backend
def test_an_array_of_another_rank_is_of_another_shape():
    """Where the transform itself cannot work."""
    model = network()
    entries = [
        layout.Entry(row.ours, row.theirs, layout.CONV_OIHW if "conv" in row.ours else layout.SAME)
        for row in same_names(model)
    ]
    state = loading.extract(model, entries) | {"their/stem_conv/kernel": np.zeros(5)}
    with pytest.raises(loading.WeightsMismatch) as error:
        loading.load(model, state, entries)
    assert error.value.shapes == {"stem_conv/kernel": ((7, 7, 3, 64), (5,))}


@pytest.mark.backend
def test_a_message_shows_a_dozen_and_the_error_holds_all():
    model = network()
    with pytest.raises(loading.WeightsMismatch) as error:
        loading.load(model, {}, same_names(model))
    paths = list(loading.named(model))
    assert error.value.missing == paths
    assert f"{len(paths)} missing: {', '.join(paths[:12])} and {len(paths) - 12} more" in str(
        error.value
    )


@pytest.mark.backend
def test_extract_loses_nothing():
    model = network(use_bias=True)
    entries = [entry for entry in same_names(model) if not entry.ours.endswith("bias")]
    with pytest.raises(loading.WeightsMismatch, match="stem_conv/bias") as error:
        loading.extract(model, entries)
    assert all(path.endswith("bias") for path in error.value.missing)


@pytest.mark.backend
@pytest.mark.parametrize("channels", [1, 2, 3, 5, 6])
def test_a_stem_of_other_channels(channels):
    """For images whose channels are equal it computes what it did: exactly with one or
    a multiple of the known channels.
    """
    source, model = network(), network(input_shape=(34, 34, channels))
    harness.randomize(source)
    state, entries = loading.extract(source, same_names(source)), same_names(source)
    adapted = loading.load(model, state, entries)
    assert adapted == loading.Adapted(input_channels=None if channels == 3 else (3, channels))
    kernel, own = state["their/stem_conv/kernel"], values(model)["stem_conv/kernel"]
    for c in range(channels if channels > 1 else 0):
        np.testing.assert_allclose(own[:, :, c], kernel[:, :, c % 3] * 3 / channels, rtol=1e-6)
    if channels in (1, 3, 6):
        grey = harness.images(2, 34, 34, 1)
        outputs = [
            keras.ops.convert_to_numpy(net(np.repeat(grey, n, -1)))
            for net, n in ((source, 3), (model, channels))
        ]
        np.testing.assert_allclose(outputs[1], outputs[0], atol=2e-5)
    del adapted
    check_equal(
        {k: v for k, v in values(model).items() if k != "stem_conv/kernel"},
        {k: v for k, v in values(source).items() if k != "stem_conv/kernel"},
    )


@pytest.mark.backend
def test_a_classifier_of_other_classes_keeps_its_weights():
    source, model = network(), network(classes=7)
    harness.randomize(source)
    harness.randomize(model, seed=5)
    before = values(model)
    assert loading.load(
        model, loading.extract(source, same_names(source)), same_names(source)
    ).classes == (4, 7)
    own = ("head_classifier/kernel", "head_classifier/bias")
    check_equal(values(model), values(source) | {path: before[path] for path in own})


@pytest.mark.backend
def test_a_source_without_classifier():
    model = network()
    state = {name: value for name, value in random_state(model).items() if "classifier" not in name}
    with pytest.raises(
        loading.WeightsMismatch, match="2 missing: head_classifier/kernel, head_classifier/bias"
    ):
        loading.load(model, state, same_names(model))
    before = values(model)
    loading.load(model, state, same_names(model), new_classifier=True)
    assert np.array_equal(values(model)["head_classifier/kernel"], before["head_classifier/kernel"])
    assert np.array_equal(values(model)["head_norm/gamma"], state["their/head_norm/gamma"])


@pytest.mark.backend
@pytest.mark.parametrize(
    ("transform", "ours", "theirs"),
    [
        (layout.CONV_OIHW, (7, 5, 3, 2), (2, 3, 7, 5)),
        (layout.DENSE_OI, (4, 3), (3, 4)),
        (layout.DENSE_OI11, (4, 3), (3, 4, 1, 1)),
    ],
)
def test_transforms(transform, ours, theirs):
    array = np.arange(np.prod(ours)).reshape(ours)
    there = transform.to_theirs(array)
    assert there.shape == theirs
    # one output's weights are one slice, on the last axis here and the first there, in the order
    # (in, height, width) there
    order = array[..., 1].transpose(2, 0, 1) if len(ours) == 4 else array[..., 1]
    np.testing.assert_array_equal(there[1].reshape(-1), order.reshape(-1))
    np.testing.assert_array_equal(transform.to_ours(there), array)


@pytest.mark.backend
def test_a_layout_makes_rows_for_every_unit():
    table = layout.Layout(
        {"stem_conv": "first"},
        {"branch/norm_0": "_bn"},
        lambda s, u: f"s{s}u{u}",
        layout.TORCH_LEAVES,
        separator=".",
    )
    rows = {entry.ours: entry.theirs for entry in table.entries([1, 2])}
    assert rows["stem_conv/kernel"] == "first.weight"
    assert rows["stage2_unit2/branch/norm_0/moving_variance"] == "s2u2_bn.running_var"
    assert len(rows) == 2 + 3 * 4


@pytest.mark.parametrize("name", kp.weights.ASSUMPTIONS)
def test_a_converters_docstring_says_what_it_assumes(name):
    text = " ".join(getattr(kp.weights, f"from_{name}").__doc__.split())
    assert kp.weights.ASSUMPTIONS[name] in text


def test_every_converter_has_its_assumptions():
    names = {name for name in dir(kp.weights) if name.startswith("from_")}
    assert names == {f"from_{name}" for name in kp.weights.ASSUMPTIONS}
