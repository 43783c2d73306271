"""A stack of n units is n single units one after another: values, gradients,
statistics, seeds, files, errors.
"""

import contextlib
import functools

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import stacks
from tests.keras_preact import harness

BACKEND = keras.backend.backend()
IMAGES, VECTORS = (3, 5, 4, 4), (6, 4)


def chain_of(units) -> keras.Sequential:
    """Single units one after another."""
    return keras.Sequential([keras.Input(units[0].get_build_config()["input_shape"][1:]), *units])


def single_units(shape, filters, depth, options):
    """Built units with random weights, each with its own."""
    units = []
    for i in range(depth):
        units.append(harness.unit_of(filters, name=f"single{i + 1}", **options))
        units[-1].build(shape)
        harness.randomize(units[-1], i)
    return units


def columns(units, value_of=harness.numpy) -> dict[str, np.ndarray]:
    """Stack, by path, the values of the units' weights, or another function of them."""
    rows = [
        dict(zip(harness.paths(unit), map(value_of, unit.weights), strict=True)) for unit in units
    ]
    return {path: np.stack([row[path] for row in rows]) for path in rows[0]}


def stack_of(units, shape, filters, options, **ways):
    """A stack with the units' weights, which are copied with NumPy."""
    stack = kp.UnitStack(harness.unit_of(filters, **options), len(units), **ways)
    stack.build(shape)
    values = columns(units)
    assert harness.weights(stack).keys() == values.keys()
    stack.set_weights([values[path] for path in harness.paths(stack)])
    return stack


def random_stack(depth=3, options=None, **ways):
    stack = kp.UnitStack(kp.ResidualUnit(4, name="a_unit1", **options or {}), depth, **ways)
    stack.build(IMAGES)
    harness.randomize(stack)
    return stack


def draw_cotangent(x):
    return harness.images(*x.shape, seed=2)


def check_weights(stack, units):
    after = columns(units)
    for path, value in harness.weights(stack).items():
        harness.close(value, after[path], message=path)


def without_leaks():
    """On JAX, a tensor of a step of a loop that is still there after the step is an error."""
    if BACKEND != "jax":
        return contextlib.nullcontext()
    import jax

    return jax.checking_leaks()


def check_equal_to_chain(stack, units, x, training=True, steps=1):
    """Compare output, gradients and statistics of some steps. Return the output of the last
    step and its gradient on x.
    """
    cotangent = draw_cotangent(x)
    step_of_chain = harness.step_of(chain_of(units), cotangent, training, compiled=False)
    step_of_stack = harness.step_of(stack, cotangent, training)
    for _ in range(steps):
        want, want_on_x, want_on_weights = step_of_chain(x)
        with without_leaks():
            y, on_x, on_weights = step_of_stack(x)
        harness.close(y, want)
        harness.close(on_x, want_on_x)
        assert np.abs(on_x).max() > 0
        wanted = columns(units, lambda weight, values=want_on_weights: values.get(id(weight), 0))
        for path, weight in zip(harness.paths(stack), stack.weights, strict=True):
            assert (id(weight) in on_weights) == ("moving_" not in path)
            if id(weight) in on_weights:
                # The gradient on a bias before a normalisation is only a rounding error.
                tolerance = 3e-5 if path.endswith("bias") else 1e-5
                harness.close(on_weights[id(weight)], wanted[path], tolerance, message=path)
        check_weights(stack, units)
    return y, on_x


MHC_LITE = kp.shortcuts.HyperConnections(2, "permutations")
NORMED_GATE = kp.shortcuts.ShortcutOnlyGating(bias=-1.0, normalization="batch")

#: Options of the unit, depth, options of the stack. The first three run on every backend, the last
#: four in the soak tests.
CASES = [
    ({"arrangement": "bn_after_addition", "shortcut": "exclusive_gating"}, 3, {}),
    ({"shortcut": "conv1x1"}, 5, {"remat": 2, "unroll": 2}),
    ({"normalization": "rms", "use_bias": True}, 3, {"execution": "loop", "remat": 2}),
    ({"arrangement": "original"}, 3, {"execution": "loop"}),
    ({"arrangement": "relu_before_addition", "shortcut": "constant_scaling"}, 3, {"remat": True}),
    ({"block": "bottleneck", "groups": 2, "normalization": "layer"}, 4, {"unroll": 2}),
    ({"block": "single", "normalization": "group"}, 3, {"unroll": 5}),
    ({"normalization": "none", "activation": "gelu"}, 3, {}),
    ({"shortcut": NORMED_GATE}, 3, {"remat": 7}),
    ({"arrangement": "original"}, 1, {"remat": True}),
    ({"arrangement": kp.arrangements.FIXUP, "normalization": "none"}, 3, {}),
    ({"shortcut": MHC_LITE, "arrangement": "original"}, 3, {"remat": 2}),
    (
        {"arrangement": "relu_only_preactivation", "shortcut": "shortcut_only_gating"},
        5,
        {"remat": 2},
    ),
    ({"arrangement": "bn_only_preactivation", "shortcut": "none"}, 5, {"remat": 3, "unroll": 2}),
    ({"block": "dense", "shortcut": "conv1x1", "use_bias": True}, 4, {"remat": 2}),
    ({"squeeze_excitation": 2, "standardize_weights": True}, 3, {"unroll": 2}),
]

