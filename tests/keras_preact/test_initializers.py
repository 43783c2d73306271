"""How weights start: the released code's He, no two alike, reproducible from a seed;
the gates' bias.
"""

import itertools

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.initializers import DeltaOrthogonal, DepthScaledHe, Fixup, released_he, spawn
from tests.keras_preact import harness

pytestmark = pytest.mark.backend


def kernels(model):
    return {
        path: value for path, value in harness.weights(model).items() if path.endswith("kernel")
    }


def test_released_he_is_plain_normal_with_fan_out():
    kernel = keras.ops.convert_to_numpy(released_he(seed=0)((3, 3, 32, 128)))
    deviation = np.sqrt(2 / (3 * 3 * 128))  # fan_in would make it twice as wide
    np.testing.assert_allclose(kernel.std(), deviation, 0.02)
    assert abs(kernel.mean()) < deviation / 50
    # a normal distribution has 4.55 % beyond two deviations; Keras' truncated one ends at 2.27 of
    # them
    np.testing.assert_allclose((np.abs(kernel) > 2 * deviation).mean(), 0.0455, 0.1)
    assert np.abs(kernel).max() > 3.5 * deviation


def test_kernels_of_a_network():
    """He with fan_out for each convolution, Torch's uniform for the classifier, whose
    bias is zero.
    """
    model = kp.models.resnet_cifar(11, input_shape=(8, 8, 3))
    for path, kernel in kernels(model).items():
        if path != "head_classifier/kernel":
            fan_out = kernel.shape[0] * kernel.shape[1] * kernel.shape[3]
            np.testing.assert_allclose(
                kernel.std(), np.sqrt(2 / fan_out), 4 / np.sqrt(kernel.size), err_msg=path
            )
    classifier = harness.weights(model)["head_classifier/kernel"]
    limit = 1 / np.sqrt(256)
    assert 0.98 * limit < np.abs(classifier).max() <= limit
    np.testing.assert_allclose(classifier.std(), limit / np.sqrt(3), 0.05)
    assert not harness.weights(model)["head_classifier/bias"].any()


INITIALIZERS = {
    "default": lambda: None,
    "name": lambda: "he_normal",
    "unseeded": lambda: keras.initializers.HeNormal(),
    "seeded": lambda: keras.initializers.HeNormal(seed=1),
    "seed generator": lambda: keras.initializers.HeNormal(seed=keras.random.SeedGenerator(1)),
    "truncated": lambda: keras.initializers.TruncatedNormal(stddev=0.1, seed=0),
}


@pytest.mark.parametrize("name", INITIALIZERS)
@pytest.mark.parametrize(
    "options",
    [{"shortcut": "conv1x1"}, {"block": "bottleneck", "shortcut": "exclusive_gating"}],
    ids=str,
)
def test_no_two_kernels_start_alike(options, name):
    depth = 11 if "block" in options else 8
    model = kp.models.resnet_cifar(
        depth, width_factor=0.25, kernel_initializer=INITIALIZERS[name](), **options
    )
    for (path, kernel), (other, value) in itertools.combinations(kernels(model).items(), 2):
        size = min(kernel.size, value.size)
        assert not np.allclose(
            np.ravel(kernel)[:size] / kernel.std(), np.ravel(value)[:size] / value.std()
        ), (path, other)


def seeded(seed):
    return {"kernel_initializer": keras.initializers.HeNormal(seed=seed)}


def unseeded(seed):
    keras.utils.set_random_seed(seed)
    return {}


@pytest.mark.parametrize("options", [seeded, unseeded])
def test_a_seed_reproduces_a_network(options):
    """The initialiser's seed, or the global one."""
    one, same, other = (
        kernels(
            kp.models.resnet_cifar(
                8, width_factor=0.25, shortcut="exclusive_gating", **options(seed)
            )
        )
        for seed in (1, 1, 2)
    )
    for path, kernel in one.items():
        np.testing.assert_array_equal(kernel, same[path], path)
        assert not np.array_equal(kernel, other[path]), path


def test_spawn_depends_on_every_part_of_the_place():
    seeds = [
        spawn(keras.initializers.HeNormal(seed=seed), *place).seed
        for seed in (1, 2)
        for place in ((1, 2), (2, 1), (12,), ("a",))
    ]
    assert len(set(seeds)) == len(seeds)
    assert isinstance(spawn(keras.initializers.Zeros(), 1), keras.initializers.Zeros)


def test_constant_initializer():
    unit = kp.ResidualUnit(4, kernel_initializer="zeros")
    unit.build((2, 5, 5, 4))
    assert not any(value.any() for value in kernels(unit).values())


