"""Initial weights: the released code's He initialisation; all weights differ and are
reproducible from a seed; the bias of gates.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.initializers import (
    DeepNorm,
    DeltaOrthogonal,
    DepthScaledHe,
    Fixup,
    released_he,
)
from tests.keras_preact import harness
from tests.keras_preact.harness import kernels


@pytest.mark.backend
def test_released_he_is_plain_normal_with_fan_out():
    kernel = harness.numpy(released_he(seed=0)((3, 3, 32, 128)))
    deviation = np.sqrt(2 / (3 * 3 * 128))  # fan_in would make it twice as wide
    np.testing.assert_allclose(kernel.std(), deviation, 0.02)
    assert abs(kernel.mean()) < deviation / 50
    # a normal distribution has 4.55 % beyond two standard deviations; Keras' truncated normal
    # distribution ends at 2.27
    np.testing.assert_allclose((np.abs(kernel) > 2 * deviation).mean(), 0.0455, 0.1)
    assert np.abs(kernel).max() > 3.5 * deviation


def he(kernel) -> float:
    """The standard deviation of He's initialisation with the fan-out."""
    return np.sqrt(2 / (np.prod(kernel.shape[:-2]) * kernel.shape[-1]))


def check_deviations(layer, factor):
    """Check that each kernel's deviation is `factor(path)` times He's."""
    for path, kernel in kernels(layer).items():
        expected = factor(path) * he(kernel)
        np.testing.assert_allclose(kernel.std(), expected, 4 / np.sqrt(kernel.size), err_msg=path)


def test_kernels_of_a_network():
    """Convolutions have He's initialisation with fan_out. The classifier has Torch's
    uniform distribution, and a bias of zero. gamma is 1, beta 0, moving mean 0, moving
    variance 1.
    """
    model = kp.models.resnet_cifar(11, input_shape=(8, 8, 3), use_bias=True)
    weights = harness.weights(model)
    classifier = weights["head_classifier/kernel"]
    limit = 1 / np.sqrt(256)
    assert 0.98 * limit < np.abs(classifier).max() <= limit
    of_classifier = limit / np.sqrt(3) / he(classifier)
    check_deviations(model, lambda path: of_classifier if "classifier" in path else 1)
    start = {"gamma": 1, "beta": 0, "moving_mean": 0, "moving_variance": 1, "bias": 0}
    for path in weights.keys() - kernels(model).keys():
        value = start[path.rsplit("/", 1)[1]]
        np.testing.assert_array_equal(weights[path], np.full_like(weights[path], value), path)


SEEDED = keras.initializers.HeNormal(seed=1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernel_initializer": "he_normal"},
        {"kernel_initializer": SEEDED},
        {"kernel_initializer": keras.initializers.HeNormal(seed=keras.random.SeedGenerator(1))},
        {"shortcut": kp.shortcuts.ExclusiveGating(kernel_initializer=SEEDED)},
    ],
    ids=["default", "name", "seed", "seed generator", "shortcut"],
)
def test_no_two_kernels_start_alike(options):
    options = {"shortcut": "exclusive_gating", "width_factor": 0.25} | options
    model = kp.models.resnet_cifar(14, **options)
    harness.check_distinct(kernels(model))


def seeded(seed):
    return {"kernel_initializer": keras.initializers.HeNormal(seed=seed)}


def unseeded(seed):
    keras.utils.set_random_seed(seed)
    return {}


@pytest.mark.parametrize("options", [seeded, unseeded])
def test_a_seed_reproduces_a_network(options):
    """The seed is the initialiser's, or the global seed."""
    one, same, other = (
        kernels(kp.models.resnet_cifar(8, width_factor=0.25, **options(seed))) for seed in (1, 1, 2)
    )
    for path, kernel in one.items():
        np.testing.assert_array_equal(kernel, same[path], path)
        assert not np.array_equal(kernel, other[path]), path


@pytest.mark.parametrize(
    ("options", "bias"),
    [
        ({"shortcut": "exclusive_gating"}, -6),
        ({"shortcut": "shortcut_only_gating", "gate_bias": -7.0}, -7),
        ({"shortcut": kp.shortcuts.ExclusiveGating(bias=-3)}, -3),
        ({"shortcut": kp.shortcuts.ExclusiveGating(bias=-3), "gate_bias": 0}, 0),
    ],
    ids=harness.label,
)
def test_gate_bias_at_the_start(options, bias):
    unit = harness.unit_of(4, **options)
    unit.build((2, 6, 6, 4))
    np.testing.assert_array_equal(harness.weights(unit)["gate/conv/bias"], np.full(4, bias))