#: Shape of the input and filters of the units, if they differ from images and basic blocks.
SIZES = {"bottleneck": ((3, 4, 4, 8), 2), "dense": (VECTORS, 4)}


@pytest.mark.parametrize(
    ("options", "depth", "ways"),
    [
        *(pytest.param(*case, marks=pytest.mark.backend) for case in CASES[:3]),
        *CASES[3:-4],
        *(pytest.param(*case, marks=pytest.mark.soak) for case in CASES[-4:]),
    ],
    ids=harness.label,
)
def test_step_in_training(options, depth, ways):
    shape, filters = SIZES.get(options.get("block"), (IMAGES, 4))
    shape = harness.with_streams(shape, options.get("shortcut", "identity"))
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
def test_channels_first():
    options = {"shortcut": "conv1x1", "use_bias": True}
    x = harness.images(*IMAGES)
    units = single_units(IMAGES, 4, 3, options | {"data_format": "channels_last"})
    first = x.transpose(0, 3, 1, 2)
    stack = stack_of(units, first.shape, 4, options | {"data_format": "channels_first"})
    want = harness.numpy(chain_of(units)(x, training=True))
    harness.close(harness.numpy(stack(first, training=True)).transpose(0, 2, 3, 1), want)
    check_weights(stack, units)


@pytest.mark.parametrize(
    "ways", [{"unroll": 2}, pytest.param({"remat": 3}, marks=pytest.mark.backend)], ids=str
)
def test_outputs_and_perturbations(ways):
    """An array that is added to a unit's output reaches the next unit; its gradient is the
    gradient of x_{l+1}.
    """
    units = single_units(IMAGES, 4, 5, {})
    stack = stack_of(units, IMAGES, 4, {}, **ways)
    x, added = harness.images(*IMAGES), harness.images(5, *IMAGES, seed=4) * 0.1

    def of_stack(x, added):
        outputs = stack(x, perturbations=added, return_outputs=True, training=True)
        return keras.ops.sum(keras.ops.multiply(outputs, cotangent)), [outputs]

    def of_chain(x, added):
        outputs = []
        for i, unit in enumerate(units):
            outputs.append(unit(outputs[-1] if outputs else x, training=True) + added[i])
        outputs = keras.ops.stack(outputs)
        return keras.ops.sum(keras.ops.multiply(outputs, cotangent)), [outputs]

    cotangent = draw_cotangent(added)
    (outputs,), on_arrays, _ = harness.step(of_stack, stack)(x, added)
    (want,), wanted, _ = harness.step(of_chain, chain_of(units), compiled=False)(x, added)
    harness.close(outputs, want)
    for got, expected in zip(on_arrays, wanted, strict=True):
        harness.close(got, expected, 1e-4)


def test_xla():
    """A stack gives the same values when XLA compiles it, and when it runs without a graph."""
    x = harness.images(*IMAGES)
    units = single_units(IMAGES, 4, 5, {})
    stack, eager = (stack_of(units, IMAGES, 4, {}) for _ in range(2))
    want, want_on_x, _ = harness.step_of(chain_of(units), draw_cotangent(x), compiled=False)(x)
    for layer, options in ((stack, {"jit_compile": True}), (eager, {"compiled": False})):
        y, on_x, _ = harness.step_of(layer, draw_cotangent(x), **options)(x)
        harness.close(y, want)
        harness.close(on_x, want_on_x)
        check_weights(layer, units)


RANDOM = {"dropout": 0.3, "shortcut": kp.shortcuts.Dropout(0.4), "stochastic_depth": 0.5}


