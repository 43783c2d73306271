"""Mean-field theory against closed forms, the published constants, itself, and wide
networks.
"""

import math

import keras
import numpy as np
import pytest
from keras import ops

import keras_preact as kp
from keras_preact.analysis import mean_field
from keras_preact.analysis.mean_field import MeanField
from keras_preact.backend import autodiff
from tests.keras_preact import harness


@pytest.mark.parametrize("name", mean_field.ACTIVATIONS)
def test_the_table_of_activations(name):
    """Derivatives by differences away from the kinks, integrals by a midpoint sum over 8
    standard deviations.
    """
    function, derivative = mean_field.ACTIVATIONS[name]
    x = np.linspace(-6, 6, 1201) + 0.0031
    differences = (function(x + 1e-6) - function(x - 1e-6)) / 2e-6
    np.testing.assert_allclose(derivative(x), differences, atol=1e-6)
    z = (np.arange(-4000, 4000) + 0.5) / 500
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) / 500
    u, field = math.sqrt(20.0) * z, MeanField(name)
    np.testing.assert_allclose(field.q_map(20.0), density @ function(u) ** 2, rtol=1e-5)
    np.testing.assert_allclose(field.chi(20.0), density @ derivative(u) ** 2, rtol=1e-3)
    options = {"approximate": False} if name == "gelu" else {}
    y = harness.numpy(keras.activations.get(name)(ops.convert_to_tensor(x, "float32"), **options))
    harness.close(y, function(x), 1e-4)


def test_critical_constants():
    """tanh: 1 without biases (arXiv 1606.05340); near (1.05, 2.01e-5) with (arXiv
    1806.05393); ReLU: He's 2.
    """
    for name, bias_variance, want, tolerance in (
        ("tanh", 0.0, 1.0, 1e-5),
        ("relu", 0.0, 2.0, 1e-9),
        ("tanh", 2.01e-5, 1.05, 5e-3),
    ):
        found = mean_field.critical_weight_variance(name, bias_variance)
        np.testing.assert_allclose(found, want, atol=tolerance)
    vanilla = kp.models.vanilla
    published = MeanField("tanh", vanilla.WEIGHT_VARIANCE, vanilla.BIAS_VARIANCE)
    assert abs(published.chi(published.q_star) - 1) < 2e-5


@pytest.mark.parametrize(
    ("field", "q_star", "phase", "xi"),
    [
        # q_star = sigma_b^2 / (1 - sigma_w^2 / 2), chi = sigma_w^2 / 2
        (MeanField("relu", 1.5, 0.2), 0.8, "ordered", 1 / math.log(4 / 3)),
        (MeanField("relu", 2.0), 1.0, "critical", math.inf),
        (MeanField("relu", 2.5, 0.1), math.inf, "chaotic", 1 / math.log(5 / 4)),
        (MeanField("relu", 0.5), 0.0, "ordered", 1 / math.log(4)),
        (MeanField("relu", 0.0), 0.0, "ordered", 0.0),
        (MeanField("tanh", 1.0), 0.0, "critical", math.inf),
        (MeanField("relu", 1.5, 0.2, weights=2), 0.8, "ordered", 0.5 / math.log(4 / 3)),
    ],
    ids=lambda value: harness.label(value).partition(", shortcut")[0],
)
def test_fixed_points_phases_and_depth_scales(field, q_star, phase, xi):
    np.testing.assert_allclose(field.q_star, q_star, rtol=1e-4, atol=1e-9)
    assert field.phase == phase
    np.testing.assert_allclose(field.xi, xi, rtol=1e-9)


