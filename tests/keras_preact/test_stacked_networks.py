"""A network of stacks is the network of single units: values, training, initial values,
files, and the way to and fro.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests import reference
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

BACKEND = keras.backend.backend()


#: Filters, units, strides.
STAGES = [(4, 3, 1), (8, 3, 2)]

#: Ways of running; on JAX without those that compile as slowly as single units.
WAYS = [{}, {"remat": 2}, {"execution": "loop"}] if BACKEND != "jax" else [{}, {"remat": 2}]


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
    units = model.units
    weights = {id(weight) for unit in units for weight in unit.weights}
    variables = [
        variable for unit in units for variable in unit.variables if id(variable) not in weights
    ]
    return [harness.numpy(variable.value) for variable in variables]


def check_same_values(model, other):
    """The weights have equal paths and bits, and so the seeds."""
    values, others = harness.weights(model), harness.weights(other)
    assert list(values) == list(others)
    for path, value in values.items():
        np.testing.assert_array_equal(value, others[path], path)
    for state, own in zip(seed_states(model), seed_states(other), strict=True):
        np.testing.assert_array_equal(state, own)


def output(model, x, **kwargs):
    return harness.numpy(model(x, **kwargs))


OPTIONS = [
    {},
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
    assert [segment.name for segment in model.segments] == [
        f"stage{s}_unit{u}" for s in (1, 2) for u in ("1", "s")
    ]
    assert [type(segment) for segment in model.segments] == [kp.ResidualUnit, kp.UnitStack] * 2
    assert [segment.name for segment in single.segments] == [
        f"stage{s}_unit{u}" for s in (1, 2) for u in (1, 2, 3)
    ]
    assert [unit.name for unit in model.units] == [unit.name for unit in single.units]
    assert single.count_params() == model.count_params()
    assert single.name == model.name
    x = harness.images(2, 6, 6, 3)
    y = output(model, x)
    harness.close(y, output(single, x))
    harness.check_copies(model, x, y, tmp_path)


def fit(model, **options):
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **options)
    model.fit(
        harness.images(8, 6, 6, 3),
        np.arange(8) % 4,
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    return model


@pytest.mark.parametrize(
    "ways", [{}, *(pytest.param(ways, marks=pytest.mark.soak) for ways in WAYS[1:])], ids=str
)
def test_fit_is_that_of_single_units(ways):
    """Two epochs: weights and statistics behind them."""
    model = network(**ways)
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
        {
            "kernel_initializer": keras.initializers.GlorotUniform(seed=1),
            "shortcut": kp.shortcuts.Conv1x1(
                kernel_initializer=keras.initializers.HeNormal(seed=1)
            ),
            "use_bias": True,
            "bias_initializer": keras.initializers.RandomNormal(seed=2),
        },
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
    kernels = [
        value
        for path, value in harness.weights(single).items()
        if path.endswith("kernel") and value.any()
    ]
    assert len({kernel.ravel()[kernel.ravel() != 0][0] for kernel in kernels}) == len(kernels)


@pytest.mark.parametrize("stacked", [True, False])
def test_unseeded_kernels_all_differ(stacked):
    model = network(stacked=stacked)
    kernels = [
        value
        for path, value in harness.weights(kp.models.unstack(model)).items()
        if path.endswith("kernel")
    ]
    assert len({kernel.ravel()[0] for kernel in kernels}) == len(kernels) == 14
    other = [
        value
        for path, value in harness.weights(network(stacked=stacked)).items()
        if path.endswith("kernel")
    ]
    assert not any(value.ravel()[0] in {kernel.ravel()[0] for kernel in kernels} for value in other)


def test_stochastic_depth_grows_linearly():
    """Unit l of L has l / L of the rate of the last."""
    for model in (network(stochastic_depth=0.5), network(stochastic_depth=0.5, stacked=False)):
        np.testing.assert_allclose(
            [unit.options.stochastic_depth for unit in model.units],
            [0.5 * i / 6 for i in range(1, 7)],
        )
    stacks = network(stochastic_depth=0.5).segments[1::2]
    np.testing.assert_allclose(
        [rate for stack in stacks for rate in stack.stochastic_depth],
        [i / 12 for i in (2, 3, 5, 6)],
    )


def test_named_models_are_stacked_where_they_are_deep():
    model = kp.create_model("cifar_resnet110_preact")
    names = {
        "stage1_unit1",
        "stage1_units",
        "stage2_unit1",
        "stage2_units",
        "stage3_unit1",
        "stage3_units",
    }
    assert {segment.name for segment in model.segments} == names
    assert [segment.depth for segment in model.segments[1::2]] == [17] * 3
    kernel = {weight.path: weight for weight in model.weights}["stage1_units/branch/conv_1/kernel"]
    assert kernel.shape == (17, 3, 3, 16, 16)
    assert len(model.units) == 54
    trainable = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    assert trainable == kp.model_entry("cifar_resnet110_preact").parameters.trainable
    assert not any(
        isinstance(segment, kp.UnitStack)
        for segment in kp.create_model("cifar_resnet56_preact").segments
    )


# Round trips


def test_stack_and_unstack_lose_no_bit():
    model = network(shortcut=kp.shortcuts.Dropout(0.5), dropout=0.3, stochastic_depth=0.4)
    harness.randomize(model)
    output(model, harness.images(2, 6, 6, 3), training=True)  # the seeds and the statistics move on
    single = kp.models.unstack(model)
    again = kp.models.stack(single)
    check_same_values(again, model)
    check_same_values(kp.models.unstack(again), single)
    assert again.get_config() == model.get_config()
    x = harness.images(2, 6, 6, 3)
    np.testing.assert_array_equal(output(again, x), output(model, x))
    single.set_weights([value + 1 for value in single.get_weights()])  # a copy
    check_same_values(again, model)


@pytest.mark.parametrize(("first", "second"), [({"execution": "loop"}, {"remat": 2, "unroll": 2})])
def test_weights_file_of_another_execution(first, second, tmp_path):
    model, other = network(**first), network(**second)
    harness.randomize(model)
    model.save_weights(tmp_path / "w.weights.h5")
    other.load_weights(tmp_path / "w.weights.h5")
    check_same_values(other, model)
    x = harness.images(2, 6, 6, 3)
    harness.close(output(other, x), output(model, x))


@pytest.mark.soak
def test_training_goes_on_from_a_file(tmp_path):
    """The optimiser's state is of the stacks."""
    model = fit(network())
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        each.fit(
            harness.images(8, 6, 6, 3), np.arange(8) % 4, batch_size=4, shuffle=False, verbose=0
        )
    for value, want in zip(loaded.get_weights(), model.get_weights(), strict=True):
        harness.close(value, want)