@pytest.mark.parametrize("ways", [{}, {"execution": "loop"}, {"remat": 2}], ids=str)
def test_inference_writes_no_variable(ways):
    import tensorflow as tf

    stack = random_stack(3, RANDOM, **ways)

    def operations(training):
        function = tf.function(lambda x: stack(x, training=training))
        definition = function.get_concrete_function(tf.TensorSpec(IMAGES)).graph.as_graph_def()
        parts = (definition.node, *(each.node_def for each in definition.library.function))
        return " ".join(node.op for part in parts for node in part)

    assert "Assign" not in operations(training=False)
    assert "Assign" in operations(training=True)
    assert ("While" in operations(training=False)) == (ways.get("execution") != "loop")


# Dropout


def seed_states(layer) -> list[np.ndarray]:
    weights = {id(weight) for weight in layer.weights}
    return [harness.numpy(v.value) for v in layer.variables if id(v) not in weights]


@pytest.mark.backend
@pytest.mark.skipif(
    BACKEND == "torch", reason="there unseeded dropout draws from Torch's global generator"
)
@pytest.mark.parametrize("ways", [{"execution": "loop"}, {"remat": 2, "unroll": 2}], ids=str)
def test_masks_are_those_of_single_units(ways):
    """The seeds are equal, and there are two steps, so that a mask of another unit or
    another step would show.
    """
    stack = random_stack(3, RANDOM, **ways)
    units = [stack.unit(i) for i in range(3)]
    before = seed_states(stack)  # seeds of the two dropouts and of the stochastic depth
    assert [state.shape for state in before] == [(3, 2)] * 3
    assert len({tuple(row) for state in before for row in state}) == 9
    check_equal_to_chain(stack, units, harness.images(*IMAGES), steps=2)
    for state, old, *own in zip(seed_states(stack), before, *map(seed_states, units), strict=True):
        assert not (state == old).all(1).any()
        np.testing.assert_array_equal(state, own)
    state = seed_states(stack)
    stack(harness.images(*IMAGES), training=False)
    np.testing.assert_array_equal(seed_states(stack), state)


@pytest.mark.backend
@pytest.mark.skipif(BACKEND != "torch", reason="the masks under remat are compared above")
def test_the_recomputation_has_the_masks_of_the_forward_pass():
    x = harness.images(*IMAGES)
    plain = random_stack(3, RANDOM)
    again = random_stack(3, RANDOM, remat=2)
    again.load_units([plain.unit(i) for i in range(3)])
    results = []
    for stack in (plain, again):
        keras.utils.set_random_seed(7)  # the global generator, for Torch
        y, on_x, on_weights = harness.step_of(stack, draw_cotangent(x))(x)
        results.append([y, on_x, *on_weights.values()])
    for got, want in zip(*results, strict=True):
        harness.close(got, want)


@pytest.mark.backend
def test_stochastic_depth():
    """F is 1: each example gets 0 or `1 / (1 - rate)` of it, on average 1."""
    rates = [0.0, 0.25, 0.6]
    ones = {"use_bias": True, "kernel_initializer": "zeros", "bias_initializer": "ones"}
    unit = kp.ResidualUnit(1, block="dense", stochastic_depth=0.6, **ones)
    stack = kp.UnitStack(unit, 3, stochastic_depth=rates, remat=2)
    x = np.zeros((4000, 1), "float32")
    outputs = harness.numpy(stack(x, return_outputs=True, training=True))
    added = np.diff(outputs[..., 0], axis=0, prepend=x[None, :, 0])
    kept = added > 0.5
    factors = 1 / (1 - np.array(rates)[:, None])
    np.testing.assert_allclose(added, np.where(kept, factors, 0), 1e-5, 1e-5)
    np.testing.assert_allclose((~kept).mean(1), rates, atol=0.05)
    assert abs(np.corrcoef(added[1], added[2])[0, 1]) < 0.1
    at_inference = harness.numpy(stack(x, return_outputs=True, training=False))
    np.testing.assert_array_equal(np.diff(at_inference[..., 0], axis=0, prepend=x[None, :, 0]), 1)
    assert [stack.unit(i).stochastic_depth for i in range(3)] == rates
    assert (unit.built, unit.stochastic_depth) == (False, 0.6)  # the template does not change


@pytest.mark.backend
def test_the_parts_of_units_without_a_shortcut():
    stack = random_stack(3, RANDOM | {"shortcut": "none"})
    trace = stack.trace(harness.images(*IMAGES))
    assert trace.shortcut is None
    harness.close(harness.numpy(trace.residual), harness.numpy(trace.sum), 1e-6)