def test_initializer_of_a_shortcut_is_its_own():
    unit = kp.ResidualUnit(
        4, shortcut=kp.shortcuts.Conv1x1(kernel_initializer="ones"), kernel_initializer="zeros"
    )
    unit.build((2, 5, 5, 4))
    assert {path: value.mean() for path, value in kernels(unit).items()} == {
        "branch/conv_1/kernel": 0,
        "branch/conv_2/kernel": 0,
        "shortcut/conv/kernel": 1,
    }


@pytest.mark.parametrize("changed", [False, True], ids=["kept", "changed"])
@pytest.mark.parametrize(
    ("options", "bias"),
    [
        ({"shortcut": "exclusive_gating"}, -6),
        ({"shortcut": "shortcut_only_gating"}, -6),
        ({"shortcut": "exclusive_gating", "gate_bias": 0}, 0),
        ({"shortcut": "shortcut_only_gating", "gate_bias": -7.0}, -7),
        ({"shortcut": kp.shortcuts.ExclusiveGating(bias=-3)}, -3),
        ({"shortcut": kp.shortcuts.ExclusiveGating(bias=-3), "gate_bias": -1}, -1),
    ],
    ids=str,
)
def test_gate_bias_at_the_start(options, bias, changed):
    unit = harness.unit_of(4, strides=2 if changed else 1, **options)
    unit.build((2, 6, 6, 3 if changed else 4))
    weights = harness.weights(unit)
    np.testing.assert_array_equal(weights["gate/conv/bias"], np.full(4, bias))
    assert weights["gate/conv/kernel"].shape == (1, 1, 4, 4)
    assert weights["gate/conv/kernel"].any()


def test_weights_start_neutral():
    """gamma 1, beta 0, moving mean 0 and variance 1, biases 0."""
    unit = kp.ResidualUnit(4, use_bias=True, strides=2, arrangement="original")
    unit.build((2, 6, 6, 3))
    start = {"gamma": 1, "beta": 0, "moving_mean": 0, "moving_variance": 1, "bias": 0}
    for path, value in harness.weights(unit).items():
        kind = path.rsplit("/", 1)[1]
        if kind != "kernel":
            np.testing.assert_array_equal(value, np.full_like(value, start[kind]), path)