# Frozen layers


def test_frozen_layers_stay_frozen(tmp_path):
    model = network()
    for name in ("stage1_units", "stage2_unit1", "stem_conv"):
        model.get_layer(name).trainable = False
    model.save(tmp_path / "model.keras")
    single = kp.models.unstack(model)
    frozen = ["stem_conv", "stage1_unit2", "stage1_unit3", "stage2_unit1"]
    assert [
        layer.name for layer in single.layers if layer.weights and not layer.trainable
    ] == frozen
    assert [unit.name for unit in model.units if not unit.trainable] == frozen[1:]
    for copy in (keras.models.load_model(tmp_path / "model.keras"), kp.models.stack(single)):
        assert [weight.path for weight in copy.trainable_weights] == [
            weight.path for weight in model.trainable_weights
        ]
        assert not any(
            path.startswith("stage1_units")
            for path in (weight.path for weight in copy.trainable_weights)
        )
    before = harness.weights(model)
    fit(model, run_eagerly=BACKEND == "tensorflow")
    for path, value in harness.weights(model).items():
        assert np.array_equal(value, before[path]) == path.startswith(
            ("stage1_units/", "stage2_unit1/", "stem_conv/")
        ), path


def test_partly_frozen_stages_do_not_stack():
    single = network(stacked=False)
    single.get_layer("stage2_unit3").trainable = False
    with pytest.raises(
        ValueError, match=r"frozen together or not at all\. Received: stage2_unit3 frozen alone"
    ):
        kp.models.stack(single)
    single.get_layer("stage2_unit2").trainable = False
    assert not kp.models.stack(single).get_layer("stage2_units").trainable


# Outputs and gradients of every unit


