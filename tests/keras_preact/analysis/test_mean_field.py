"""Mean-field theory against closed forms, the published constants, itself, and wide
networks.
"""

import math
import sys

import keras
import numpy as np
import pytest
from keras import ops

import keras_preact as kp
from keras_preact.analysis import mean_field
from keras_preact.analysis.mean_field import MeanField
from keras_preact.backend import autodiff
from tests.keras_preact import harness

LENGTHS = (1e-6, 1.0, 300.0)
CORRELATIONS = (-1.0, -0.4, 0.0, 0.3, 0.9, 0.999, 1.0)
NAMES = tuple(mean_field.ACTIVATIONS)


def relu_pair(c, q):
    """The arc-cosine kernels of orders 1 and 0 (arXiv 1606.05340; Cho and Saul, 2009)."""
    angle = math.acos(c)
    return q * (math.sqrt(1 - c**2) + c * (math.pi - angle)) / (2 * math.pi), (math.pi - angle) / (
        2 * math.pi
    )


def erf_pair(c, q):
    """The arcsine kernel (Williams, 1997), and its derivative by the covariance."""
    ratio = 2 * c * q / (1 + 2 * q)
    return 2 / math.pi * math.asin(ratio), 4 / math.pi / math.sqrt(
        (1 + 2 * q) ** 2 - (2 * c * q) ** 2
    )


def linear_pair(c, q):
    return c * q, 1.0


CLOSED_FORMS = {"relu": relu_pair, "erf": erf_pair, "linear": linear_pair}


@pytest.mark.parametrize("q", LENGTHS)
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms(name, q):
    field = MeanField(name, weight_variance=1.3, bias_variance=0.2)
    square, derivative = CLOSED_FORMS[name](1.0, q)
    np.testing.assert_allclose(field.q_map(q), 1.3 * square + 0.2, rtol=1e-10)
    np.testing.assert_allclose(field.chi(q), 1.3 * derivative, rtol=1e-10)
    for c in CORRELATIONS:
        product, derivative = CLOSED_FORMS[name](c, q)
        np.testing.assert_allclose(
            field.c_map(c, q), (1.3 * product + 0.2) / field.q_map(q), rtol=1e-8, atol=1e-10
        )
        np.testing.assert_allclose(
            field.slope(c, q), 1.3 * derivative * q / field.q_map(q), rtol=1e-6, atol=1e-10
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_activations(name):
    """Derivatives by differences away from the kinks, integrals by a midpoint sum over 8
    standard deviations, the slope by differences of the map (Price's theorem), with two weights
    and a shortcut in the way; hard_silu's derivative jumps somewhere between two points.
    """
    phi = mean_field.ACTIVATIONS[name]
    x = np.linspace(-6, 6, 1201) + 0.0031
    differences = (phi.function(x + 1e-6) - phi.function(x - 1e-6)) / 2e-6
    np.testing.assert_allclose(phi.derivative(x), differences, atol=1e-6)
    z = (np.arange(-4000, 4000) + 0.5) / 500
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) / 500
    u, field = math.sqrt(20.0) * z, MeanField(name)
    np.testing.assert_allclose(field.q_map(20.0), density @ phi.function(u) ** 2, rtol=1e-5)
    np.testing.assert_allclose(field.chi(20.0), density @ phi.derivative(u) ** 2, rtol=1e-3)
    field = MeanField(name, 1.5, 0.1, shortcut="identity", weights=2, branch_factor=0.3)
    difference = (field.c_map(0.7 + 1e-4, 2.0) - field.c_map(0.7 - 1e-4, 2.0)) / 2e-4
    np.testing.assert_allclose(field.slope(0.7, 2.0), difference, rtol=1e-5)
    if name != "erf":
        keras_function = keras.activations.get(name)
        options = {"approximate": False} if name == "gelu" else {}
        y = harness.numpy(keras_function(ops.convert_to_tensor(x, "float32"), **options))
        harness.close(y, phi.function(x), 1e-4)
    named, own = MeanField(name, 1.5, 0.1), MeanField(phi.function, 1.5, 0.1)
    assert named.q_map(2.0) == own.q_map(2.0)
    np.testing.assert_allclose(named.chi(2.0), own.chi(2.0), rtol=1e-6)


def test_critical_constants():
    """tanh: 1 without biases (arXiv 1606.05340); near (1.05, 2.01e-5) with (arXiv
    1806.05393); ReLU: He's 2.
    """
    for name, bias_variance, want, tolerance in (
        ("tanh", 0.0, 1.0, 1e-5),
        ("relu", 0.0, 2.0, 1e-9),
        ("erf", 0.0, math.pi / 4, 1e-5),
        ("tanh", 2.01e-5, 1.05, 5e-3),
    ):
        found = mean_field.critical_weight_variance(name, bias_variance)
        np.testing.assert_allclose(found, want, atol=tolerance)
    vanilla = kp.models.vanilla
    published = MeanField("tanh", vanilla.WEIGHT_VARIANCE, vanilla.BIAS_VARIANCE)
    assert abs(published.chi(published.q_star) - 1) < 2e-5


