"""A network of stacks equals the network of single units: values, training, initial
values, files, and conversion in both directions.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

BACKEND = keras.backend.backend()

#: Filters, units, strides.
STAGES = [(4, 3, 1), (8, 3, 2)]
X = harness.images(4, 6, 6, 3)


def network(**options):
    """Each stage has three units; two of them are a stack."""
    defaults = {
        "stacked": True,
        "block": "basic",
        "input_shape": (6, 6, 3),
        "shape_shortcut": "zero_pad",
        "classes": 4,
    }
    return kp.models.ResidualNetwork(STAGES, stem="3x3", stem_filters=4, **defaults | options)


def seed_states(model) -> list[np.ndarray]:
    """The states of the seeds of every unit in order."""
    units = model.copy_units()
    weights = {id(weight) for unit in units for weight in unit.weights}
    variables = [variable for unit in units for variable in unit.variables]
    return [harness.numpy(each.value) for each in variables if id(each) not in weights]


def check_same_values(model, other):
    """Check that weights and seeds have equal paths and bits."""
    values, others = harness.weights(model), harness.weights(other)
    assert list(values) == list(others)
    for path, value in values.items():
        np.testing.assert_array_equal(value, others[path], path)
    for state, own in zip(seed_states(model), seed_states(other), strict=True):
        np.testing.assert_array_equal(state, own)


def output(model, **kwargs):
    return harness.numpy(model(X, **kwargs))


OPTIONS = [
    {"arrangement": "original", "shortcut": "exclusive_gating"},
    {"block": "bottleneck", "groups": 2, "normalization": "group", "shape_shortcut": "projection"},
    {"shortcut": "conv1x1", "shape_shortcut": "projection", "remat": 2},
    {"execution": "loop", "stochastic_depth": 0.5},
    {"shortcut": "scaled_residual"},
    {"shortcut": "decayed_identity", "stochastic_depth": 0.5, "remat": 2},
    {"shortcut": "hyper_connections", "arrangement": "bn_after_addition"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_output_is_that_of_single_units(options, tmp_path):
    """Files keep the stacks."""
    model = network(**options)
    harness.randomize(model)
    single = kp.models.unstack(model)
    names = ["stage1_unit1", "stage1_units", "stage2_unit1", "stage2_units"]
    assert [segment.name for segment in model.segments] == names
    assert [type(segment) for segment in model.segments] == [kp.ResidualUnit, kp.UnitStack] * 2
    units = [f"stage{s}_unit{u}" for s in (1, 2) for u in (1, 2, 3)]
    assert [segment.name for segment in single.segments] == units
    assert [unit.name for unit in model.copy_units()] == units
    assert (single.count_params(), single.name) == (model.count_params(), model.name)
    y = output(model)
    harness.close(y, output(single))
    harness.check_copies(model, X, y, tmp_path)


def fit(model, **options):
    harness.compiled(model, keras.optimizers.SGD(0.05, momentum=0.9), **options)
    model.fit(X, np.arange(4), batch_size=2, epochs=2, shuffle=False, verbose=0)


@pytest.mark.backend
def test_fit_is_that_of_single_units():
    """Compare weights and statistics after two epochs."""
    model = network()
    single = kp.models.unstack(model)
    before = harness.weights(single)
    fit(model)
    fit(single, run_eagerly=BACKEND == "tensorflow")
    trained = harness.weights(kp.models.unstack(model))
    for path, value in harness.weights(single).items():
        harness.close(trained[path], value, 1e-4, path)
        assert not np.array_equal(value, before[path]), path


# Initial values


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {
                "kernel_initializer": keras.initializers.GlorotUniform(seed=1),
                "shortcut": kp.shortcuts.Conv1x1(
                    kernel_initializer=keras.initializers.HeNormal(seed=1)
                ),
                "use_bias": True,
                "bias_initializer": keras.initializers.RandomNormal(seed=2),
            },
            marks=pytest.mark.backend,
        ),
        {
            "kernel_initializer": kp.initializers.DeltaOrthogonal(seed=3),
            "shortcut": kp.shortcuts.Dropout(0.5, seed=1),
        },
        kp.models.FIXUP | {"kernel_initializer": kp.initializers.Fixup(seed=3)},
    ],
    ids=["conv1x1 and bias", "delta-orthogonal and dropout", "fixup"],
)
def test_seeded_networks_start_alike_stacked_and_not(options):
    single = network(stacked=False, **options)
    check_same_values(kp.models.unstack(network(**options)), single)
    harness.check_distinct(harness.kernels(single))


@pytest.mark.parametrize("stacked", [True, False])
def test_unseeded_kernels_all_differ(stacked):
    found = {}
    for i in range(2):
        model = kp.models.unstack(network(stacked=stacked))
        found |= {(i, path): kernel for path, kernel in harness.kernels(model).items()}
    harness.check_distinct(found)


def test_stochastic_depth_grows_linearly():
    """Unit l of L has l / L of the last unit's rate."""
    model, single = (network(stochastic_depth=0.5, stacked=stacked) for stacked in (True, False))
    for each in (model, single):
        rates = [unit.stochastic_depth for unit in each.copy_units()]
        np.testing.assert_allclose(rates, [0.5 * i / 6 for i in range(1, 7)])
    rates = [rate for stack in model.segments[1::2] for rate in stack.stochastic_depth]
    np.testing.assert_allclose(rates, [i / 12 for i in (2, 3, 5, 6)])


