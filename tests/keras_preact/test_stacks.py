"""A stack of n units is n single units behind one another: values, gradients,
statistics, seeds, files, errors.
"""

import functools

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import stacks
from tests.keras_preact import harness

BACKEND = keras.backend.backend()
IMAGES, VECTORS = (3, 5, 4, 4), (6, 4)


class Chain(keras.layers.Layer):
    """Single units behind one another."""

    def __init__(self, units):
        super().__init__()
        self.units = units
        self.built = True

    def call(self, x, training=None):
        for unit in self.units:
            x = unit(x, training=training)
        return x


def single_units(shape, filters, depth, options, seed=0):
    """Built units with random weights, each with its own."""
    units = []
    for i in range(depth):
        units.append(harness.unit_of(filters, name=f"single{i + 1}", **options))
        units[-1].build(shape)
        harness.randomize(units[-1], seed + i)
    return units


def columns(units, by_id=None) -> dict[str, np.ndarray]:
    """The units' weights, or what `by_id` holds for them, stacked by path."""
    rows = []
    for unit in units:
        values = (
            unit.get_weights()
            if by_id is None
            else [by_id.get(id(weight)) for weight in unit.weights]
        )
        rows.append(dict(zip(harness.paths(unit), map(np.array, values), strict=True)))
    return {path: np.stack([row[path] for row in rows]) for path in rows[0]}


def stack_of(units, shape, filters, options, **ways):
    """A stack with the units' weights, carried over by NumPy."""
    stack = kp.UnitStack(harness.unit_of(filters, **options), len(units), **ways)
    stack.build(shape)
    values = columns(units)
    assert harness.weights(stack).keys() == values.keys()
    stack.set_weights([values[path] for path in harness.paths(stack)])
    return stack


def step_of(layer, cotangent, training=True, **options):
    def function(x):
        y = layer(x, training=training)
        return keras.ops.sum(keras.ops.multiply(y, cotangent)), [y]

    step = harness.Step(function, layer, **options)

    def run(x):
        (y,), (on_x,), on_weights = step(x)
        return y, on_x, on_weights

    return run


def run(layer, x, cotangent, training=True, **options):
    """Output, the gradient on x, and the gradients on the weights by their ids; the
    layer's state is as the step leaves it.
    """
    return step_of(layer, cotangent, training, **options)(x)


def draw_cotangent(x):
    return np.random.default_rng(2).normal(size=x.shape).astype("float32")


def check_equal_to_chain(stack, units, x, training=True, steps=1):
    """Steps of both: output, gradients, statistics. Returns the output and the gradient
    on x of the last one.
    """
    chain, cotangent = Chain(units), draw_cotangent(x)
    step_of_chain = step_of(chain, cotangent, training, compiled=False)
    step_of_stack = step_of(stack, cotangent, training)
    for _ in range(steps):
        want, want_on_x, want_on_weights = step_of_chain(x)
        y, on_x, on_weights = step_of_stack(x)
        harness.close(y, want)
        harness.close(on_x, want_on_x)
        assert np.abs(on_x).max() > 0
        gradients = {
            path: on_weights.get(id(weight))
            for path, weight in zip(harness.paths(stack), stack.weights, strict=True)
        }
        wanted = columns(units, want_on_weights)
        assert gradients.keys() == wanted.keys()
        for path, want in wanted.items():
            assert (gradients[path] is None) == ("moving_" in path)
            if gradients[path] is not None:
                # The gradient on a bias ahead of a normalisation is rounding alone.
                tolerance = 3e-5 if path.endswith("bias") else 1e-5
                harness.close(gradients[path], want, tolerance, message=path)
        after = columns(units)
        for path, value in harness.weights(stack).items():
            harness.close(value, after[path], message=path)
    return y, on_x


NORMED_GATE = kp.shortcuts.ShortcutOnlyGating(bias=-1.0, normalization="batch")