# Initial values


@pytest.mark.parametrize(
    "initializer", [None, keras.initializers.HeNormal(seed=1)], ids=harness.label
)
def test_every_unit_starts_with_values_of_its_own(initializer):
    """Each slice has the standard deviation for its own fan."""
    kernel = {} if initializer is None else {"kernel_initializer": initializer}
    stack = kp.UnitStack(kp.ResidualUnit(32, block="bottleneck", **kernel), 3)
    stack.build((1, 4, 4, 128))
    weights = harness.weights(stack)
    slices = [row for path, value in weights.items() if path.endswith("kernel") for row in value]
    assert len({row.ravel()[0] for row in slices}) == len(slices) == 9
    for row in slices:
        fan = row.shape[0] ** 2 * (row.shape[3] if initializer is None else row.shape[2])
        np.testing.assert_allclose(row.std(), (2 / fan) ** 0.5, 0.06)
        assert abs(row.mean()) < 0.1 * row.std()
    for path, value in weights.items():
        if not path.endswith("kernel"):
            assert (value == path.endswith(("gamma", "variance"))).all(), path


class Scaled(keras.Layer):
    """A layer that makes its weight before it is built."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.scale = self.add_weight(shape=(4,), initializer="random_normal")

    def call(self, x):
        return x * self.scale


@pytest.mark.backend
def test_weights_made_before_the_build_have_values_of_their_own():
    """Building one stack initialises all variables that wait for it."""
    first, second = (kp.LayerStack(Scaled(), 3) for _ in range(2))
    first.build(VECTORS)
    second.build(VECTORS)
    for stack in (first, second):
        [value] = harness.weights(stack).values()
        assert len(np.unique(value)) == 12


@pytest.mark.backend
@pytest.mark.parametrize("group", [2, 100])
def test_seeded_units_start_as_those_that_at_makes(group, monkeypatch):
    monkeypatch.setattr(stacks, "GROUP", group)
    template = kp.ResidualUnit(
        4,
        kernel_initializer=keras.initializers.HeNormal(seed=1),
        use_bias=True,
        bias_initializer=keras.initializers.RandomNormal(seed=2),
        shortcut=kp.shortcuts.Conv1x1(kernel_initializer=keras.initializers.HeNormal(seed=3)),
        name="a_unit8",
    )
    stack = kp.UnitStack(template, 3)
    stack.build(IMAGES)
    for i, name in enumerate(["a_unit8", "a_unit9", "a_unit10"]):
        single = template.at(name)
        single.build(IMAGES)
        assert stack.unit(i).name == name
        for path, value in harness.weights(single).items():
            np.testing.assert_array_equal(harness.weights(stack)[path][i], value, path)


@pytest.mark.backend
def test_mixed_precision():
    x, stack = harness.images(*IMAGES), random_stack(3, RANDOM | {"dtype": "mixed_bfloat16"})
    before = harness.weights(stack)
    y, on_x, on_weights = harness.step_of(stack, draw_cotangent(x))(x)
    assert keras.backend.standardize_dtype(stack(x).dtype) == "bfloat16"
    assert {weight.dtype for weight in stack.weights} == {"float32"}
    for path, value in harness.weights(stack).items():
        assert np.array_equal(value, before[path]) != ("moving_" in path)
    for value in (y, on_x, *on_weights.values(), *stack.get_weights()):
        assert np.isfinite(value.astype("float32")).all()
    plain = random_stack(3, RANDOM)
    plain.set_weights(stack.get_weights())
    want, got = (harness.numpy(each(x)) for each in (plain, stack))
    assert 0 < np.abs(got - want).max() < 0.1 * np.abs(want).max()


# Errors


def built(**options):
    unit = harness.unit_of(4, **options)
    unit.build(IMAGES)
    return unit


def stack(depth=3, **options):
    return kp.UnitStack(kp.ResidualUnit(4), depth, **options)


def stack_units(*units, **options):
    """Stack a plain unit with other units, or with one that has `options`."""
    return kp.UnitStack.from_units([built(), *(units or [built(**options)])])


def decayed(**options):
    return kp.UnitStack(kp.ResidualUnit(4, shortcut="decayed_identity"), 3, **options)


def other_factors():
    stack = decayed(shortcut_factors=[0.5] * 3)
    stack.build(IMAGES)
    stack.load_units([built(shortcut=kp.shortcuts.DecayedIdentity(factor=0.9))] * 3)


def partly_frozen():
    units = [built(), built(), built()]
    units[1].trainable = False
    return kp.UnitStack.from_units(units)


WRONG = [
    (lambda: stack(0), "depth=0"),
    (lambda: stack(execution="while"), "'while'"),
    (lambda: stack(remat=0), "remat=0"),
    (lambda: stack(unroll=0), "unroll=0"),
    (lambda: kp.UnitStack(kp.ResidualUnit(4, strides=2), 3), "strides=2"),
    (lambda: stack().build((2, 5, 4, 3)), "keep the shape"),
    (lambda: stack()(np.zeros((2, 4), "float32")), "(batch, height, width, channels)"),
    (lambda: kp.UnitStack(keras.layers.Dense(4), 3), "Dense"),
    (lambda: stack(stochastic_depth=[0.1, 0.2]), "2 rates"),
    (lambda: stack(2, stochastic_depth=[0.1, 1.0]), "[0, 1)"),
    (lambda: kp.UnitStack.from_units([]), "at least one unit"),
    (lambda: stack_units(kp.ResidualUnit(4)), "built=False"),
    (lambda: stack_units(keras.layers.Dense(4)), "must be built"),
    (lambda: stack_units(arrangement="original"), "arrangement="),
    (lambda: stack_units(shortcut="conv1x1"), "shortcut="),
    (lambda: stack_units(activation="gelu"), "'relu' and 'gelu'"),
    (lambda: stack_units(normalization="layer"), "'batch' and 'layer'"),
    (lambda: stack_units(dtype="mixed_bfloat16"), "dtype="),
    (lambda: stack_units(stochastic_depth=0.1), "stochastic_depth="),
    (lambda: stack(shortcut_factors=[0.5] * 3), "a shortcut whose factor differs"),
    (lambda: decayed(shortcut_factors=[0.5, 0.4]), "2 factors"),
    (lambda: decayed().build(IMAGES), "a UnitStack `shortcut_factors`"),
    (lambda: other_factors(), "units with [0.9, 0.9, 0.9], a stack with [0.5, 0.5, 0.5]"),
    (partly_frozen, "Freeze all units of a stack, or none"),
    (lambda: stack().unit(0), "built"),
    (lambda: kp.LayerStack(keras.layers.MultiHeadAttention(2, 4), 3), "takes query, value"),
    (
        lambda: kp.LayerStack.from_units([keras.layers.MaxPooling2D()]),
        "turns (None, 8, 8, 8) into (None, 4, 4, 8)",
    ),
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_arguments(call, words):
    assert words in harness.error_of(call)


@pytest.mark.backend
def test_scan_where_there_is_none():
    if BACKEND == "torch":
        assert "no scan on torch" in harness.error_of(lambda: stack(execution="scan"))
    else:
        assert stack(execution="scan").execution == "scan"


@pytest.mark.parametrize(
    ("options", "words"),
    [([{}, {}], "3 units"), ([{}, {}, {"use_bias": True}], "use_bias=False and True")],
    ids=["number", "bias"],
)
def test_units_that_do_not_fit_leave_the_stack_as_it_is(options, words):
    made = random_stack(3)
    before = made.get_weights()
    assert words in harness.error_of(lambda: made.load_units([built(**each) for each in options]))
    for value, old in zip(made.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)
    with pytest.raises(IndexError, match=r"3 units\. Received: unit\(-4\)"):
        made.unit(-4)


class Subclassed(keras.Model):
    """Builds its stack at the first call."""

    def __init__(self):
        super().__init__()
        initializer = kp.initializers.released_he(seed=3)
        unit = kp.ResidualUnit(4, kernel_initializer=initializer, dropout=0.2, name="unit1")
        self.stack = kp.UnitStack(unit, depth=3)
        self.dense = keras.layers.Dense(2)

    def call(self, x, training=None):
        return self.dense(keras.ops.mean(self.stack(x, training=training), (1, 2)))


@pytest.mark.backend
def test_fit_builds_a_subclassed_model():
    """Keras first infers the shapes of its layers; on JAX, the code that makes their weights
    is then traced.
    """
    model, built = Subclassed(), Subclassed()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(harness.images(*IMAGES), np.zeros((3, 2)), verbose=0)
    built.stack.build((None, *IMAGES[1:]))
    for weight, its in zip(model.stack.weights, built.stack.weights, strict=True):
        if "moving" not in weight.path:
            np.testing.assert_array_equal(harness.numpy(weight), harness.numpy(its), weight.path)


class Mean(keras.layers.Layer):
    """Adds a dense function of the mean over the tokens that the mask keeps."""

    def __init__(self, **options):
        super().__init__(**options)
        self.supports_masking = True
        self.dense = keras.layers.Dense(4)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x, mask=None):
        mask = keras.ops.ones(x.shape[:2]) if mask is None else mask
        kept = keras.ops.cast(mask, x.dtype)[..., None]
        mean = keras.ops.sum(x * kept, 1, keepdims=True) / keras.ops.sum(kept, 1, keepdims=True)
        return x + self.dense(mean)


class Longer(Mean):
    """Has a mask of its own."""

    def compute_mask(self, inputs, previous_mask):
        return None if previous_mask is None else keras.ops.logical_not(previous_mask)


@pytest.mark.backend
@pytest.mark.parametrize("ways", [{"execution": "loop"}, {}, {"remat": 2}], ids=str)
def test_every_unit_gets_the_mask(ways):
    tokens = np.array([[1, 2, 0, 0], [3, 1, 2, 0]])
    embedding = keras.layers.Embedding(5, 4, mask_zero=True)
    units = [Mean(name=f"unit{i}") for i in (1, 2, 3)]
    inputs = keras.Input((4,), dtype="int32")
    x = embedding(inputs)
    for unit in units:
        x = unit(x)
    chain = keras.Model(inputs, x)
    harness.randomize(chain)
    stack = kp.LayerStack.from_units(units, **ways)
    model = keras.Model(inputs, stack(embedding(inputs)))
    harness.close(harness.numpy(model(tokens)), harness.numpy(chain(tokens)))
    harness.close(model.predict(tokens, verbose=0), chain.predict(tokens, verbose=0))
    given = harness.numpy(stack(embedding(tokens), mask=tokens > 0))
    harness.close(given, harness.numpy(chain(tokens)))
    other = kp.LayerStack(Longer(), 2)
    other.build((None, 4, 4))
    assert "must keep the mask" in harness.error_of(lambda: other(embedding(tokens)))


# Layers of Keras


def functional():
    inputs = keras.Input((6, 8))
    inner = keras.layers.Dense(8, activation="relu")(inputs)
    return keras.Model(inputs, keras.layers.Add()([inputs, keras.layers.Dense(8)(inner)]))


class WithDense(keras.layers.Layer):
    """Has no `build`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(8)

    def call(self, x):
        return self.dense(x)