def test_residual_relu_grows_as_a_power():
    """F alone has chi 1 (He): lengths and gradients double in each unit, or grow by e
    over all with DepthScaledHe's factor.
    """
    field = MeanField("relu", 2.0, shortcut="identity")
    np.testing.assert_allclose(field.lengths(0.5, 10), 0.5 * 2.0 ** np.arange(11), rtol=1e-9)
    np.testing.assert_allclose(field.gradients(0.5, 10), 2.0 ** np.arange(10, -1, -1), rtol=1e-9)
    scaled = MeanField("relu", 2.0, shortcut="identity", weights=2, branch_factor=1 / 100)
    np.testing.assert_allclose(scaled.lengths(0.5, 100)[-1], 0.5 * 1.01**100, rtol=1e-9)
    np.testing.assert_allclose(scaled.gradients(0.5, 100)[0], 1.01**100, rtol=1e-9)
    assert field.q_star == math.inf


@pytest.mark.parametrize("weights", [1, 2])
def test_batch_normalisation_in_closed_form(weights):
    """ReLU: E phi'^2 = 1/2 and Var phi = 1/2 - 1 / 2 pi; q_l = q_0 + l V, and gradients
    are a quotient of Gamma functions.
    """
    growth = (math.pi / (math.pi - 1)) ** weights
    variance = 2 * (0.5 - 0.5 / math.pi)
    field = MeanField("relu", 2.0, 0.7, shortcut="identity", normalization="batch", weights=weights)
    np.testing.assert_allclose(field.lengths(1.0, 20), 1.0 + variance * np.arange(21), rtol=1e-10)
    start, depth = 1 / variance, 60

    def log_of_factors(i):  # sum over j < i of log((j + start + growth) / (j + start))
        return math.lgamma(i + start + growth) - math.lgamma(i + start)

    want = [math.exp(log_of_factors(depth) - log_of_factors(i)) for i in range(depth + 1)]
    np.testing.assert_allclose(field.gradients(1.0, depth), want, rtol=1e-9)


WIDTH, BATCH, DEPTH, SEEDS = 400, 256, 6, 3


def network(field, seed):
    """Units of two dense layers."""
    normal = keras.initializers.RandomNormal
    options = {
        "kernel_initializer": normal(stddev=(field.weight_variance / WIDTH) ** 0.5, seed=seed),
        "bias_initializer": normal(stddev=field.bias_variance**0.5, seed=seed),
        **{name: getattr(field, name) for name in ("shortcut", "normalization", "activation")},
    }
    units = []
    for i in range(DEPTH):
        unit = kp.ResidualUnit(WIDTH, block="dense", use_bias=True, **options).at(f"unit{i}")
        unit.build((None, WIDTH))
        for path, weight in zip(harness.paths(unit), unit.weights, strict=True):
            if path.startswith("branch/dense_2"):
                weight.assign(weight.value * field.branch_factor**0.5)
        units.append(unit)
    return units


def measure(field, seed):
    """Lengths and squared gradient norms at x_0 ... x_L of one network."""
    rng = np.random.default_rng(seed)
    outputs, pulls = [ops.convert_to_tensor(rng.normal(size=(BATCH, WIDTH)), "float32")], []
    for unit in network(field, seed):
        y, pull = autodiff.vjp(lambda x, unit=unit: unit(x, training=True), outputs[-1])
        outputs.append(y)
        pulls.append(pull)
    gradients = [ops.convert_to_tensor(rng.normal(size=(BATCH, WIDTH)), "float32")]
    for pull in reversed(pulls):
        gradients.append(pull(gradients[-1]))
    norms = np.array([float(ops.sum(gradient**2)) for gradient in reversed(gradients)])
    x = np.stack([ops.convert_to_numpy(output) for output in outputs]).astype("float64")
    lengths = x.var(1).mean(-1) if field.normalization == "batch" else (x**2).mean((1, 2))
    return lengths, norms / norms[-1]


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        (("tanh", 1.5, 0.1, "none", "none", 1.0), 0.2),
        (("silu", 2.5, 0.2, "identity", "none", 0.2), 0.1),
        (("relu", 2.0, 0.0, "none", "batch", 1.0), 0.1),
        pytest.param(("tanh", 1.5, 0.3, "identity", "batch", 1.0), 0.1, marks=pytest.mark.backend),
    ],
    ids=harness.label,
)
def test_wide_networks(settings, tolerance):
    """Within three standard deviations.

    The squared norm of a wide layer's output scatters by `sqrt(a / width)` of itself,
    where `1 + a` is the kurtosis of phi: by sqrt(5 / 400) for ReLU, about sqrt(0.5 /
    400) for tanh. Over 12 plain layers and 3 networks that is 0.07 for tanh; with a
    shortcut that keeps half of the length, half of it a unit, 0.11 for ReLU. Batch
    normalisation removes a layer's scatter, and adds errors of the order of 1 / batch.
    """
    field = MeanField(*settings[:5], weights=2, branch_factor=settings[5])
    found = [measure(field, seed) for seed in range(SEEDS)]
    lengths, norms = np.mean(np.array(found), axis=0)
    np.testing.assert_allclose(lengths, field.lengths(1.0, DEPTH), rtol=tolerance)
    np.testing.assert_allclose(norms, field.gradients(1.0, DEPTH), rtol=tolerance)