#: Options of the unit, depth, options of the stack.
CASES = [
    ({"arrangement": "original"}, 3, {}),
    (
        {"arrangement": "bn_after_addition", "shortcut": "exclusive_gating"},
        3,
        {"execution": "loop"},
    ),
    ({"arrangement": "relu_before_addition", "shortcut": "constant_scaling"}, 3, {"remat": True}),
    (
        {"arrangement": "relu_only_preactivation", "shortcut": "shortcut_only_gating"},
        5,
        {"remat": 2},
    ),
    ({"shortcut": "conv1x1"}, 5, {"unroll": 2}),
    ({"arrangement": "bn_only_preactivation", "shortcut": "none"}, 5, {"remat": 3, "unroll": 2}),
    ({"block": "bottleneck", "groups": 2}, 3, {"execution": "loop", "remat": True}),
    (
        {"block": "bottleneck", "groups": 2, "arrangement": "original", "normalization": "layer"},
        4,
        {"unroll": 2},
    ),
    ({"block": "dense", "shortcut": "conv1x1", "use_bias": True}, 4, {"remat": 2}),
    ({"block": "single", "normalization": "group"}, 3, {"execution": "loop", "remat": 2}),
    ({"normalization": "rms", "use_bias": True}, 3, {}),
    ({"normalization": "none", "activation": "gelu"}, 3, {"unroll": 5}),
    ({"shortcut": NORMED_GATE}, 3, {"remat": 7}),
    ({"arrangement": "original"}, 1, {"remat": True}),
    ({"arrangement": kp.arrangements.FIXUP, "normalization": "none"}, 3, {}),
]

#: Shape of the input and filters of the units, where they are not those of images and basic blocks.
SIZES = {"bottleneck": ((3, 4, 4, 8), 2), "dense": (VECTORS, 4)}


def words(options) -> str:
    return " ".join(f"{key}={getattr(value, 'name', value)}" for key, value in options.items())


@pytest.mark.backend
@pytest.mark.parametrize(
    ("options", "depth", "ways"), CASES, ids=[words(options | ways) for options, _, ways in CASES]
)
def test_step_in_training(options, depth, ways):
    shape, filters = SIZES.get(options.get("block"), (IMAGES, 4))
    x = harness.images(*shape)
    units = single_units(shape, filters, depth, options)
    stack = stack_of(units, shape, filters, options, **ways)
    known = {key: value for key, value in options.items() if key != "use_bias"}
    expected = [harness.reference_of(unit, training=True, **known) for unit in units]
    y, on_x = check_equal_to_chain(stack, units, x)
    if not all(isinstance(options.get(key, ""), str) for key in ("shortcut", "arrangement")):
        return  # the reference does not know these objects
    chain = functools.partial(functools.reduce, lambda x, unit: unit(x), expected)
    harness.close(y, chain(x), 1e-4)
    for path, value in harness.weights(stack).items():
        if "moving_" in path:
            harness.close(value, np.stack([unit.updates[path] for unit in expected]), 1e-4, path)
    direction = np.random.default_rng(3).normal(size=shape)
    cotangent, step = draw_cotangent(x), 1e-6
    moved = [(chain(x + sign * step * direction) * cotangent).sum() for sign in (1, -1)]
    difference = (moved[0] - moved[1]) / (2 * step)
    np.testing.assert_allclose((on_x * direction).sum(), difference, 2e-3, 2e-3)


@pytest.mark.backend
def test_the_cases_cover_the_tables():
    def values(key, default):
        return {options.get(key, default) for options, _, _ in CASES}

    assert values("arrangement", "full_preactivation") >= set(kp.ARRANGEMENTS)
    of_transformers = {"attention", "mlp", "swiglu"}  # test_transformer.py stacks them
    assert values("block", "basic") == set(kp.BLOCKS) - of_transformers
    assert values("shortcut", "identity") >= set(kp.SHORTCUTS) - {"dropout"}  # random: below


@pytest.mark.backend
def test_inference():
    """With the moving statistics, which stay."""
    units = single_units(IMAGES, 4, 3, {"shortcut": "dropout"})
    stack = stack_of(units, IMAGES, 4, {"shortcut": "dropout"})
    before = stack.get_weights()
    x = harness.images(*IMAGES)
    y, _ = check_equal_to_chain(stack, units, x, training=False)
    expected = [harness.reference_of(unit, shortcut="dropout") for unit in units]
    harness.close(y, functools.reduce(lambda x, unit: unit(x), expected, x))
    for value, old in zip(stack.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)


@pytest.mark.backend
@pytest.mark.parametrize("normalization", ["batch", "rms"])
def test_channels_first(normalization):
    """As channels last; TensorFlow has no gradient of such convolutions on a CPU."""
    options = {"normalization": normalization, "shortcut": "conv1x1", "use_bias": True}
    x = harness.images(*IMAGES)
    units = single_units(IMAGES, 4, 3, options | {"data_format": "channels_last"})
    first = x.transpose(0, 3, 1, 2)
    stack = stack_of(units, first.shape, 4, options | {"data_format": "channels_first"})
    cotangent = draw_cotangent(x)
    if BACKEND == "tensorflow":
        y = harness.numpy(stack(first, training=True))
        want = harness.numpy(Chain(units)(x, training=True))
    else:
        want, want_on_x, _ = run(Chain(units), x, cotangent, compiled=False)
        y, on_x, _ = run(stack, first, cotangent.transpose(0, 3, 1, 2))
        harness.close(on_x.transpose(0, 2, 3, 1), want_on_x)
    harness.close(y.transpose(0, 2, 3, 1), want)
    after = columns(units)
    for path, value in harness.weights(stack).items():
        harness.close(value, after[path], message=path)