def test_a_seed_in_a_shortcut_gives_every_unit_values_of_its_own():
    gate = kp.shortcuts.ExclusiveGating(kernel_initializer=keras.initializers.RandomNormal(seed=1))
    models = [kp.models.resnet_cifar(14, input_shape=(8, 8, 1), shortcut=gate) for _ in range(2)]
    kernels = [
        [np.array(w) for w in model.weights if w.path.endswith("gate/conv/kernel")]
        for model in models
    ]
    assert not np.array_equal(kernels[0][0], kernels[0][1])  # two units of one stage
    for one, other in zip(*kernels, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_seed_in_a_dropout_shortcut_gives_every_unit_a_mask_of_its_own():
    masks = []
    pattern = kp.ResidualUnit(4, shortcut=kp.shortcuts.Dropout(0.5, seed=1))
    for name in ("stage1_unit1", "stage1_unit2", "stage1_unit1"):
        unit = pattern.at(name)
        x = np.ones((1, 16, 16, 4), "float32")
        unit(x)
        for weight in unit.trainable_weights:  # F = 0: what is left is the shortcut
            weight.assign(np.zeros(weight.shape, "float32"))
        masks.append(np.array(keras.ops.convert_to_numpy(unit(x, training=True))) > 0)
    assert not np.array_equal(masks[0], masks[1])
    np.testing.assert_array_equal(masks[0], masks[2])


@pytest.mark.parametrize("gain", [1.0, 1.5])
@pytest.mark.parametrize(
    ("inputs", "outputs", "size"), [(6, 6, 3), (3, 8, 5), (8, 3, 3), (5, 5, 1)]
)
def test_delta_orthogonal(inputs, outputs, size, gain):
    kernel = keras.ops.convert_to_numpy(
        DeltaOrthogonal(gain, seed=1)((size, size, inputs, outputs))
    )
    centre = kernel[size // 2, size // 2].copy()
    kernel[size // 2, size // 2] = 0
    assert not kernel.any()
    gram = centre @ centre.T if inputs <= outputs else centre.T @ centre
    np.testing.assert_allclose(gram, gain**2 * np.eye(min(inputs, outputs)), atol=1e-5)


def test_a_delta_orthogonal_convolution_keeps_the_norm():
    x = harness.images(3, 5, 6, 4)
    for kernel, keeps in (
        (DeltaOrthogonal(seed=0), True),
        (keras.initializers.Orthogonal(seed=0), False),
    ):
        layer = keras.layers.Conv2D(7, 3, padding="same", kernel_initializer=kernel, use_bias=False)
        y = keras.ops.convert_to_numpy(layer(x))
        norms = [np.sqrt((values**2).sum((1, 2, 3))) for values in (x, y)]
        assert np.allclose(*norms, rtol=1e-5) == keeps


def test_delta_orthogonal_needs_a_centre_and_takes_dense_kernels():
    with pytest.raises(ValueError, match="must be odd") as error:
        DeltaOrthogonal()((2, 2, 4, 4))
    assert "Received: shape=(2, 2, 4, 4)" in str(error.value)
    matrix = keras.ops.convert_to_numpy(DeltaOrthogonal(seed=3)((4, 6)))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(4), atol=1e-5)


def deviations(unit):
    return {path: value.std() for path, value in kernels(unit).items()}


@pytest.mark.parametrize(("block", "weights"), [("basic", 2), ("bottleneck", 3), ("dense", 2)])
def test_fixup(block, weights):
    """Every weight of a branch but the last has He's deviation times L^(-1 / (2m - 2));
    the last is zero.
    """
    units = 50
    filters = 64 if block == "dense" else 32
    unit = kp.ResidualUnit(
        filters, block=block, kernel_initializer=Fixup(units), normalization="none", strides=1
    )
    shape = (2, 64) if block == "dense" else (2, 5, 5, 16)
    unit.build(shape)
    for path, kernel in kernels(unit).items():
        place = path.split("/")[-2]
        expected = np.sqrt(2 / (np.prod(kernel.shape[:-2]) * kernel.shape[-1]))
        if place.endswith(f"_{weights}"):
            expected = 0
        elif path.startswith("branch"):
            expected *= units ** (-1 / (2 * weights - 2))
        np.testing.assert_allclose(kernel.std(), expected, 4 / np.sqrt(kernel.size), err_msg=path)


def test_depth_scaled_he():
    units = 100
    unit = kp.ResidualUnit(32, block="bottleneck", kernel_initializer=DepthScaledHe(units))
    unit.build((2, 5, 5, 16))
    for path, kernel in kernels(unit).items():
        expected = np.sqrt(2 / (np.prod(kernel.shape[:2]) * kernel.shape[-1])) / (
            10 if "conv_3" in path else 1
        )
        np.testing.assert_allclose(kernel.std(), expected, 4 / np.sqrt(kernel.size), err_msg=path)


@pytest.mark.parametrize("initializer", [Fixup, DepthScaledHe])
def test_a_unit_by_itself_does_not_know_the_depth(initializer):
    unit = kp.ResidualUnit(4, kernel_initializer=initializer())
    with pytest.raises(ValueError, match=rf"needs {initializer.__name__}\(units=\.\.\.\)"):
        unit.build((2, 5, 5, 4))
    with pytest.raises(ValueError, match="`units` must be a positive integer"):
        initializer(0)


@pytest.mark.parametrize("stacked", [False, True])
def test_fixup_network(stacked):
    """The classifier and every branch start at zero, one shift in front of every weight
    and activation, one scale a branch.
    """
    model = kp.models.resnet_cifar(20, input_shape=(8, 8, 1), stacked=stacked, **kp.models.FIXUP)
    x = harness.images(4, 8, 8, 1)
    assert not keras.ops.convert_to_numpy(model(x)).any()
    first, *_, last = keras.Model(model.input, model.unit_outputs[:3])(x)
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(first), keras.ops.convert_to_numpy(last)
    )
    singles = kp.models.unstack(model)
    names = [weight.path.split("/", 1)[1] for weight in singles.units[1].trainable_weights]
    assert sorted(names) == sorted(
        [
            "branch/conv_1/kernel",
            "branch/conv_2/kernel",
            "branch/scale_2/factor",
            "branch/shift_0/bias",
            "branch/shift_0_again/bias",
            "branch/shift_1/bias",
            "branch/shift_1_again/bias",
        ]
    )
    assert not model.non_trainable_weights
    deviation = np.sqrt(2 / (9 * 64)) / np.sqrt(9)  # 9 units, 2 weights a branch
    kernel = harness.weights(singles)["stage3_unit2/branch/conv_1/kernel"]
    np.testing.assert_allclose(kernel.std(), deviation, 0.05)


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
    np.testing.assert_allclose(keras.ops.convert_to_numpy(unit(x)), expected, atol=1e-5)


def test_new_initializers_survive_a_file(tmp_path):
    for options in (
        {**kp.models.FIXUP},
        {"kernel_initializer": DepthScaledHe(seed=1)},
        {"kernel_initializer": DeltaOrthogonal(0.5)},
    ):
        model = kp.models.resnet_cifar(14, input_shape=(8, 8, 1), **options)
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert loaded.get_config() == model.get_config()
