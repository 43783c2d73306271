"""CoupledSGD against its equations in NumPy, and against Torch's SGD, which the
released code used.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp

pytestmark = pytest.mark.backend

RATE, DECAY, STEPS = 0.1, 0.05, 4


def gradients():
    return np.random.default_rng(1).normal(size=(STEPS, 3, 2)).astype("float32")


def keras_path(optimizer, start, name="kernel"):
    variable = keras.Variable(start, name=name)
    for gradient in gradients():
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
    return np.array(variable)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_update_is_the_papers(momentum, nesterov):
    start = np.ones((3, 2), "float32")
    w, v = start.astype("float64"), np.zeros((3, 2))
    for gradient in gradients().astype("float64"):
        g = gradient + DECAY * w
        v = momentum * v - RATE * g
        w = w + (momentum * v - RATE * g if nesterov else v)
    optimizer = kp.optimizers.CoupledSGD(
        RATE, momentum=momentum, nesterov=nesterov, coupled_weight_decay=DECAY
    )
    np.testing.assert_allclose(keras_path(optimizer, start), w, rtol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_equals_torch(nesterov):
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(3, 2))
    peer = torch.optim.SGD([weight], RATE, momentum=0.9, weight_decay=DECAY, nesterov=nesterov)
    for gradient in gradients():
        weight.grad = torch.tensor(gradient)
        peer.step()
    ours = kp.optimizers.CoupledSGD(RATE, nesterov=nesterov, coupled_weight_decay=DECAY)
    np.testing.assert_allclose(
        keras_path(ours, np.ones((3, 2), "float32")), weight.detach().numpy(), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("words", "decayed"),
    [
        ((), ["stem/kernel", "stem/bias", "norm_0/gamma", "norm_0/beta"]),
        (("norm",), ["stem/kernel", "stem/bias"]),
        (("norm", "bias"), ["stem/kernel"]),
        (("beta", "stem"), ["norm_0/gamma"]),
        (("kernels",), ["stem/kernel", "stem/bias", "norm_0/gamma", "norm_0/beta"]),
    ],
)
def test_weights_with_a_word_in_their_path_are_not_decayed(words, decayed):
    optimizer = kp.optimizers.CoupledSGD(
        RATE, momentum=0, coupled_weight_decay=DECAY, exclude_from_decay=words
    )
    variables = []
    for path in ("stem/kernel", "stem/bias", "norm_0/gamma", "norm_0/beta"):
        layer, name = path.split("/")
        with keras.name_scope(layer):
            variables.append(keras.Variable([1.0], name=name))
    optimizer.apply([keras.ops.zeros(1)] * 4, variables)
    for variable in variables:
        wanted = 1 - RATE * DECAY if variable.path in decayed else 1.0
        np.testing.assert_allclose(np.array(variable), [wanted], rtol=1e-7)


def test_decays_inside_fit_and_survives_saving(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = kp.optimizers.CoupledSGD(
        RATE, momentum=0, coupled_weight_decay=DECAY, exclude_from_decay=("norm",)
    )
    model.compile(optimizer, "mse")
    before = np.array(model.weights[0])
    # zero inputs: the gradient of the loss is 0, and decay alone moves the weights
    model.fit(
        np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32"), batch_size=2, epochs=3, verbose=0
    )
    np.testing.assert_allclose(
        np.array(model.weights[0]), before * (1 - RATE * DECAY) ** 6, rtol=1e-5
    )
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, kp.optimizers.CoupledSGD)
    assert loaded.optimizer.get_config() == optimizer.get_config()


def linear(optimizer, steps):
    """Fit a kernel for `steps` batches of one row; the gradient of each is its row,
    whatever the kernel. Return the kernel.
    """
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
    )
    model.compile(optimizer, lambda y, outputs: outputs)
    model.fit(
        rows(steps),
        np.zeros((steps, 1), "float32"),
        batch_size=1,
        epochs=1,
        shuffle=False,
        verbose=0,
    )
    return np.array(keras.ops.convert_to_numpy(model.weights[0].value))[:, 0]


def value_of(variable):
    return float(keras.ops.convert_to_numpy(variable.value)[0])


def rows(steps):
    return np.random.default_rng(2).normal(size=(steps, 2)).astype("float32")


def recursion(parts, steps, rate, average_keeps):
    """The weights and their average after as many `steps`: an update for each whole
    number of `parts`, in float64.
    """
    w, v, average = np.ones(2), np.zeros(2), None
    for update in range(steps // parts):
        g = rows(steps).astype("float64")[update * parts : (update + 1) * parts].mean(0) + DECAY * w
        v = 0.9 * v - rate(update) * g
        w = w + v
        average = w if average is None else average_keeps * average + (1 - average_keeps) * w
    return w, average


@pytest.mark.parametrize(("parts", "steps"), [(1, 5), (3, 11)])
def test_schedule_and_average_count_updates(parts, steps):
    """With accumulated gradients too; 11 steps of 3 parts leave two parts that no
    update has.
    """
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [0.3, 0.2, 0.05])

    def rate(update):
        return [0.3, 0.2, 0.05][min(update, 2)]

    options = {
        "coupled_weight_decay": DECAY,
        "gradient_accumulation_steps": parts if parts > 1 else None,
    }
    w, average = recursion(parts, steps, rate, 0.7)
    plain = linear(kp.optimizers.CoupledSGD(schedule, **options), steps)
    np.testing.assert_allclose(plain, w, rtol=1e-5)
    # Keras puts the average into the weights at the end of fit
    averaging = kp.optimizers.CoupledSGD(schedule, use_ema=True, ema_momentum=0.7, **options)
    np.testing.assert_allclose(linear(averaging, steps), average, rtol=1e-5)
    assert int(averaging.iterations) == steps // parts


def test_average_overwrites_the_weights():
    optimizer = kp.optimizers.CoupledSGD(
        1.0,
        momentum=0,
        coupled_weight_decay=0,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=2,
    )
    variable = keras.Variable([0.0])
    seen = []
    for _ in range(4):
        optimizer.apply([-keras.ops.ones(1)], [variable])
        seen.append(value_of(variable))
    # 1; 2, and its average with 1; 2.5; 3.5, and its average with 2, that of 2.5 and 1.5
    assert seen == [1.0, 1.5, 2.5, 2.75]


def test_no_update_leaves_the_weights():
    """Keras puts zeros into the model where fit ends before an update is whole."""
    optimizer = kp.optimizers.CoupledSGD(0.1, use_ema=True, gradient_accumulation_steps=3)
    np.testing.assert_array_equal(linear(optimizer, 2), [1.0, 1.0])


def test_averages_outlive_fit():
    """On JAX, steps give their arrays away: Keras' averages are gone in an evaluation
    after fit.
    """
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(kp.optimizers.CoupledSGD(0.1, use_ema=True), "mse")
    data = rows(4), np.ones((4, 1), "float32")
    model.fit(*data, verbose=0)
    model.evaluate(*data, verbose=0)
    averages = [
        keras.ops.convert_to_numpy(each.value)
        for each in model.optimizer._model_variables_moving_average
    ]
    np.testing.assert_array_equal(
        averages[0], keras.ops.convert_to_numpy(model.trainable_variables[0].value)
    )
    model.fit(*data, verbose=0)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", *(["float64"] if keras.backend.backend() != "jax" else [])]
)
def test_averages_of_all_dtypes(dtype):
    """The share of what is new, 0.001, is not rounded to the weights' precision: 0.999
    in bfloat16 is 1.
    """
    optimizer = kp.optimizers.CoupledSGD(
        1.0, momentum=0, coupled_weight_decay=0, use_ema=True, ema_momentum=0.999
    )
    variable = keras.Variable([0.0], dtype=dtype)
    for step in range(2):
        optimizer.apply([keras.ops.cast([-1024.0 * step], dtype)], [variable])
    [average] = optimizer._model_variables_moving_average
    assert average.dtype == dtype
    average = float(keras.ops.convert_to_numpy(keras.ops.cast(average.value, "float32"))[0])
    np.testing.assert_allclose(average, 1.024, rtol=4e-3 if dtype == "bfloat16" else 1e-6)


def test_variables_that_are_no_weights_have_no_average():
    """The scales of float8 training are overwritten by their gradients, and Keras keeps
    None for their average.
    """
    optimizer = kp.optimizers.CoupledSGD(0.5, momentum=0, coupled_weight_decay=0, use_ema=True)
    weight, scale = keras.Variable([1.0]), keras.Variable([1.0])
    scale.overwrite_with_gradient = True
    optimizer.apply([keras.ops.ones(1), keras.ops.full((1,), 7.0)], [weight, scale])
    average, none = optimizer._model_variables_moving_average
    assert none is None
    assert [value_of(v) for v in (weight, scale, average)] == [0.5, 7.0, 0.5]


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"is not for accumulated gradients.*Received: 5 and 2"):
        kp.optimizers.CoupledSGD(
            use_ema=True, ema_overwrite_frequency=5, gradient_accumulation_steps=2
        )
    with pytest.raises(ValueError, match=r"takes `coupled_weight_decay`"):
        kp.optimizers.CoupledSGD(weight_decay=1e-4)
    with pytest.raises(ValueError, match=r"must not be negative. Received: -1"):
        kp.optimizers.CoupledSGD(coupled_weight_decay=-1)
