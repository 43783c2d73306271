"""The optimisers against their equations in NumPy. Muon has its own file."""

import math

import keras
import numpy as np
import pytest
from keras import ops

import keras_preact as kp
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

RATE, DECAY, STEPS = 0.1, 0.05, 4


def coupled(rate=RATE, momentum=0, coupled_weight_decay=DECAY, **options):
    return kp.optimizers.CoupledSGD(
        rate, momentum=momentum, coupled_weight_decay=coupled_weight_decay, **options
    )


def gradients():
    return np.random.default_rng(1).normal(size=(STEPS, 3, 2)).astype("float32")


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_update_is_the_papers(momentum, nesterov):
    variable = keras.Variable(np.ones((3, 2), "float32"))
    optimizer = coupled(momentum=momentum, nesterov=nesterov)
    w, v = np.ones((3, 2)), np.zeros((3, 2))
    for gradient in gradients():
        g = gradient.astype("float64") + DECAY * w
        v = momentum * v - RATE * g
        w = w + (momentum * v - RATE * g if nesterov else v)
        optimizer.apply([ops.convert_to_tensor(gradient)], [variable])
    np.testing.assert_allclose(harness.numpy(variable), w, rtol=1e-5)


PATHS = ("stem/kernel", "stem/bias", "norm_0/gamma", "norm_0/beta")


@pytest.mark.parametrize(
    ("words", "decayed"),
    [
        ((), PATHS),
        (("norm", "bias"), PATHS[:1]),
        (("beta", "stem"), PATHS[2:3]),
        ("norm", PATHS[:2]),  # one word, not its letters
    ],
)
def test_weights_with_a_word_in_their_path_are_not_decayed(words, decayed):
    variables = [harness.variable([1.0], path) for path in PATHS]
    coupled(exclude_from_decay=words).apply([ops.zeros(1)] * 4, variables)
    for variable in variables:
        wanted = 1 - RATE * DECAY if variable.path in decayed else 1.0
        np.testing.assert_allclose(harness.numpy(variable), [wanted], rtol=1e-7)


