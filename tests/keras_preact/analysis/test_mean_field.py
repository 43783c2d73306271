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

pytestmark = pytest.mark.backend

LENGTHS = (1e-6, 0.1, 1.0, 7.0, 300.0)
CORRELATIONS = (-1.0, -0.4, 0.0, 0.3, 0.9, 0.999, 1.0)
NAMES = tuple(mean_field.ACTIVATIONS)


def pair(activation, c, q):
    """`E phi(u) phi(v)` and `E phi'(u) phi'(v)` out of the class."""
    field = MeanField(activation)
    return field.c_map(c, q) * field.q_map(q), field.slope(c, q) * field.q_map(q) / q


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
def test_integrals_against_a_fine_grid(name):
    """A midpoint sum over 8 standard deviations; hard_silu's derivative jumps somewhere
    between two of its points.
    """
    phi = mean_field.ACTIVATIONS[name]
    z = (np.arange(-4000, 4000) + 0.5) / 500
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) / 500
    for q in (0.05, 1.0, 20.0):
        u = math.sqrt(q) * z
        field = MeanField(name)
        np.testing.assert_allclose(field.q_map(q), density @ phi.function(u) ** 2, rtol=1e-5)
        np.testing.assert_allclose(field.chi(q), density @ phi.derivative(u) ** 2, rtol=1e-3)
        pairs = density[::8, None] * density[::8] * 64
        v = math.sqrt(q) * (0.6 * z[::8, None] + 0.8 * z[::8])
        np.testing.assert_allclose(
            field.c_map(0.6, q) * field.q_map(q),
            (pairs * phi.function(u[::8, None]) * phi.function(v)).sum(),
            rtol=1e-3,
        )


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_are_those_of_the_functions(name):
    """Those of the table by differences away from the kinks, those of Keras by value,
    and of a plain function by itself.
    """
    phi = mean_field.ACTIVATIONS[name]
    x = np.linspace(-6, 6, 1201) + 0.0031
    np.testing.assert_allclose(
        phi.derivative(x), (phi.function(x + 1e-6) - phi.function(x - 1e-6)) / 2e-6, atol=1e-6
    )
    if name != "erf":
        keras_function = {"gelu": lambda x: keras.activations.gelu(x, approximate=False)}.get(
            name, keras.activations.get(name)
        )
        harness.close(
            ops.convert_to_numpy(keras_function(ops.convert_to_tensor(x, "float32"))),
            phi.function(x),
            1e-4,
        )
    named, own = MeanField(name, 1.5, 0.1), MeanField(phi.function, 1.5, 0.1)
    assert named.q_map(2.0) == own.q_map(2.0)
    np.testing.assert_allclose(named.chi(2.0), own.chi(2.0), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_slope_is_the_derivative_of_the_map(name):
    """Price's theorem, with two weights and a shortcut in the way."""
    field = MeanField(name, 1.5, 0.1, shortcut="identity", weights=2, branch_factor=0.3)
    for c in (0.1, 0.7):
        difference = (field.c_map(c + 1e-4, 2.0) - field.c_map(c - 1e-4, 2.0)) / 2e-4
        np.testing.assert_allclose(field.slope(c, 2.0), difference, rtol=1e-5)


def test_critical_constants():
    """tanh: 1 without biases (arXiv 1606.05340); near (1.05, 2.01e-5) with (arXiv
    1806.05393); ReLU: He's 2.
    """
    np.testing.assert_allclose(mean_field.critical_weight_variance("tanh"), 1.0, atol=1e-5)
    np.testing.assert_allclose(mean_field.critical_weight_variance("relu"), 2.0, atol=1e-9)
    np.testing.assert_allclose(mean_field.critical_weight_variance("linear"), 1.0, atol=1e-9)
    np.testing.assert_allclose(mean_field.critical_weight_variance("erf"), math.pi / 4, atol=1e-5)
    np.testing.assert_allclose(
        mean_field.critical_weight_variance("tanh", 2.01e-5), 1.05, atol=5e-3
    )
    published = MeanField(
        "tanh", kp.models.vanilla.WEIGHT_VARIANCE, kp.models.vanilla.BIAS_VARIANCE
    )
    assert abs(published.chi(published.q_star) - 1) < 2e-5
    # near 0 on the critical line of tanh: sigma_b^2 = 4/3 q^3 + O(q^4), sigma_w^2 = 1 + 2 q +
    # O(q^2)
    weight_variance = mean_field.critical_weight_variance("tanh", 1e-9)
    q = (3e-9 / 4) ** (1 / 3)
    np.testing.assert_allclose(weight_variance - 1, 2 * q, rtol=2e-2)
    np.testing.assert_allclose(MeanField("tanh", weight_variance, 1e-9).q_star, q, rtol=2e-2)


@pytest.mark.parametrize(
    ("field", "q_star", "phase"),
    [
        (MeanField("relu", 1.5, 0.2), 0.8, "ordered"),  # sigma_b^2 / (1 - sigma_w^2 / 2)
        (MeanField("relu", 1.5), 0.0, "ordered"),
        (MeanField("relu", 2.0), 1.0, "critical"),
        (MeanField("relu", 2.5, 0.1), math.inf, "chaotic"),
        (MeanField("linear", 0.5, 1.0), 2.0, "ordered"),
        (MeanField("tanh", 0.9), 0.0, "ordered"),
        (MeanField("tanh", 1.0), 0.0, "critical"),
        (MeanField("erf", 1.0), 0.14192, "chaotic"),  # 2 / pi asin(2 q / (1 + 2 q)) = q
        (MeanField("relu", 1.5, 0.2, weights=2), 0.8, "ordered"),
    ],
    ids=lambda value: harness.label(value).partition(", shortcut")[0],
)
def test_fixed_points_and_phases(field, q_star, phase):
    np.testing.assert_allclose(field.q_star, q_star, rtol=1e-4, atol=1e-9)
    assert field.phase == phase


@pytest.mark.parametrize("weights", [1, 2])
@pytest.mark.parametrize(
    ("name", "weight_variance", "bias_variance"),
    [
        ("tanh", 0.7, 0.1),
        ("tanh", 1.8, 0.1),
        ("tanh", 3.0, 0.0),
        ("erf", 1.5, 0.2),
        ("relu", 1.2, 0.3),
        ("gelu", 1.0, 0.1),
    ],
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
        np.testing.assert_allclose(field.correlations(0.99, q, 200)[-1], c, atol=1e-6)
    np.testing.assert_allclose(field.slope(1.0, q), field.chi(q), rtol=1e-8)


def test_depth_scale_diverges_at_criticality():
    scales = [MeanField("tanh", weight_variance, 0.05).xi_c for weight_variance in (1.2, 1.6, 1.7)]
    critical = mean_field.critical_weight_variance("tanh", 0.05)
    assert scales[0] < scales[1] < scales[2] < MeanField("tanh", critical - 0.001, 0.05).xi_c
    assert MeanField("relu", 2.0).xi_c == math.inf


@pytest.mark.parametrize(("name", "critical"), [("tanh", 1.0), ("erf", math.pi / 4), ("relu", 2.0)])
def test_depth_scale_of_lengths_around_criticality(name, critical):
    """Without biases, a length close to 0 is multiplied by chi(0), which is
    `weight_variance / critical`.
    """
    assert MeanField(name, critical).xi_q == math.inf
    found = MeanField(name, 0.9 * critical).xi_q
    np.testing.assert_allclose(found, -1 / math.log(0.9), rtol=1e-6)


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


def test_residual_tanh_is_between_powers_and_exponentials():
    """q_l grows linearly, and the logarithm of the gradients as a root of depth (arXiv
    1712.08969, Sec. 5).
    """
    field = MeanField("tanh", 1.0, shortcut="identity")
    depth = 4000
    lengths = field.lengths(1.0, depth)
    np.testing.assert_allclose((lengths[depth] - lengths[depth // 2]) / (depth / 2), 1.0, rtol=0.05)
    # chi = 1 + E sech^4, which is 4/3 / sqrt(2 pi q) for long arguments: the integral of the
    # density's peak
    np.testing.assert_allclose(field.chi(1e6) - 1, 4 / 3 / math.sqrt(2 * math.pi * 1e6), rtol=1e-4)
    logarithm = np.log(field.gradients(1.0, depth))
    growth = (logarithm[0] - logarithm[depth]) / (logarithm[0] - logarithm[depth // 4])
    np.testing.assert_allclose(growth, 2.0, rtol=0.1)  # the root of 4


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
    scaled = MeanField(
        "relu",
        2.0,
        shortcut="identity",
        normalization="batch",
        weights=weights,
        branch_factor=1 / depth,
    )
    assert scaled.gradients(1.0, depth)[0] < math.exp(growth * variance) < want[0]


def test_phase_diagram():
    weight_variances, bias_variances = [0.5, 1.2, 3.0], [0.0, 0.3]
    diagram = mean_field.phase_diagram("tanh", weight_variances, bias_variances)
    for i, weight_variance in enumerate(weight_variances):
        for j, bias_variance in enumerate(bias_variances):
            field = MeanField("tanh", weight_variance, bias_variance)
            assert diagram.phase[i, j] == field.phase
            assert diagram.q_star[i, j] == field.q_star
            assert diagram.c_star[i, j] == field.c_star
            assert diagram.xi_c[i, j] == field.xi_c
            assert (diagram.chi[i, j] > 1) == (
                weight_variance > mean_field.critical_weight_variance("tanh", bias_variance)
            )
    assert diagram.phase.tolist() == [["ordered"] * 2, ["chaotic", "ordered"], ["chaotic"] * 2]
    beyond = mean_field.phase_diagram("relu", [3.0], [0.1])
    assert beyond.q_star[0, 0] == math.inf
    assert np.isnan(beyond.c_star[0, 0])
    assert np.isnan(beyond.xi_c[0, 0])


WIDTH, BATCH, DEPTH, SEEDS = 400, 256, 6, 3


def network(field, seed):
    """Units of two dense layers."""
    normal = keras.initializers.RandomNormal
    units = []
    for i in range(DEPTH):
        unit = kp.ResidualUnit(
            WIDTH,
            block="dense",
            shortcut=field.shortcut,
            normalization=field.normalization,
            activation=field.activation,
            use_bias=True,
            kernel_initializer=normal(stddev=(field.weight_variance / WIDTH) ** 0.5, seed=seed),
            bias_initializer=normal(stddev=field.bias_variance**0.5, seed=seed),
        ).at(f"unit{i}")
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
        (("relu", 2.0, 0.1, "identity", "none", 1.0), 0.3),
        (("silu", 2.5, 0.2, "identity", "none", 0.2), 0.1),
        (("relu", 2.0, 0.0, "none", "batch", 1.0), 0.1),
        (("relu", 2.0, 0.0, "identity", "batch", 0.2), 0.1),
        (("tanh", 1.5, 0.3, "identity", "batch", 1.0), 0.1),
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
    "activation": (lambda: MeanField("tahn"), ["'tanh'", "activation='tahn'"]),
    "variance": (lambda: MeanField("tanh", -1.0), ["weight_variance=-1.0"]),
    "nan": (lambda: MeanField("tanh", 1.0, math.nan), ["bias_variance=nan"]),
    "infinite": (lambda: MeanField("tanh", branch_factor=math.inf), ["branch_factor=inf"]),
    "shortcut": (lambda: MeanField(shortcut="dropout"), ["'identity'", "shortcut='dropout'"]),
    "norm": (lambda: MeanField(normalization="layer"), ["'batch'", "normalization='layer'"]),
    "weights": (lambda: MeanField(weights=0), ["positive integer", "weights=0"]),
    "length": (lambda: MeanField().q_map(-1.0), ["q=-1.0"]),
    "correlation": (lambda: MeanField().c_map(1.5, 1.0), ["from -1 to 1", "c=1.5"]),
    "depth": (lambda: MeanField().lengths(1.0, 0), ["depth=0"]),
    "phase": (lambda: MeanField(shortcut="identity").phase, ["`phase`", "shortcut='identity'"]),
    "xi": (lambda: MeanField(shortcut="identity").xi_c, ["`c_star`", "without shortcut"]),
    "c_map": (
        lambda: MeanField(normalization="batch").c_map(0.5, 1.0),
        ["`c_map`", "normalization='batch'"],
    ),
    "critical": (
        lambda: mean_field.critical_weight_variance(np.zeros_like),
        ["No weight variance", "bias_variance=0.0"],
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, words = ERRORS[name]
    message = harness.error_of(call)
    assert all(word in message for word in words), message


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"needs scipy: pip install 'keras-preact\[training\]'"):
        mean_field.critical_weight_variance("tanh")


@pytest.mark.parametrize("weight_variance", [0.5, 1.0, 1.9])
def test_relu_without_bias_below_criticality(weight_variance):
    """Lengths fall to 0, where ReLU has no slope: chi is that of every positive length."""
    diagram = mean_field.phase_diagram("relu", [weight_variance], [0.0])
    assert diagram.q_star[0, 0] == 0
    assert diagram.phase[0, 0] == "ordered"
    assert diagram.chi[0, 0] == pytest.approx(weight_variance / 2)
    assert diagram.xi_c[0, 0] == math.inf  # it keeps angles near 0, whatever the lengths do