@pytest.mark.backend
@pytest.mark.parametrize("ways", [{}, {"remat": 3}, {"unroll": 2}], ids=str)
def test_outputs_and_perturbations(ways):
    """What is added to the output of a unit reaches the next one; its gradient is that
    of x_{l+1}.
    """
    x = harness.images(*IMAGES)
    options = {"normalization": "layer"}
    units = single_units(IMAGES, 4, 5, options)
    stack = kp.UnitStack(harness.unit_of(4, **options), 5, **ways)
    added = harness.images(5, *IMAGES, seed=4) * 0.1
    cotangent = draw_cotangent(x)
    if ways:
        stack.build(IMAGES)
    else:
        stack(x, perturbations=np.zeros_like(added))  # builds it for x alone
    stack.load_units(units)
    expected = [harness.reference_of(unit, training=True, **options) for unit in units]

    def function(x, added):
        outputs = stack(x, perturbations=added, return_outputs=True, training=True)
        return keras.ops.sum(keras.ops.multiply(outputs[-1], cotangent)), [outputs]

    def chain(x, added):
        every = []
        for unit, own in zip(expected, added, strict=True):
            x = unit(x) + own
            every.append(x)
        return np.stack(every)

    (outputs,), (_, on_added), _ = harness.differentiate(function, stack, x, added)
    harness.close(outputs, chain(x, added), 1e-4)
    if not ways:
        harness.close(harness.numpy(stack(x, added)), outputs[-1])
        harness.close(harness.numpy(stack(x, return_outputs=True)), chain(x, 0 * added), 1e-4)
    step, rng = 1e-6, np.random.default_rng(5)
    for i in range(5):
        direction = np.zeros(added.shape)
        direction[i] = rng.normal(size=IMAGES)
        moved = [
            (chain(x, added + sign * step * direction)[-1] * cotangent).sum() for sign in (1, -1)
        ]
        np.testing.assert_allclose(
            (on_added * direction).sum(), (moved[0] - moved[1]) / (2 * step), 2e-3, 2e-3
        )


@pytest.mark.parametrize(
    "ways",
    [
        {},
        *(
            pytest.param(ways, marks=pytest.mark.soak)
            for ways in ({"remat": 2, "unroll": 2}, {"execution": "loop"})
        ),
    ],
    ids=str,
)
def test_xla(ways):
    """Compiled by XLA, and step by step without a graph."""
    x = harness.images(*IMAGES)
    units = single_units(IMAGES, 4, 5, {})
    cotangent = draw_cotangent(x)
    stack, eager = (stack_of(units, IMAGES, 4, {}, **ways) for _ in range(2))
    want, want_on_x, _ = run(Chain(units), x, cotangent, compiled=False)
    y, on_x, _ = run(stack, x, cotangent, jit_compile=True)
    harness.close(y, want)
    harness.close(on_x, want_on_x)
    after = columns(units)
    harness.close(harness.numpy(eager(x, training=True)), want)
    for layer in (stack, eager):
        for path, value in harness.weights(layer).items():
            harness.close(value, after[path], message=path)
    _, on_x, _ = harness.value_and_grad(eager, x, cotangent)
    harness.close(on_x, want_on_x)


@pytest.mark.parametrize("ways", [{}, {"execution": "loop"}, {"remat": 2}], ids=str)
def test_inference_writes_no_variable(ways):
    import tensorflow as tf

    unit = kp.ResidualUnit(4, shortcut=kp.shortcuts.Dropout(0.5), dropout=0.5, stochastic_depth=0.5)
    stack = kp.UnitStack(unit, 3, **ways)
    stack.build(IMAGES)

    def operations(training):
        graph = (
            tf.function(lambda x: stack(x, training=training))
            .get_concrete_function(tf.TensorSpec(IMAGES))
            .graph
        )
        definition = graph.as_graph_def()
        return {
            node.op
            for part in (definition.node, *(f.node_def for f in definition.library.function))
            for node in part
        }

    assert not any("Assign" in name for name in operations(False))
    assert any("Assign" in name for name in operations(True))
    is_scan = ways.get("execution") != "loop"
    assert any("While" in name for name in operations(False)) == is_scan


# Dropout