@pytest.mark.backend
def test_a_shortcut_has_its_own_initialiser_and_masks():
    shortcut = kp.shortcuts.Conv1x1(kernel_initializer="ones")
    unit = kp.ResidualUnit(4, shortcut=shortcut, kernel_initializer="zeros")
    unit.build((2, 5, 5, 4))
    assert [value.mean() for value in kernels(unit).values()] == [0, 0, 1]
    dropout = kp.shortcuts.Dropout(0.5, seed=1)
    template = kp.ResidualUnit(4, shortcut=dropout, kernel_initializer="zeros")
    x = np.ones((1, 16, 16, 4), "float32")
    one, other, again = (
        harness.numpy(template.at(name)(x, training=True)) for name in ("unit1", "unit2", "unit1")
    )
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal(one, again)


@pytest.mark.backend
@pytest.mark.parametrize(("inputs", "outputs", "size"), [(6, 6, 3), (3, 8, 5), (8, 3, 3)])
def test_delta_orthogonal(inputs, outputs, size):
    kernel = harness.numpy(DeltaOrthogonal(1.5, seed=1)((size, size, inputs, outputs)))
    centre = kernel[size // 2, size // 2].copy()
    kernel[size // 2, size // 2] = 0
    assert not kernel.any()
    gram = centre @ centre.T if inputs <= outputs else centre.T @ centre
    np.testing.assert_allclose(gram, 1.5**2 * np.eye(min(inputs, outputs)), atol=1e-5)


def test_delta_orthogonal_needs_a_centre():
    assert "must be odd" in harness.error_of(lambda: DeltaOrthogonal()((2, 2, 4, 4)))


@pytest.mark.parametrize(("block", "weights"), [("basic", 2), ("bottleneck", 3), ("dense", 2)])
def test_fixup(block, weights):
    """Every weight of a branch except the last has He's deviation times
    L^(-1 / (2m - 2)); the last is zero.
    """
    units = 50
    unit = kp.ResidualUnit(
        64 if block == "dense" else 32,
        block=block,
        kernel_initializer=Fixup(units),
        normalization="none",
    )
    unit.build((2, 64) if block == "dense" else (2, 5, 5, 16))

    def factor(path):
        if path.endswith(f"_{weights}/kernel"):
            return 0
        return units ** (-1 / (2 * weights - 2)) if path.startswith("branch") else 1

    check_deviations(unit, factor)


def test_depth_scaled_he():
    unit = kp.ResidualUnit(32, block="bottleneck", kernel_initializer=DepthScaledHe(100))
    unit.build((2, 5, 5, 16))
    check_deviations(unit, lambda path: 0.1 if "conv_3" in path else 1)


@pytest.mark.parametrize("initializer", [Fixup, DepthScaledHe, DeepNorm])
def test_a_unit_by_itself_does_not_know_the_depth(initializer):
    unit = kp.ResidualUnit(4, kernel_initializer=initializer())
    message = harness.error_of(lambda: unit.build((2, 5, 5, 4)))
    assert f"needs {initializer.__name__}(units=...)" in message
    assert "`units`" in harness.error_of(lambda: initializer(0))


@pytest.mark.parametrize("stacked", [False, True])
def test_fixup_network(stacked, tmp_path):
    """The classifier and the output of every branch start at zero."""
    model = kp.models.resnet_cifar(20, input_shape=(8, 8, 1), stacked=stacked, **kp.models.FIXUP)
    x = harness.images(4, 8, 8, 1)
    assert not harness.numpy(model(x)).any()
    first, *_, last = map(harness.numpy, keras.Model(model.input, model.unit_outputs[:3])(x))
    np.testing.assert_array_equal(first, last)
    kernel = kernels(kp.models.unstack(model))["stage3_unit2/branch/conv_1/kernel"]
    # 9 units, 2 weights per branch
    np.testing.assert_allclose(kernel.std(), he(kernel) / np.sqrt(9), rtol=0.05)
    model.save(tmp_path / "model.keras")
    assert keras.saving.load_model(tmp_path / "model.keras").get_config() == model.get_config()


def test_fixup_unit_against_its_formula():
    """`x + scale * W2 (relu(W1 (relu(x + a) + b) + c) + d)` for dense weights."""
    unit = kp.ResidualUnit(
        3, block="dense", arrangement=kp.arrangements.FIXUP, normalization="none"
    )
    x = harness.images(4, 3)
    unit.build(x.shape)
    harness.randomize(unit)
    w = harness.weights(unit)
    hidden = np.maximum(x + w["branch/shift_0/bias"], 0) + w["branch/shift_0_again/bias"]
    hidden = hidden @ w["branch/dense_1/kernel"] + w["branch/shift_1/bias"]
    hidden = np.maximum(hidden, 0) + w["branch/shift_1_again/bias"]
    expected = x + w["branch/scale_2/factor"] * (hidden @ w["branch/dense_2/kernel"])
    np.testing.assert_allclose(harness.numpy(unit(x)), expected, atol=1e-5)