def adamw(g, m, v, t):
    """The new moments and the direction of the update, arXiv 1711.05101."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    return m, v, (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-7)


def lion(g, m, v, t):
    """The same, arXiv 2302.06675."""
    return 0.99 * m + 0.01 * g, v, np.sign(0.9 * m + 0.1 * g)


@pytest.mark.parametrize(("kind", "rule"), [("AdamW", adamw), ("Lion", lion)])
def test_decay_outside_the_gradient(kind, rule):
    ones = np.ones((3, 2), "float32")
    norm, kernel = harness.variable(ones, "norm_0/gamma"), harness.variable(ones)
    made = getattr(kp.optimizers, kind)(RATE, weight_decay=DECAY, exclude_from_decay=["norm"])
    optimizer = type(made).from_config(made.get_config())
    wanted = {variable.path: (np.ones((3, 2)), 0.0, 0.0) for variable in (kernel, norm)}
    for t, gradient in enumerate(gradients(), 1):
        for path, (w, m, v) in wanted.items():
            w = w - RATE * (0 if path == norm.path else DECAY) * w
            m, v, direction = rule(gradient.astype("float64"), m, v, t)
            wanted[path] = w - RATE * direction, m, v
        optimizer.apply([ops.convert_to_tensor(gradient)] * 2, [kernel, norm])
    for variable in (kernel, norm):
        want = wanted[variable.path][0]
        np.testing.assert_allclose(harness.numpy(variable), want, rtol=1e-4, atol=1e-5)


def linear(optimizer, steps):
    """Fit a kernel for `steps` batches of one row, and return the model. The gradient of a
    batch is its row, for every value of the kernel.
    """
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((2,)), dense])
    model.compile(optimizer, lambda y, outputs: outputs)
    zeros = np.zeros((steps, 1), "float32")
    model.fit(rows(steps), zeros, batch_size=1, shuffle=False, verbose=0)
    return model


def rows(steps):
    return np.random.default_rng(2).normal(size=(steps, 2)).astype("float32")


def recursion(parts, steps, rate, average_keeps):
    """The weights and their average after `steps`, in float64. There is one update per
    `parts` steps.
    """
    w, v, average = np.ones(2), np.zeros(2), None
    for update in range(steps // parts):
        g = rows(steps).astype("float64")[update * parts : (update + 1) * parts].mean(0) + DECAY * w
        v = 0.9 * v - rate(update) * g
        w = w + v
        average = w if average is None else average_keeps * average + (1 - average_keeps) * w
    return w, average


@pytest.mark.parametrize(("parts", "steps"), [(1, 5), (3, 11)])
def test_schedule_and_average_count_updates(parts, steps, tmp_path):
    """They count updates also if gradients are accumulated. 11 steps make three updates
    of 3 steps; the last two steps are in none.
    """
    rates = [0.3, 0.2, 0.05]
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], rates)
    options = {"momentum": 0.9, "gradient_accumulation_steps": parts if parts > 1 else None}
    w, average = recursion(parts, steps, lambda update: rates[min(update, 2)], 0.7)
    plain = linear(coupled(schedule, **options), steps)
    np.testing.assert_allclose(plain.get_weights()[0][:, 0], w, rtol=1e-5)
    # Keras puts the average into the weights at the end of fit
    optimizer = coupled(schedule, use_ema=True, ema_momentum=0.7, **options)
    averaging = linear(optimizer, steps)
    np.testing.assert_allclose(averaging.get_weights()[0][:, 0], average, rtol=1e-5)
    assert int(optimizer.iterations) == steps // parts
    averaging.compile(optimizer, "mse")
    averaging.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert isinstance(loaded, kp.optimizers.CoupledSGD)
    assert loaded.get_config() == optimizer.get_config()


def test_average_overwrites_the_weights():
    optimizer = coupled(1.0, 0, 0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
    variable = keras.Variable([0.0])
    seen = []
    for _ in range(4):
        optimizer.apply([-ops.ones(1)], [variable])
        seen.append(float(harness.numpy(variable)[0]))
    # 1; the average of 2 and 1; 2.5; the average of 3.5 and 2, where 2 is that of 2.5 and 1.5
    assert seen == [1.0, 1.5, 2.5, 2.75]


def test_no_update_leaves_the_weights():
    """If fit ends before the first update is complete, Keras puts zeros into the model."""
    model = linear(coupled(use_ema=True, gradient_accumulation_steps=3), 2)
    np.testing.assert_array_equal(model.get_weights()[0], [[1.0], [1.0]])


def test_averages_outlive_fit():
    """On JAX, steps donate their arrays: Keras' averages are deleted in an evaluation
    after fit.
    """
    model = linear(coupled(use_ema=True), 2)
    model.evaluate(rows(2), np.zeros((2, 1)), verbose=0)
    [average] = model.optimizer._model_variables_moving_average
    np.testing.assert_array_equal(harness.numpy(average), model.get_weights()[0])
    model.fit(rows(2), np.zeros((2, 1)), verbose=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_averages_of_all_dtypes(dtype):
    """The share of the new value, 0.001, is not rounded to the weights' precision:
    in bfloat16, 0.999 is 1.
    """
    optimizer = coupled(1.0, 0, 0, use_ema=True, ema_momentum=0.999)
    variable = keras.Variable([0.0], dtype=dtype)
    for step in range(2):
        optimizer.apply([ops.cast([-1024.0 * step], dtype)], [variable])
    [average] = optimizer._model_variables_moving_average
    assert average.dtype == dtype
    rounding = 4e-3 if dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(harness.numpy(average), [1.024], rtol=rounding)


def test_variables_that_are_not_weights_have_no_average():
    """The scales of float8 training are overwritten by their gradients. Keras has None in
    place of their averages.
    """
    optimizer = coupled(0.5, 0, 0, use_ema=True)
    weight, scale = keras.Variable([1.0]), keras.Variable([1.0])
    scale.overwrite_with_gradient = True
    optimizer.apply([ops.ones(1), ops.full((1,), 7.0)], [weight, scale])
    average, none = optimizer._model_variables_moving_average
    assert none is None
    assert [float(harness.numpy(each)[0]) for each in (weight, scale, average)] == [0.5, 7.0, 0.5]


def test_bad_arguments():
    build, accumulated = kp.optimizers.CoupledSGD, {"gradient_accumulation_steps": 2}
    for options, word in (
        ({"use_ema": True, "ema_overwrite_frequency": 5} | accumulated, "Received: 5 and 2"),
        ({"weight_decay": 1e-4}, "coupled_weight_decay"),
        ({"coupled_weight_decay": -1}, "not negative. Received: coupled_weight_decay=-1"),
        *(({"rate_factors": {"stem": bad}}, "['stem']") for bad in (-1, math.inf, "1", None)),
    ):
        assert word in harness.error_of(lambda options=options: build(**options))


# --- Words that name weights

OPTIMIZERS = {
    "CoupledSGD": kp.optimizers.CoupledSGD,
    "AdamW": kp.optimizers.AdamW,
    "Lion": kp.optimizers.Lion,
    "Muon": kp.optimizers.Muon,
}


def excluding(kind, *words):
    made = OPTIMIZERS[kind]()
    made.exclude_from_weight_decay(var_names=words)
    return made


#: Optimizers with a word that fits no weight of `PATHS`, and that word.
UNUSED = [
    *(
        (lambda kind=kind: OPTIMIZERS[kind](exclude_from_decay=["norm", "gama"]))
        for kind in OPTIMIZERS
    ),
    *((lambda kind=kind: excluding(kind, "bias", "gama")) for kind in OPTIMIZERS),
    lambda: kp.optimizers.CoupledSGD(rate_factors={"stem": 0.5, "gama": 0.5}),
    lambda: kp.optimizers.CoupledSGD(rate_factors={"gama": 0}),
    lambda: kp.optimizers.Muon(exclude_layers=["norm_0", "gama"]),
]


@pytest.mark.parametrize("make", UNUSED)
def test_a_word_that_fits_no_weight(make):
    variables = [harness.variable([1.0], path) for path in PATHS]
    message = harness.error_of(lambda: make().build(variables))
    assert "Received: 'gama' for stem/kernel, " in message
    assert "'norm" not in message


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_words_that_fit_and_none(kind):
    variables = [harness.variable([1.0], path) for path in PATHS]
    OPTIMIZERS[kind](exclude_from_decay=["norm"]).build(variables)
    excluding(kind, "bias", "gam+a").build(variables)
    OPTIMIZERS[kind](exclude_from_decay=["norm"]).build([])


@pytest.mark.backend
@pytest.mark.parametrize(
    "excluded",
    [{"var_names": ["bias", "beta"]}, {"var_names": "b[ei]"}, {"var_list": [1, 3]}],
    ids=str,
)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_that_keras_excludes_from_decay(kind, excluded):
    variables = [harness.variable([1.0], path) for path in PATHS]
    # Muon trains vectors by AdamW, whose decay is an option of its own
    names = {"CoupledSGD": "coupled_weight_decay", "Muon": "adam_weight_decay"}
    made = OPTIMIZERS[kind](RATE, **{names.get(kind, "weight_decay"): DECAY})
    if "var_list" in excluded:
        excluded = {"var_list": [variables[i] for i in excluded["var_list"]]}
    made.exclude_from_weight_decay(**excluded)
    made.apply([ops.zeros(1)] * 4, variables)
    values = [harness.numpy(variable)[0] for variable in variables]
    np.testing.assert_allclose(values, [1 - RATE * DECAY, 1, 1 - RATE * DECAY, 1], rtol=1e-6)


class Holder(keras.Model):
    def __init__(self):
        super().__init__(name="holder")
        self.stem = keras.layers.Dense(2, name="stem_dense")
        self.head = keras.layers.Dense(2, name="head")

    def build(self, shape):
        self.stem.build(shape)
        self.head.build((None, 2))

    def call(self, x):
        return self.head(self.stem(x))


def nested():
    inputs = keras.Input((2,))
    inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="stem_dense")])
    return keras.Model(inputs, keras.layers.Dense(2, name="head")(inner(inputs)))


def sequential():
    layers = [keras.layers.Dense(2, name="stem_dense"), keras.layers.Dense(2, name="head")]
    model = keras.Sequential(layers, name="sequential")
    model.build((None, 2))
    return model


def subclassed():
    model = Holder()
    model.build((None, 2))
    return model


@pytest.mark.backend
@pytest.mark.parametrize("make", [sequential, subclassed, nested])
def test_factors_of_layers_in_every_kind_of_model(make):
    model = make()
    before = [harness.numpy(weight) for weight in model.trainable_weights]
    optimizer = coupled(0.5, coupled_weight_decay=0, rate_factors={"stem": 0.25})
    gradients = [ops.ones(weight.shape) for weight in model.trainable_weights]
    optimizer.apply(gradients, model.trainable_weights)
    for weight, old in zip(model.trainable_weights, before, strict=True):
        factor = 0.25 if "stem_dense" in weight.path else 1.0
        np.testing.assert_allclose(old - harness.numpy(weight), 0.5 * factor, rtol=1e-5)


def test_muon_and_adamw_of_networks():
    """Muon trains no first and no last layer of any network."""
    networks = (
        kp.models.resnet_cifar(8, width_factor=0.125, input_shape=(8, 8, 1)),
        kp.models.dense_resnet(4, width=4, input_shape=(3,)),
        kp.models.transformer(1, width=4, num_heads=1, input_shape=(4, 4, 1)),
    )
    for model in networks:
        optimizer = kp.optimizers.Muon()
        optimizer.build(model.trainable_weights)
        one_word = kp.optimizers.Muon(exclude_layers="head_classifier")
        one_word.build(model.trainable_weights)
        by_adamw = [w.path for w in model.trainable_weights if one_word._should_use_adamw(w)]
        kernels = [path for path in by_adamw if path.endswith("kernel")]
        assert kernels == ["head_classifier/kernel"]
        by_muon = {w.path for w in model.trainable_weights if not optimizer._should_use_adamw(w)}
        assert by_muon
        assert not [path for path in by_muon if path.startswith(("stem", "head"))]