RANDOM = {"dropout": 0.3, "shortcut": kp.shortcuts.Dropout(0.4), "stochastic_depth": 0.5}


def seed_states(layer) -> list[np.ndarray]:
    weights = {id(weight) for weight in layer.weights}
    return [harness.numpy(v.value) for v in layer.variables if id(v) not in weights]


@pytest.mark.backend
@pytest.mark.skipif(
    BACKEND == "torch", reason="there unseeded dropout draws from Torch's global generator"
)
@pytest.mark.parametrize("ways", [{"execution": "loop"}, {"remat": 2, "unroll": 2}], ids=str)
def test_masks_are_those_of_single_units(ways):
    """From equal seeds, over two steps: a mask of another place or another step would
    show.
    """
    stack = kp.UnitStack(kp.ResidualUnit(4, **RANDOM, name="a_unit1"), 3, **ways)
    stack.build(IMAGES)
    harness.randomize(stack)
    units = [stack.unit(i) for i in range(3)]
    x = harness.images(*IMAGES)
    before = seed_states(stack)
    assert [state.shape for state in before] == [
        (3, 2)
    ] * 3  # of the two dropouts and the stochastic depth
    assert len({tuple(row) for state in before for row in state}) == 9
    check_equal_to_chain(stack, units, x, steps=2)
    for state, old, *own in zip(seed_states(stack), before, *map(seed_states, units), strict=True):
        assert not (state == old).all(1).any()
        np.testing.assert_array_equal(state, own)
    state = seed_states(stack)
    stack(x, training=False)
    np.testing.assert_array_equal(seed_states(stack), state)


@pytest.mark.backend
def test_masks_of_a_seeded_shortcut_are_those_of_single_units():
    stack = kp.UnitStack(
        kp.ResidualUnit(4, shortcut=kp.shortcuts.Dropout(0.5, seed=1), name="a_unit1"), 3
    )
    stack.build(IMAGES)
    harness.randomize(stack)
    units = [stack.unit(i) for i in range(3)]
    check_equal_to_chain(stack, units, harness.images(*IMAGES), steps=2)
    np.testing.assert_array_equal(
        seed_states(stack)[0], np.stack([seed_states(unit)[0] for unit in units])
    )
    assert len(np.unique(seed_states(stack)[0], axis=0)) == 3


@pytest.mark.backend
@pytest.mark.skipif(BACKEND != "torch", reason="the masks under remat are compared above")
def test_the_recomputation_has_the_masks_of_the_forward_pass():
    x, cotangent = harness.images(*IMAGES), draw_cotangent(harness.images(*IMAGES))
    plain = kp.UnitStack(kp.ResidualUnit(4, **RANDOM), 3)
    plain.build(IMAGES)
    harness.randomize(plain)
    again = kp.UnitStack(kp.ResidualUnit(4, **RANDOM), 3, remat=2)
    again.build(IMAGES)
    again.load_units([plain.unit(i) for i in range(3)])
    results = []
    for stack in (plain, again):
        keras.utils.set_random_seed(7)  # the global generator, for Torch
        results.append(run(stack, x, cotangent))
    (y, on_x, on_weights), (other, other_on_x, other_on_weights) = results
    harness.close(other, y)
    harness.close(other_on_x, on_x)
    for got, want in zip(other_on_weights.values(), on_weights.values(), strict=True):
        harness.close(got, want)


@pytest.mark.backend
@pytest.mark.parametrize("execution", ["auto", "loop"])
def test_dropout_of_each_unit_and_step_is_its_own(execution):
    """F is 0: of what was left by the units before, each drops its share."""
    unit = kp.ResidualUnit(4, shortcut=kp.shortcuts.Dropout(0.3), kernel_initializer="zeros")
    stack = kp.UnitStack(unit, 3, execution=execution)
    x = np.ones((50, 5, 5, 4), "float32")
    outputs = [harness.numpy(stack(x, return_outputs=True, training=True)) for _ in range(2)]
    assert not np.array_equal(*outputs)
    previous = x
    for i, output in enumerate(outputs[0]):
        np.testing.assert_allclose(output[output != 0], 0.7 ** -(i + 1), 1e-5)
        assert abs((output[previous != 0] == 0).mean() - 0.3) < 0.05
        previous = output
    np.testing.assert_array_equal(
        harness.numpy(stack(x, return_outputs=True, training=False))[-1], x
    )