def test_decay_falls_linearly(tmp_path):
    """In unit l of L the factor on x is `1 - (1 - last) l / L`, in copies and files too. A
    network with another decay has the same weights.
    """
    model, single = (
        network(shortcut=kp.shortcuts.DecayedIdentity(0.4), stacked=stacked)
        for stacked in (True, False)
    )
    want = 1 - 0.6 * np.arange(1, 7) / 6
    model.save(tmp_path / "model.keras")
    copies = [model, single, kp.models.unstack(model), kp.models.stack(single)]
    for each in (*copies, keras.saving.load_model(tmp_path / "model.keras")):
        factors = [unit.h.factor for unit in each.copy_units()]
        np.testing.assert_allclose(factors, want)
    assert [segment.shortcut_factors for segment in model.segments[1::2]] == [
        [single.segments[i].h.factor for i in units] for units in ([1, 2], [4, 5])
    ]
    changed = kp.models.changed_copy(model, shortcut=kp.shortcuts.DecayedIdentity(1.0))
    assert {unit.h.factor for unit in changed.copy_units()} == {1.0}
    fixed = network(shortcut=kp.shortcuts.DecayedIdentity(factor=0.7))
    assert {unit.h.factor for unit in fixed.copy_units()} == {0.7}


# Round trips


@pytest.mark.backend
def test_stack_and_unstack_lose_no_bit():
    model = network(shortcut=kp.shortcuts.Dropout(0.5), dropout=0.3, stochastic_depth=0.4)
    harness.randomize(model)
    output(model, training=True)  # changes the seeds and the statistics
    single = kp.models.unstack(model)
    again = kp.models.stack(single)
    check_same_values(again, model)
    check_same_values(kp.models.unstack(again), single)
    assert again.get_config() == model.get_config()
    np.testing.assert_array_equal(output(again), output(model))
    single.set_weights([value + 1 for value in single.get_weights()])  # a copy
    check_same_values(again, model)


# Outputs and gradients of every unit


def rows(parts):
    """Return one array per unit, from arrays of stacks and single units."""
    return [row for part in parts for row in part]