LAYERS = {
    "Activation": lambda: keras.layers.Activation("tanh"),
    "Bidirectional": lambda: keras.layers.Bidirectional(
        keras.layers.SimpleRNN(4, return_sequences=True)
    ),
    "Dropout": lambda: keras.layers.Dropout(0.5),
    "GaussianNoise": lambda: keras.layers.GaussianNoise(0.5),
    "PReLU": lambda: keras.layers.PReLU(),
    "Sequential": lambda: keras.Sequential([keras.layers.Dense(16), keras.layers.Dense(8)]),
    "SpatialDropout1D": lambda: keras.layers.SpatialDropout1D(0.5),
    "TimeDistributed": lambda: keras.layers.TimeDistributed(keras.layers.Dense(8)),
    "functional": functional,
    "no build": WithDense,
}


@pytest.mark.backend
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("ways", [{}, {"remat": 2}], ids=str)
def test_layers_of_keras(make, ways):
    units = [make() for _ in range(3)]
    x = y = harness.images(2, 6, 8)
    for i, unit in enumerate(units):
        unit(x)
        harness.randomize(unit, i)
        y = unit(y)
    stack = kp.LayerStack.from_units(units, **ways)
    harness.close(harness.numpy(stack(x)), harness.numpy(y), 1e-5)
    harness.close(harness.numpy(stack.unit(1)(x)), harness.numpy(units[1](x)), 1e-5)
    assert stack(x, training=True).shape == x.shape


@pytest.mark.backend
@pytest.mark.parametrize(
    "regularizer",
    [keras.regularizers.L2(0.1), keras.regularizers.OrthogonalRegularizer(0.1)],
    ids=lambda regularizer: type(regularizer).__name__,
)
def test_regularizers_are_summed_over_the_units(regularizer):
    stack = kp.LayerStack(keras.layers.Dense(4, kernel_regularizer=regularizer), 3)
    stack.build((2, 4))
    want = sum(harness.numpy(regularizer(stack.unit(i).kernel)) for i in range(3))
    harness.close(harness.numpy(sum(stack.losses)), want, 1e-5)