@pytest.mark.backend
@pytest.mark.parametrize("ways", [{"execution": "loop"}, {"remat": 2}], ids=str)
def test_stochastic_depth(ways):
    """F is 1: each example gets 0 or `1 / (1 - rate)` of it, on average 1."""
    rates = [0.0, 0.25, 0.6]
    unit = kp.ResidualUnit(
        1, block="dense", use_bias=True, kernel_initializer="zeros", bias_initializer="ones"
    )
    stack = kp.UnitStack(unit, 3, stochastic_depth=rates, **ways)
    x = np.zeros((4000, 1), "float32")
    outputs = harness.numpy(stack(x, return_outputs=True, training=True))
    added = np.diff(outputs[..., 0], axis=0, prepend=x[None, :, 0])
    for own, rate in zip(added, rates, strict=True):
        kept = own > 0.5
        np.testing.assert_allclose(own[kept], 1 / (1 - rate), 1e-5)
        np.testing.assert_allclose(own[~kept], 0, atol=1e-5)
        assert abs((~kept).mean() - rate) < (0.03 if rate else 1e-9)
        assert abs(own.mean() - 1) < 0.1
    assert abs(np.corrcoef(added[1], added[2])[0, 1]) < 0.06
    at_inference = harness.numpy(stack(x, return_outputs=True, training=False))
    np.testing.assert_array_equal(np.diff(at_inference[..., 0], axis=0, prepend=x[None, :, 0]), 1)
    assert [stack.unit(i).options.stochastic_depth for i in range(3)] == rates
    same = kp.UnitStack(kp.ResidualUnit(1, block="dense", use_bias=True, stochastic_depth=0.6), 3)
    same.build(x.shape)
    assert [same.unit(i).options.stochastic_depth for i in range(3)] == [0.6] * 3


# Initial values


@pytest.mark.backend
@pytest.mark.parametrize(
    "initializer", [None, "glorot_uniform", keras.initializers.HeNormal(seed=1)], ids=harness.label
)
def test_every_unit_starts_with_values_of_its_own(initializer):
    """Each slice has the deviation that its own fan asks for."""
    kernel = {} if initializer is None else {"kernel_initializer": initializer}
    stack = kp.UnitStack(kp.ResidualUnit(32, block="bottleneck", **kernel), 3)
    stack.build((1, 4, 4, 128))
    variances = {
        None: lambda size, i, o: 2 / (size**2 * o),
        "glorot_uniform": lambda size, i, o: 2 / (size**2 * (i + o)),
    }
    variance = variances.get(initializer, lambda size, i, o: 2 / (size**2 * i))
    kernels = {
        path: value for path, value in harness.weights(stack).items() if path.endswith("kernel")
    }
    slices = [row for value in kernels.values() for row in value]
    assert len(kernels) == 3
    assert len({row.tobytes() for row in slices}) == 9
    assert len({row.ravel()[0] for row in slices}) == 9
    for value in kernels.values():
        for row in value:
            np.testing.assert_allclose(
                row.std(), variance(row.shape[0], *row.shape[2:]) ** 0.5, 0.06
            )
            assert abs(row.mean()) < 0.1 * row.std()
    for path, value in harness.weights(stack).items():
        if not path.endswith("kernel"):
            np.testing.assert_array_equal(
                value, np.full(value.shape, path.endswith(("gamma", "variance")))
            )


@pytest.mark.backend
def test_delta_orthogonal_and_fixup_kernels_are_those_of_single_units():
    stack = kp.UnitStack(
        kp.ResidualUnit(4, kernel_initializer=kp.initializers.DeltaOrthogonal()), 3
    )
    stack.build(IMAGES)
    for kernel in harness.weights(stack)["branch/conv_2/kernel"]:
        np.testing.assert_allclose(kernel[1, 1] @ kernel[1, 1].T, np.eye(4), atol=1e-5)
        kernel[1, 1] = 0
        assert not kernel.any()
    stack = kp.UnitStack(kp.ResidualUnit(4, kernel_initializer=kp.initializers.Fixup(8)), 3)
    stack.build(IMAGES)
    weights = harness.weights(stack)
    assert weights["branch/conv_1/kernel"].all()
    assert not weights["branch/conv_2/kernel"].any()


@pytest.mark.backend
@pytest.mark.parametrize("group", [2, 100])
def test_seeded_units_start_as_those_that_at_makes(group, monkeypatch):
    monkeypatch.setattr(stacks, "GROUP", group)
    pattern = kp.ResidualUnit(
        4,
        kernel_initializer=keras.initializers.HeNormal(seed=1),
        use_bias=True,
        bias_initializer=keras.initializers.RandomNormal(seed=2),
        shortcut=kp.shortcuts.Conv1x1(kernel_initializer=keras.initializers.HeNormal(seed=3)),
        name="a_unit8",
    )
    stack = kp.UnitStack(pattern, 3)
    stack.build(IMAGES)
    for i, name in enumerate(["a_unit8", "a_unit9", "a_unit10"]):
        single = pattern.at(name)
        single.build(IMAGES)
        assert stack.unit(i).name == name
        for path, value in harness.weights(single).items():
            np.testing.assert_array_equal(harness.weights(stack)[path][i], value, path)


