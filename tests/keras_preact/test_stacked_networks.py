"""A network of stacks is the network of single units: values, training, initial values,
files, and the way to and fro.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests import reference
from tests.keras_preact import harness

BACKEND = keras.backend.backend()

#: Filters, units, strides.
STAGES = [(4, 3, 1), (8, 3, 2)]
X = harness.images(4, 6, 6, 3)


def network(**options):
    """Three units a stage; a stack of two in each."""
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
    units = model.units  # those of a stack are made here
    weights = {id(weight) for unit in units for weight in unit.weights}
    variables = [variable for unit in units for variable in unit.variables]
    return [harness.numpy(each.value) for each in variables if id(each) not in weights]


def check_same_values(model, other):
    """The weights have equal paths and bits, and so the seeds."""
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
    assert [unit.name for unit in model.units] == units
    assert (single.count_params(), single.name) == (model.count_params(), model.name)
    y = output(model)
    harness.close(y, output(single))
    harness.check_copies(model, X, y, tmp_path)


def fit(model, **options):
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **options)
    model.fit(X, np.arange(4), batch_size=2, epochs=2, shuffle=False, verbose=0)


@pytest.mark.backend
def test_fit_is_that_of_single_units():
    """Two epochs: weights and statistics after them."""
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
        {"kernel_initializer": keras.initializers.HeNormal(seed=1)},
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
    ids=["he", "conv1x1 and bias", "delta-orthogonal and dropout", "fixup"],
)
def test_seeded_networks_start_alike_stacked_and_not(options):
    single = network(stacked=False, **options)
    check_same_values(kp.models.unstack(network(**options)), single)
    check_distinct(single)


def check_distinct(*models):
    """No two kernels start with the same value."""
    kernels = [
        value
        for model in models
        for path, value in harness.weights(kp.models.unstack(model)).items()
        if path.endswith("kernel") and value.any()
    ]
    assert len({kernel.ravel()[kernel.ravel() != 0][0] for kernel in kernels}) == len(kernels)


@pytest.mark.parametrize("stacked", [True, False])
def test_unseeded_kernels_all_differ(stacked):
    check_distinct(network(stacked=stacked), network(stacked=stacked))


def test_stochastic_depth_grows_linearly():
    """Unit l of L has l / L of the rate of the last."""
    model, single = (network(stochastic_depth=0.5, stacked=stacked) for stacked in (True, False))
    for each in (model, single):
        rates = [unit.stochastic_depth for unit in each.units]
        np.testing.assert_allclose(rates, [0.5 * i / 6 for i in range(1, 7)])
    rates = [rate for stack in model.segments[1::2] for rate in stack.stochastic_depth]
    np.testing.assert_allclose(rates, [i / 12 for i in (2, 3, 5, 6)])


# Round trips


@pytest.mark.backend
def test_stack_and_unstack_lose_no_bit():
    model = network(shortcut=kp.shortcuts.Dropout(0.5), dropout=0.3, stochastic_depth=0.4)
    harness.randomize(model)
    output(model, training=True)  # the seeds and the statistics move on
    single = kp.models.unstack(model)
    again = kp.models.stack(single)
    check_same_values(again, model)
    check_same_values(kp.models.unstack(again), single)
    assert again.get_config() == model.get_config()
    np.testing.assert_array_equal(output(again), output(model))
    single.set_weights([value + 1 for value in single.get_weights()])  # a copy
    check_same_values(again, model)


@pytest.mark.backend
def test_frozen_layers_stay_frozen(tmp_path):
    model = network()
    for name in ("stage1_units", "stage2_unit1", "stem_conv"):
        model.get_layer(name).trainable = False
    model.save(tmp_path / "model.keras")
    single = kp.models.unstack(model)
    frozen = ["stem_conv", "stage1_unit2", "stage1_unit3", "stage2_unit1"]
    names = [layer.name for layer in single.layers if layer.weights and not layer.trainable]
    assert names == frozen
    assert [unit.name for unit in model.units if not unit.trainable] == frozen[1:]
    trained = [weight.path for weight in model.trainable_weights]
    for copy in (keras.models.load_model(tmp_path / "model.keras"), kp.models.stack(single)):
        assert [weight.path for weight in copy.trainable_weights] == trained
    before = harness.weights(model)
    fit(model, run_eagerly=BACKEND == "tensorflow")
    for path, value in harness.weights(model).items():
        is_frozen = path.startswith(("stage1_units/", "stage2_unit1/", "stem_conv/"))
        assert np.array_equal(value, before[path]) == is_frozen, path
    single.get_layer("stage1_unit3").trainable = True
    message = harness.error_of(lambda: kp.models.stack(single))
    assert "Received: stage1_unit2 frozen alone" in message


# Outputs and gradients of every unit


class Perturbed(reference.Network):
    """The NumPy network in parts: what follows x_l, with something added to every x."""

    def after(self, x, added, first):
        """Logits, from x_`first` on; `added` is what to add to the outputs of the later
        units, by the units' numbers.
        """
        number = 0
        for s, (filters, units, strides) in enumerate(self.stages, 1):
            for u in range(1, units + 1):
                number += 1
                if number <= first:
                    continue
                unit = reference.Unit(
                    reference.below(self.weights, f"stage{s}_unit{u}"),
                    filters,
                    strides=strides if u == 1 else 1,
                    activated_input=number == 1,
                    **self.options,
                )
                x = unit(x) + added.get(number, 0)
        around = reference.Unit(self.weights, 1, **self.options)
        x = around.run(reference.HEAD["full_preactivation"], x, "head_norm").mean((1, 2))
        return x @ self.weights["head_classifier/kernel"] + self.weights["head_classifier/bias"]


def rows(parts):
    """One array for each unit, of stacks and single units."""
    return [row for part in parts for row in part]


@pytest.mark.parametrize(
    "ways", [pytest.param({}, marks=pytest.mark.backend), {"stacked": False}], ids=str
)
def test_probe(ways):
    """Values and gradients of every x_l against the NumPy network, with zeros and with
    something added.
    """
    model = network(**ways)
    harness.randomize(model)
    cotangent = harness.images(4, 4, seed=3)
    probe = model.probe()
    assert {id(weight) for weight in probe.weights} == {id(weight) for weight in model.weights}
    shapes = [(each.shape[0], 4, *each.shape[2:]) for each in probe.inputs[1:]]
    zeros = [np.zeros(shape, "float32") for shape in shapes]

    def function(x, *added):
        y, *outputs = probe([x, *added], training=False)
        return keras.ops.sum(keras.ops.multiply(y, cotangent)), [y, *outputs]

    step = harness.Step(function, probe, compiled=ways.get("stacked", True))
    (y, *outputs), (_, *gradients), _ = step(X, *zeros)
    weights = harness.weights(kp.models.unstack(model))
    weights = {path: value.astype("float64") for path, value in weights.items()}
    expected = Perturbed(weights, STAGES, "3x3", "basic", {"shape_shortcut": "zero_pad"})
    harness.close(y, expected(X), 1e-4)
    harness.close(y, output(model))
    own = keras.Model(model.input, model.unit_outputs)(X)
    assert len(rows(outputs)) == len(own) == len(expected.outputs) == 6
    rng, size = np.random.default_rng(4), 1e-6
    for number, (got, other, gradient, want) in enumerate(
        zip(rows(outputs), own, rows(gradients), expected.outputs, strict=True), 1
    ):
        harness.close(got, want, 1e-4)
        harness.close(harness.numpy(other), want, 1e-4)
        direction = rng.normal(size=want.shape)
        moved = [
            (expected.after(want + sign * size * direction, {}, number) * cotangent).sum()
            for sign in (1, -1)
        ]
        np.testing.assert_allclose(
            (gradient * direction).sum(), (moved[0] - moved[1]) / (2 * size), 2e-3, 2e-3
        )
    added = [rng.normal(size=each.shape).astype("float32") * 0.1 for each in zeros]
    (y, *_), *_ = step(X, *added)
    want = expected.after(expected.first_input, dict(enumerate(rows(added), 1)), 0)
    harness.close(y, want, 1e-4)
    assert np.abs(want - expected(X)).max() > 1e-2


def test_wrong_arguments():
    assert "'yes'" in harness.error_of(lambda: network(stacked="yes"))