@pytest.mark.parametrize("c", [-1, -0.7, 0.0, 0.3, 0.999, 1 - 1e-12, 1])
def test_correlation_map_in_closed_form(c):
    """ReLU: the arc-cosine kernels of orders 1 and 0 (Cho and Saul, arXiv 1112.3712), with
    their kinks at every c; linear: u v itself. Two weights are two units.
    """
    angle = math.acos(c)
    order_1 = (math.sin(angle) + (math.pi - angle) * c) / math.pi  # 2 E[phi(u) phi(v)] / q
    biased = MeanField("relu", 1.5, 0.2)
    for q in (1e-4, 0.8, 3e3):
        want = (0.75 * q * order_1 + 0.2) / (0.75 * q + 0.2)
        np.testing.assert_allclose(biased.correlation_map(c, q), want, rtol=1e-12)
        linear = MeanField("linear", 0.5, 0.2, shortcut="identity", branch_factor=0.3)
        want = (c * q + 0.3 * (0.5 * c * q + 0.2)) / (q + 0.3 * (0.5 * q + 0.2))
        np.testing.assert_allclose(linear.correlation_map(c, q), want, rtol=1e-12, atol=1e-12)
    he = MeanField("relu", 2.0, shortcut="identity")
    np.testing.assert_allclose(he.correlation_map(c, 7.0), (c + order_1) / 2, atol=1e-12)
    slope = mean_field._mean_product(mean_field.ACTIVATIONS["relu"][1], 5.0, c)
    np.testing.assert_allclose(slope, (math.pi - angle) / (2 * math.pi), atol=1e-12)
    two = MeanField("relu", 1.5, 0.2, weights=2)
    np.testing.assert_allclose(two.correlation_map(c, 0.8), biased.correlations(c, 2)[-1])