@pytest.mark.backend
def test_unit_is_a_copy_of_a_slice():
    stack = kp.UnitStack(kp.ResidualUnit(4, **RANDOM | {"use_bias": True}), 3)
    stack.build(IMAGES)
    harness.randomize(stack)
    for i in (0, 1, 2, -1, -3):
        unit = stack.unit(i)
        assert type(unit) is kp.ResidualUnit
        for path, value in harness.weights(unit).items():
            np.testing.assert_array_equal(value, harness.weights(stack)[path][i])
        np.testing.assert_array_equal(seed_states(unit), [state[i] for state in seed_states(stack)])
    before = stack.get_weights()
    unit.set_weights([value + 1 for value in unit.get_weights()])
    np.testing.assert_array_equal(stack.get_weights()[0], before[0])
    assert len({stack.unit(i).name for i in range(3)}) == 3


# Round trips


@pytest.mark.backend
@pytest.mark.parametrize(
    ("filters", "options", "ways"),
    [
        (4, {}, {}),
        (
            2,
            {"block": "bottleneck", "normalization": "layer", "dtype": "mixed_bfloat16"},
            {"execution": "loop", "remat": 2, "unroll": 2, "name": "a_stack"},
        ),
        (4, RANDOM, {"stochastic_depth": [0.1, 0.2, 0.3], "remat": True, "trainable": False}),
        (4, {"kernel_initializer": keras.initializers.HeNormal(seed=1)}, {}),
    ],
    ids=["plain", "ways", "random", "seeded"],
)
def test_config(filters, options, ways):
    stack = kp.UnitStack(kp.ResidualUnit(filters, **options), 3, **ways)
    config = stack.get_config()
    copy = kp.UnitStack.from_config(config)
    assert copy.get_config() == config
    for name in (
        "name",
        "depth",
        "execution",
        "remat",
        "unroll",
        "stochastic_depth",
        "trainable",
        "dtype_policy",
    ):
        assert getattr(copy, name) == getattr(stack, name)
    shape = (2, 4, 4, copy._body.unit.channels_out)
    stack.build(shape)
    copy.build(shape)
    assert harness.paths(copy) == harness.paths(stack)
    harness.randomize(stack)
    copy.set_weights(stack.get_weights())
    x = harness.images(*shape)
    want, got = (harness.numpy(each(x)) for each in (stack, copy))
    np.testing.assert_array_equal(got, want)


@pytest.mark.backend
def test_the_pattern_stays_as_it_is():
    unit = kp.ResidualUnit(4, stochastic_depth=0.2, name="a_unit1")
    kp.UnitStack(unit, 3, stochastic_depth=[0.1, 0.2, 0.3]).build(IMAGES)
    assert not unit.built
    assert not unit.weights
    assert (unit.options.stochastic_depth, unit.name) == (0.2, "a_unit1")


@pytest.mark.backend
def test_from_units_takes_weights_seeds_and_rates():
    units = []
    for rate in (0.1, 0.4):
        units.append(kp.ResidualUnit(4, **RANDOM | {"stochastic_depth": rate}))
        units[-1].build(IMAGES)
        harness.randomize(units[-1], seed=len(units))
        units[-1](harness.images(*IMAGES), training=True)  # the seeds move on
    stack = kp.UnitStack.from_units(units, name="a_stack", remat=True)
    assert (stack.name, stack.depth, stack.remat, stack.stochastic_depth) == (
        "a_stack",
        2,
        True,
        [0.1, 0.4],
    )
    for i, unit in enumerate(units):
        for got, want in zip(stack.unit(i).variables, unit.variables, strict=True):
            np.testing.assert_array_equal(harness.numpy(got.value), harness.numpy(want.value))


@pytest.mark.backend
def test_weights_have_the_paths_of_a_unit():
    stack = kp.UnitStack(kp.ResidualUnit(4, shortcut="exclusive_gating"), 3, name="a_stack")
    stack.build(IMAGES)
    unit = kp.ResidualUnit(4, shortcut="exclusive_gating", name="a_unit")
    unit.build(IMAGES)
    assert {w.path: w.shape for w in stack.weights} == {
        w.path.replace("a_unit/", "a_stack/"): (3, *w.shape) for w in unit.weights
    }
    assert {w.path for w in stack.trainable_weights} == {
        w.path.replace("a_unit/", "a_stack/") for w in unit.trainable_weights
    }
    assert stack.count_params() == 3 * unit.count_params()