@pytest.mark.parametrize(
    "ways", [pytest.param({}, marks=pytest.mark.backend), {"stacked": False}], ids=str
)
def test_probe(ways):
    """Add an array to every x_l, and compare every x_l and the output with sums by hand in
    the network of single units. test_stacks.py tests the gradients on arrays that are added
    in a stack.
    """
    model = network(**ways)
    harness.randomize(model)
    probe, single = model.probe(), kp.models.unstack(model)
    assert {id(weight) for weight in probe.weights} == {id(weight) for weight in model.weights}
    zeros = [np.zeros((n.shape[0], 4, *n.shape[2:]), "float32") for n in probe.inputs[1:]]
    added = [0.1 * harness.images(*array.shape, seed=i) for i, array in enumerate(zeros)]
    y, *outputs = map(harness.numpy, probe([X, *added]))
    x = harness.numpy(keras.Model(single.input, single.first_input)(X))
    for unit, one, got in zip(single.segments, rows(added), rows(outputs), strict=True):
        x = harness.numpy(unit(x)) + one
        harness.close(got, x, 1e-4)
    for layer in single.head:
        x = layer(x)
    harness.close(y, harness.numpy(x), 1e-4)
    y, *outputs = map(harness.numpy, probe([X, *zeros]))
    harness.close(y, output(model))
    for got, want in zip(rows(outputs), single.unit_outputs, strict=True):
        harness.close(got, harness.numpy(keras.Model(single.input, want)(X)), 1e-4)


def test_wrong_arguments():
    assert "'yes'" in harness.error_of(lambda: network(stacked="yes"))
    # in a network without equal units, which has no stack
    assert "'fast'" in harness.error_of(lambda: kp.models.resnet_cifar(8, execution="fast"))


@pytest.mark.parametrize(
    "option", [{"remat": 2}, {"remat": True}, {"unroll": 2}, {"execution": "loop"}]
)
def test_options_of_stacks_make_stacks(option):
    """Without stacks they would have no effect, without a word."""
    single = network(stacked=False)
    assert len(network(stacked=None).segments) == len(single.segments)
    changed = kp.models.changed_copy(single, **option)
    for model in (network(stacked=None, **option), changed):
        assert [
            segment.name for segment in model.segments if isinstance(segment, kp.UnitStack)
        ] == [
            "stage1_units",
            "stage2_units",
        ]
    [name] = option
    for wrong in (
        lambda: network(stacked=False, **option),
        lambda: kp.models.changed_copy(single, stacked=False, **option),
    ):
        message = harness.error_of(wrong)
        assert f"{name} would have no effect without stacks" in message
        assert f"stacked=False, {name}={option[name]!r}" in message
    # an option that has gone with the stacks, one of a model's entry, and one that an earlier
    # version has written
    apart = kp.models.unstack(changed)
    assert apart.get_config() == single.get_config()
    deep = kp.create_model("digits_resnet10001_preact", depth=14, stacked=False)
    assert len(deep.segments) == len(deep.unit_names)
    written = type(single).from_config(single.get_config() | option)
    assert written.get_config() == single.get_config()


# Units and their outputs


def test_units_are_layers_of_the_network_or_an_error():
    model, single = network(), network(stacked=False)
    assert single.units == single.segments
    message = harness.error_of(lambda: model.units)
    assert "model.copy_units()" in message
    assert "stage1_units, stage2_units" in message
    names = [f"stage{s}_unit{u}" for s in (1, 2) for u in (1, 2, 3)]
    for each in (model, single):
        before, trained = harness.weights(each), len(each.trainable_weights)
        copies = each.copy_units()
        assert [unit.name for unit in copies] == each.unit_names == names
        for unit in copies:
            for path, value in harness.weights(unit).items():
                named = kp.weights.named(each)[f"{unit.name}/{path.removeprefix(unit.name + '/')}"]
                np.testing.assert_array_equal(value, named.value(), path)
            harness.randomize(unit)
            unit.trainable = False
        np.testing.assert_equal(harness.weights(each), before)
        assert len(each.trainable_weights) == trained


def test_outputs_of_units_are_made_once():
    for model in (network(), network(stacked=False)):
        outputs = model.unit_outputs
        assert [id(x) for x in model.unit_outputs] == [id(x) for x in outputs]