@pytest.mark.parametrize("name", mean_field.ACTIVATIONS)
def test_means_of_products(name):
    """A midpoint sum over 8 standard deviations, for u and v by another rotation than the
    code's. It is exact but for kinks.
    """
    z = (np.arange(-160, 160) + 0.5) / 20
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) / 20
    atol = 0.02 if name == "relu" else 1e-9
    for c in (-0.4, 0.9):
        along, across = math.sqrt(3 * (1 + c)) * z[:, None], math.sqrt(3 * (1 - c)) * z
        for function in mean_field.ACTIVATIONS[name]:
            want = density @ (function(along + across) * function(along - across)) @ density
            found = mean_field._mean_product(function, 6.0, c)
            np.testing.assert_allclose(found, want, atol=atol, rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "c_star"),
    [
        (MeanField("tanh", 1.2, 0.3), 1.0),
        (MeanField("linear", 0.7, 0.1), 1.0),
        (MeanField("relu", 1.5, 0.2), 1.0),
        (MeanField("relu", 2.0), 1.0),
        (MeanField("tanh", 2.5), 0.0),  # odd, without biases
        (MeanField("tanh", 2.5, 0.1), None),
        (MeanField("tanh", 1.761, 0.05), None),  # nearly critical
        (MeanField("tanh", 6.0, 0.2, weights=2, branch_factor=0.5), None),
    ],
    ids=harness.label,
)
def test_the_fixed_point_of_the_correlation_map(field, c_star):
    """Correlations converge to it: the slope of the map there is at most 1."""
    found = field.c_star
    if c_star is None:
        assert field.phase == "chaotic"
        assert 0 < found < 1
    else:
        assert found == c_star
    np.testing.assert_allclose(field.correlation_map(found), found, atol=1e-12)
    slope = (field.correlation_map(found) - field.correlation_map(found - 1e-7)) / 1e-7
    np.testing.assert_allclose(field.chi_star, slope, rtol=1e-3)
    assert field.chi_star < 1 + 1e-12
    if found == 1:
        np.testing.assert_allclose(field.chi_star, field.chi(field.q_star), rtol=1e-12)


@pytest.mark.parametrize(
    ("field", "q"),
    [
        (MeanField("tanh", 1.2, 0.3), 0.3),  # ordered
        (MeanField("tanh", 2.5, 0.1), None),  # chaotic
        (MeanField("relu", 2.0), 0.7),
        (MeanField("silu", 2.5, 0.2, weights=2), 2.0),
        (MeanField("relu", 1.5, 0.2, shortcut="identity", branch_factor=0.5), 0.7),
    ],
    ids=harness.label,
)
def test_correlations_in_wide_networks(field, q):
    """32 pairs of inputs through networks of 1500 features. A correlation scatters by
    `(1 - c^2) / sqrt(1500)` a layer, 0.02; the mean of the pairs and networks by less.
    """
    width, pairs, depth, c = 1500, 32, 5, 0.4
    found, phi = [], mean_field.ACTIVATIONS[field.activation][0]
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        basis = np.linalg.qr(rng.normal(size=(width, 2 * pairs)))[0].T
        first, second = np.split(basis * math.sqrt(width * (q or field.q_star)), 2)
        x = np.stack([first, c * first + math.sqrt(1 - c**2) * second]).astype("float32")
        for _ in range(depth + 1):
            products = np.mean(x[0] * x[1], axis=-1)
            lengths = np.mean(x**2, axis=-1)
            found.append(np.mean(products / np.sqrt(lengths[0] * lengths[1])))
            y = x
            for _ in range(field.weights):
                kernel = rng.standard_normal((width, width), "float32")
                bias = rng.standard_normal(width, "float32")
                y = phi(y) @ kernel * (field.weight_variance / width) ** 0.5
                y = y + bias * field.bias_variance**0.5
            x = (field.shortcut == "identity") * x + field.branch_factor**0.5 * y
    means = np.mean(np.reshape(found, (SEEDS, depth + 1)), axis=0)
    np.testing.assert_allclose(means, field.correlations(c, depth, q), rtol=0.02)


def test_what_has_no_correlations():
    he = MeanField("relu", 2.0, shortcut="identity")
    assert "The lengths of this network converge to inf" in harness.error_of(
        lambda: he.correlation_map(0.5)
    )
    assert "plain networks" in harness.error_of(lambda: he.c_star)
    assert "Received: the length 0.0" in harness.error_of(lambda: MeanField("tanh", 0.5).c_star)
    assert "the length inf" in harness.error_of(lambda: MeanField("relu", 2.5, 0.1).chi_star)
    batch = MeanField("relu", 2.0, shortcut="identity", normalization="batch")
    assert "without normalisation" in harness.error_of(lambda: batch.correlations(0.5, 3, 1.0))
    for c in (-1.1, 2, float("nan"), "1"):
        assert "from -1 to 1" in harness.error_of(lambda c=c: he.correlation_map(c, 1.0))