@pytest.mark.parametrize(
    ("field", "q_star", "phase"),
    [
        (MeanField("relu", 1.5, 0.2), 0.8, "ordered"),  # sigma_b^2 / (1 - sigma_w^2 / 2)
        (MeanField("relu", 2.0), 1.0, "critical"),
        (MeanField("relu", 2.5, 0.1), math.inf, "chaotic"),
        (MeanField("tanh", 1.0), 0.0, "critical"),
        (MeanField("erf", 1.0), 0.14192, "chaotic"),  # 2 / pi asin(2 q / (1 + 2 q)) = q
        (MeanField("relu", 1.5, 0.2, weights=2), 0.8, "ordered"),
    ],
    ids=lambda value: harness.label(value).partition(", shortcut")[0],
)
def test_fixed_points_and_phases(field, q_star, phase):
    np.testing.assert_allclose(field.q_star, q_star, rtol=1e-4, atol=1e-9)
    assert field.phase == phase


@pytest.mark.parametrize(
    ("name", "weight_variance", "bias_variance", "weights"),
    [("tanh", 0.7, 0.1, 2), ("tanh", 1.8, 0.1, 1), ("relu", 1.2, 0.3, 2)],
)
def test_depth_scales_are_those_of_the_decay(name, weight_variance, bias_variance, weights):
    """At depth, distances from the fixed points fall by `exp(-1 / xi)` from a unit to
    the next.
    """
    field = MeanField(name, weight_variance, bias_variance, weights=weights)
    q, c = field.q_star, field.c_star
    np.testing.assert_allclose(field.q_map(q), q, rtol=1e-9)
    np.testing.assert_allclose(field.c_map(c, q), c, atol=1e-9)
    assert (c == 1) == (field.phase == "ordered")
    distances = np.abs(field.lengths(q * (1 + 1e-4), 3) - q)
    np.testing.assert_allclose(distances[1:] / distances[:-1], math.exp(-1 / field.xi_q), rtol=2e-3)
    one_step = field.c_map(c - 1e-5, q) - c
    np.testing.assert_allclose(one_step / -1e-5, math.exp(-1 / field.xi_c), rtol=5e-3)
    if field.phase == "chaotic":
        assert field.slope(1.0, q) > 1 > field.slope(c, q)
    np.testing.assert_allclose(field.slope(1.0, q), field.chi(q), rtol=1e-8)


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


def test_phase_diagram():
    diagram = mean_field.phase_diagram("tanh", [0.5, 1.2, 3.0], [0.0, 0.3])
    for (i, j), phase in np.ndenumerate(diagram.phase):
        field = MeanField("tanh", diagram.weight_variances[i], diagram.bias_variances[j])
        assert phase == field.phase
        for name in ("q_star", "c_star", "xi_c"):
            assert getattr(diagram, name)[i, j] == getattr(field, name)
    assert diagram.phase.tolist() == [["ordered"] * 2, ["chaotic", "ordered"], ["chaotic"] * 2]
    assert ((diagram.chi > 1) == (diagram.phase == "chaotic")).all()
    beyond = mean_field.phase_diagram("relu", [3.0], [0.1])
    assert beyond.q_star[0, 0] == math.inf
    assert np.isnan([beyond.c_star[0, 0], beyond.xi_c[0, 0]]).all()
    # ReLU without biases: lengths fall to 0, where it has no slope, and angles near 0 stay
    below = mean_field.phase_diagram("relu", [0.5, 1.9], [0.0])
    assert below.phase.tolist() == [["ordered"]] * 2
    np.testing.assert_allclose(below.chi[:, 0], [0.25, 0.95])
    assert (below.q_star == 0).all()
    assert (below.xi_c == math.inf).all()


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
    """Lengths, correlations of two halves of a batch, and squared gradient norms at x_0
    ... x_L of one network.
    """
    rng = np.random.default_rng(seed)
    half = rng.normal(size=(BATCH // 2, WIDTH))
    other = 0.5 * half + math.sqrt(0.75) * rng.normal(size=half.shape)
    outputs, pulls = [ops.convert_to_tensor(np.concatenate([half, other]), "float32")], []
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
    first, second = np.split(x / np.linalg.norm(x, axis=-1, keepdims=True), 2, axis=1)
    return lengths, (first * second).sum(-1).mean(-1), norms / norms[-1]


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
    lengths, cosines, norms = np.mean(np.array(found), axis=0)
    np.testing.assert_allclose(lengths, field.lengths(1.0, DEPTH), rtol=tolerance)
    np.testing.assert_allclose(norms, field.gradients(1.0, DEPTH), rtol=tolerance)
    if field.normalization == "none":
        np.testing.assert_allclose(cosines, field.correlations(0.5, 1.0, DEPTH), atol=0.05)


ERRORS = {
    "activation": (lambda: MeanField("tahn"), "'tanh'"),
    "variance": (lambda: MeanField("tanh", -1.0), "weight_variance=-1.0"),
    "shortcut": (lambda: MeanField(shortcut="dropout"), "shortcut='dropout'"),
    "weights": (lambda: MeanField(weights=0), "weights=0"),
    "correlation": (lambda: MeanField().c_map(1.5, 1.0), "c=1.5"),
    "phase": (lambda: MeanField(shortcut="identity").phase, "shortcut='identity'"),
    "xi": (lambda: MeanField(shortcut="identity").xi_c, "without shortcut"),
    "c_map": (lambda: MeanField(normalization="batch").c_map(0.5, 1.0), "normalization='batch'"),
    "critical": (lambda: mean_field.critical_weight_variance(np.zeros_like), "No weight variance"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, words = ERRORS[name]
    assert words in harness.error_of(call)


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"needs scipy: pip install 'keras-preact\[training\]'"):
        mean_field.critical_weight_variance("tanh")