# Half precision, frozen stacks


@pytest.mark.backend
@pytest.mark.parametrize(
    "ways",
    [
        {},
        *(
            pytest.param(ways, marks=pytest.mark.soak)
            for ways in ({"remat": 2}, {"execution": "loop"})
        ),
    ],
    ids=str,
)
def test_mixed_precision(ways):
    stack = kp.UnitStack(kp.ResidualUnit(4, **RANDOM, dtype="mixed_bfloat16"), 3, **ways)
    x = harness.images(*IMAGES)
    stack.build(IMAGES)
    harness.randomize(stack)
    before = harness.weights(stack)
    y, on_x, on_weights = run(stack, x, draw_cotangent(x).astype("float32"))
    assert stack.compute_dtype == "bfloat16"
    assert keras.backend.standardize_dtype(stack(x).dtype) == "bfloat16"
    assert {weight.dtype for weight in stack.weights} == {"float32"}
    for path, value in harness.weights(stack).items():
        assert value.dtype == "float32"
        assert np.isfinite(value).all()
        assert np.array_equal(value, before[path]) != ("moving_" in path)
    for value in (y, on_x, *on_weights.values()):
        assert np.isfinite(value.astype("float32")).all()
    plain = kp.UnitStack(kp.ResidualUnit(4, **RANDOM), 3)
    plain.build(IMAGES)
    plain.set_weights(stack.get_weights())
    want, got = (harness.numpy(each(x)) for each in (plain, stack))
    assert 0 < np.abs(got - want).max() < 0.1 * np.abs(want).max()


@pytest.mark.backend
def test_frozen():
    """In training it is what it is at inference, and nothing moves; thawed, everything
    does.
    """
    stack = kp.UnitStack(kp.ResidualUnit(4), 3, trainable=False)
    stack.build(IMAGES)
    assert not stack.trainable_variables
    stack.trainable = True
    harness.randomize(stack)
    stack.trainable = False
    assert not stack.trainable_variables
    assert len(stack.non_trainable_weights) == len(stack.weights) == 10
    x, before = harness.images(*IMAGES), stack.get_weights()
    y, _, _ = run(stack, x, draw_cotangent(x))
    np.testing.assert_array_equal(stack.get_weights()[0], before[0])
    for value, old in zip(stack.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)
    harness.close(y, harness.numpy(stack(x, training=False)))
    assert not stack.unit(1).trainable_weights
    stack.trainable = True
    assert len(stack.trainable_weights) == 6
    units = [stack.unit(i) for i in range(3)]
    assert len(units[1].trainable_weights) == 6
    check_equal_to_chain(stack, units, x)


# Errors


def built(filters=4, shape=IMAGES, **options):
    unit = harness.unit_of(filters, **options)
    unit.build(shape)
    return unit


def stack(depth=3, **options):
    return kp.UnitStack(kp.ResidualUnit(4), depth, **options)


def stack_units(**options):
    """Stack a plain unit and one with `options`."""
    return kp.UnitStack.from_units([built(), built(**options)])


WRONG = [
    (lambda: stack(0), ["`depth`", "positive integer", "depth=0"]),
    (lambda: stack(execution="while"), ["`execution`", "'scan'", "'loop'", "'while'"]),
    (lambda: stack(remat=0), ["`remat`", "remat=0"]),
    (lambda: stack(unroll=0), ["`unroll`", "unroll=0"]),
    (lambda: kp.UnitStack(kp.ResidualUnit(4, strides=2), 3), ["keep the shape", "strides=2"]),
    (lambda: stack().build((2, 5, 4, 3)), ["keep the shape", "(2, 5, 4, 3)", "(2, 5, 4, 4)"]),
    (
        lambda: stack()(np.zeros((2, 4), "float32")),
        ["(batch, height, width, channels)", "(2, 4)"],
    ),
    (lambda: kp.UnitStack(keras.layers.Dense(4), 3), ["`unit`", "ResidualUnit", "Dense"]),
    (lambda: kp.UnitStack(stack(), 3), ["`unit`", "ResidualUnit", "UnitStack"]),
    (
        lambda: stack(stochastic_depth=[0.1, 0.2]),
        ["a rate for each unit", "2 rates", "depth=3"],
    ),
    (lambda: stack(2, stochastic_depth=[0.1, 1.0]), ["`stochastic_depth`", "[0, 1)", "1.0"]),
    (lambda: kp.UnitStack.from_units([]), ["at least one unit", "[]"]),
    (
        lambda: kp.UnitStack.from_units([built(), kp.ResidualUnit(4)]),
        ["must be built", "built=False"],
    ),
    (
        lambda: kp.UnitStack.from_units([built(), keras.layers.Dense(4)]),
        ["must be built", "Dense"],
    ),
    (lambda: kp.UnitStack.from_units([built(shape=(2, 5, 4, 3))]), ["keep the shape", "5, 4, 3)"]),
    (lambda: stack_units(arrangement="original"), ["arrangement=", "'original'"]),
    (lambda: stack_units(shortcut="conv1x1"), ["shortcut=", "Conv1x1"]),
    (lambda: stack_units(activation="gelu"), ["activation=", "'relu' and 'gelu'"]),
    (lambda: stack_units(normalization="layer"), ["normalization=", "'batch' and 'layer'"]),
    (lambda: stack_units(dtype="mixed_bfloat16"), ["dtype=", "bfloat16"]),
]