class Perturbed(reference.Network):
    """The NumPy network in parts: what stands behind x_l, with something added to every
    x.
    """

    def after(self, x, added, first):
        """Logits, from x_`first` on; `added` is what to add to the outputs of the units
        behind it, by the units' numbers.
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


def numpy_network(model):
    weights = {
        path: value.astype("float64")
        for path, value in harness.weights(kp.models.unstack(model)).items()
    }
    return Perturbed(weights, STAGES, "3x3", "basic", {"shape_shortcut": "zero_pad"})


def zeros(probe, batch):
    return [
        np.zeros((each.shape[0], batch, *each.shape[2:]), "float32") for each in probe.inputs[1:]
    ]


def test_unit_outputs():
    model = network()
    harness.randomize(model)
    x = harness.images(2, 6, 6, 3)
    *outputs, y = keras.Model(model.input, [*model.unit_outputs, model.output])(x)
    expected = numpy_network(model)
    harness.close(harness.numpy(y), expected(x), 1e-4)
    assert len(outputs) == len(expected.outputs) == 6
    for got, want in zip(outputs, expected.outputs, strict=True):
        harness.close(harness.numpy(got), want, 1e-4)
    assert [tensor.shape for tensor in model.unit_outputs] == [
        (None, 6 // 2**s, 6 // 2**s, 4 * 2**s) for s in range(2) for _ in range(3)
    ]


@pytest.mark.parametrize(
    "ways",
    [{}, {"stacked": False}, *(pytest.param(ways, marks=pytest.mark.soak) for ways in WAYS[1:])],
    ids=str,
)
def test_probe(ways):
    """Values and gradients of every x_l against the NumPy network, with zeros and with
    something added.
    """
    model = network(**ways)
    harness.randomize(model)
    x, cotangent = harness.images(2, 6, 6, 3), harness.images(2, 4, seed=3)
    probe = model.probe()
    assert {id(weight) for weight in probe.weights} == {id(weight) for weight in model.weights}

    def function(x, *added):
        y, *outputs = probe([x, *added], training=False)
        return keras.ops.sum(keras.ops.multiply(y, cotangent)), [y, *outputs]

    step = harness.Step(function, probe, compiled=ways.get("stacked", True))
    (y, *outputs), (_, *gradients), _ = step(x, *zeros(probe, 2))
    outputs, gradients = ([row for part in each for row in part] for each in (outputs, gradients))
    expected = numpy_network(model)
    harness.close(y, expected(x), 1e-4)
    harness.close(y, output(model, x))
    assert len(outputs) == len(gradients) == 6
    rng, size = np.random.default_rng(4), 1e-6
    for number, (got, gradient, want) in enumerate(
        zip(outputs, gradients, expected.outputs, strict=True), 1
    ):
        harness.close(got, want, 1e-4)
        direction = rng.normal(size=want.shape)
        moved = [
            (expected.after(want + sign * size * direction, {}, number) * cotangent).sum()
            for sign in (1, -1)
        ]
        np.testing.assert_allclose(
            (gradient * direction).sum(), (moved[0] - moved[1]) / (2 * size), 2e-3, 2e-3
        )
    added = [rng.normal(size=each.shape).astype("float32") * 0.1 for each in zeros(probe, 2)]
    (y, *_), *_ = step(x, *added)
    rows = dict(enumerate((row for part in added for row in part), 1))
    want = expected.after(expected.first_input, rows, 0)
    harness.close(y, want, 1e-4)
    assert np.abs(want - expected(x)).max() > 1e-2


def test_probe_in_training_is_that_of_single_units():
    """With the statistics of the batch, and dropout without: x_l and the gradients on
    them.
    """
    model = network(remat=2)
    single = kp.models.unstack(model)
    x, labels = harness.images(4, 6, 6, 3), np.arange(4) % 4
    results = []
    for each in (model, single):
        probe = each.probe()

        def function(x, *added, probe=probe):
            y, *outputs = probe([x, *added], training=True)
            return keras.ops.mean(
                keras.losses.sparse_categorical_crossentropy(labels, y, from_logits=True)
            ), outputs

        outputs, (_, *gradients), _ = harness.differentiate(
            function, probe, x, *zeros(probe, 4), compiled=each is model
        )
        results.append([[row for part in parts for row in part] for parts in (outputs, gradients)])
    (outputs, gradients), (wanted, wanted_gradients) = results
    for got, want in zip([*outputs, *gradients], [*wanted, *wanted_gradients], strict=True):
        assert np.abs(want).max() > 0
        np.testing.assert_allclose(got, want, 0, 1e-4 * np.abs(want).max())


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"`stacked` must be one of .*'yes'"):
        network(stacked="yes")