@pytest.mark.backend
@pytest.mark.parametrize(("call", "parts"), WRONG, ids=[" ".join(parts) for _, parts in WRONG])
def test_wrong_arguments(call, parts):
    message = harness.error_of(call)
    assert all(part in message for part in parts), message


@pytest.mark.backend
def test_scan_where_there_is_none():
    if BACKEND == "torch":
        with pytest.raises(ValueError, match=r"no scan on torch: use execution='loop' or 'auto'"):
            kp.UnitStack(kp.ResidualUnit(4), 3, execution="scan")
    else:
        assert kp.UnitStack(kp.ResidualUnit(4), 3, execution="scan").execution == "scan"


@pytest.mark.backend
@pytest.mark.parametrize(
    ("units", "parts"),
    [
        (lambda: [built(), built()], ["3 units", "2 units"]),
        (lambda: [built(), built(), built(use_bias=True)], ["use_bias=False and True"]),
        (lambda: [built(), built(8, (2, 5, 4, 8)), built()], ["filters=4 and 8"]),
        (lambda: [built(), built(), "a unit"], ["must be built"]),
    ],
    ids=["number", "bias", "filters", "no unit"],
)
def test_units_that_do_not_fit_leave_the_stack_as_it_is(units, parts):
    made = stack()
    made.build(IMAGES)
    before = made.get_weights()
    message = harness.error_of(lambda: made.load_units(units()))
    assert all(part in message for part in parts)
    for value, old in zip(made.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)


@pytest.mark.backend
def test_units_that_are_not_there():
    made = stack()
    assert "built" in harness.error_of(lambda: made.unit(0))
    assert "built" in harness.error_of(lambda: made.load_units([built()] * 3))
    made.build(IMAGES)
    for i in (3, -4):
        with pytest.raises(IndexError, match=rf"3 units\. Received: unit\({i}\)"):
            made.unit(i)


@pytest.mark.backend
def test_from_units_keeps_what_is_frozen():
    units = [harness.unit_on(harness.images(2, 4, 4, 3), 3) for _ in range(3)]
    for unit in units:
        unit.trainable = False
    assert not kp.UnitStack.from_units(units).trainable_weights
    units[1].trainable = True
    with pytest.raises(ValueError, match="frozen together or not at all") as error:
        kp.UnitStack.from_units(units)
    assert f"Received: {units[0].name}, {units[2].name} frozen alone" in str(error.value)


class Subclassed(keras.Model):
    """Builds its stack at the first call."""

    def __init__(self):
        super().__init__()
        initializer = kp.initializers.released_he(seed=3)
        unit = kp.ResidualUnit(3, kernel_initializer=initializer, dropout=0.2, name="unit1")
        self.stack = kp.UnitStack(unit, depth=3)
        self.dense = keras.layers.Dense(2)

    def call(self, x, training=None):
        return self.dense(keras.ops.mean(self.stack(x, training=training), (1, 2)))


@pytest.mark.backend
def test_fit_builds_a_subclassed_model():
    """Keras looks for the shapes of its layers first: JAX traces what makes their
    weights.
    """
    model = Subclassed()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(harness.images(4, 5, 5, 3), np.zeros((4, 2)), verbose=0)
    built = Subclassed()
    built.stack.build((None, 5, 5, 3))
    for weight, its in zip(model.stack.weights, built.stack.weights, strict=True):
        if "moving" not in weight.path:
            np.testing.assert_array_equal(harness.numpy(weight), harness.numpy(its), weight.path)
    kernel = harness.weights(model.stack)["branch/conv_1/kernel"]
    assert len(np.unique(kernel.std((1, 2, 3, 4)))) == 3
