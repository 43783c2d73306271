"""Hyper-connections: coefficients and units against NumPy, and the start of networks, which
is that of networks with one stream. Tables of products in other files have a row of them.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.layers import streams
from keras_preact.shortcuts import HyperConnections
from tests import reference
from tests.keras_preact import harness, test_gradients, test_unit_reference

pytestmark = pytest.mark.backend

#: Arguments of `HyperConnections`.
KINDS = [(4, "none", "pixel"), (4, "sinkhorn", "pixel"), (3, "permutations", "map")]
of_every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
on_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="slow, and not about the backend"
)
of_every_constraint = pytest.mark.parametrize("constraint", streams.CONSTRAINTS)


def coefficients_on(x, kind, **options):
    """The layer with random weights, and h_pre, h_post and H_res as arrays with a last axis
    of coefficients.
    """
    settings = {"strides": 1, "data_format": "channels_last", "kernel_regularizer": None, "seed": 0}
    layer = streams.Coefficients(*kind, **settings | options)
    layer.build(x.shape)
    harness.randomize(layer)
    pre, post, rows = layer(x)
    return layer, [
        np.concatenate([harness.numpy(each) for each in part], axis=-1)
        for part in (pre, post, [entry for row in rows for entry in row])
    ]


@of_every_kind
@pytest.mark.parametrize("size", [(5, 6), (7,), ()], ids=str)
def test_coefficients(kind, size):
    """For the pixels of a map, for tokens and for vectors."""
    if kind[2] == "map" and len(size) < 2:
        return
    n = kind[0]
    x = harness.images(2, *size, 4 * n)
    layer, got = coefficients_on(x, kind)
    p = {path.split("/")[-1]: value for path, value in harness.weights(layer).items()}
    pre, post, matrix = reference.hyper_connections(x.astype("float64"), p, *kind)
    for value, want in zip(got, (pre, post, matrix.reshape(*matrix.shape[:-2], -1)), strict=True):
        harness.close(value, want, 1e-6)


@of_every_constraint
def test_matrices_are_doubly_stochastic(constraint):
    """With sinkhorn, rows are exact, and columns have the error that the last round leaves."""
    x = harness.images(50, 12)
    _, (*_, entries) = coefficients_on(x, (3, constraint, "pixel"))
    matrices = entries.reshape(-1, 3, 3)
    rows, columns = (np.abs(matrices.sum(axis) - 1).max() for axis in (2, 1))
    if constraint == "none":
        assert min(rows, columns, -matrices.min()) > 0.1
        return
    assert matrices.min() >= 0
    assert rows < 1e-6
    assert columns < (1e-6 if constraint == "permutations" else 1e-2)


def test_rounds_of_sinkhorn():
    """These matrices are so uneven that 20 rounds leave an error, which is the same only if
    columns are first.
    """
    logits = 5 * np.random.default_rng(0).normal(size=(50, 9)).astype("float32")
    want = reference.sinkhorn(logits.astype("float64").reshape(50, 3, 3))
    assert np.abs(want.sum(1) - 1).max() > 0.01
    harness.close(harness.numpy(streams.sinkhorn(logits, 3)), want.reshape(50, 9), 1e-5)


@pytest.mark.parametrize("constraint", ["sinkhorn", "permutations"])
def test_extreme_logits(constraint):
    """Columns and rows of zeros would be NaN."""
    count = 9 if constraint == "sinkhorn" else 6
    logits = np.random.default_rng(0).choice([-1e4, 0.0, 1e4], (20, count)).astype("float32")

    def function(logits):
        entries = streams.CONSTRAINTS[constraint].of(logits, 3)
        return keras.ops.sum(keras.ops.square(entries)), [entries]

    step = harness.step(function, keras.layers.Identity(), compiled=False)
    (entries,), (gradient,), _ = step(logits)
    np.testing.assert_allclose(entries.reshape(-1, 3, 3).sum(2), 1, 1e-5)
    assert np.isfinite(gradient).all()


def options_of(kind, **options):
    """Options of a unit, for the reference and for the library."""
    make = {"shortcut": HyperConnections(*kind)}
    return {"shortcut": "hyper_connections", "hyper": kind, "make": make, **options}


@of_every_kind
@pytest.mark.parametrize(("channels", "strides"), [(4, 1), (3, 2)])
def test_units(kind, channels, strides):
    options = options_of(kind, arrangement="original", strides=strides)
    test_unit_reference.check(4, (2, 5, 6, channels), **options)


@on_tensorflow
@of_every_kind
def test_gradients_of_units(kind):
    """On the other backends, a row of test_gradients.py."""
    test_gradients.check((2, 5, 4, 3), **options_of(kind, strides=2))


def network(stages, **options):
    settings = {"stem": "3x3", "stem_filters": 4, "block": "basic", "input_shape": (6, 7, 1)}
    return kp.models.ResidualNetwork(stages, **settings | options, classes=3, seed=1)


@pytest.mark.parametrize(
    ("constraint", "options"),
    [
        ("none", {"normalization": "group", "shape_shortcut": "zero_pad", "stacked": True}),
        ("sinkhorn", {"arrangement": "original", "shape_shortcut": "projection"}),
        ("permutations", {"data_format": "channels_first", "normalization": "layer"}),
    ],
    ids=harness.label,
)
def test_a_network_starts_as_one_with_one_stream(constraint, options):
    """Outputs and the gradients of the other weights are those of identity shortcuts, up to
    float32's rounding: the streams are equal, and rows of H_res sum to 1. That columns
    do not, with sinkhorn, changes neither.
    """
    x, labels = harness.images(4, 6, 7, 1), np.arange(4) % 3
    if options.get("data_format") == "channels_first":
        x = np.moveaxis(x, -1, 1)
        options = options | {"input_shape": (1, 6, 7)}
    found = {}
    for shortcut in ("identity", HyperConnections(constraint=constraint)):
        raw = {"shortcut": shortcut, "activate_shape_shortcut": False}
        model = network([(4, 2, 2)], **raw, **options)
        cotangent = np.eye(3, dtype="float32")[labels]
        y, _, gradients = harness.step_of(model, cotangent, compiled=False)(x)
        paths = {id(weight): weight.path for weight in model.weights}
        of_path = {paths[key]: value for key, value in gradients.items()}
        found[shortcut if shortcut == "identity" else "streams"] = {"output": y} | of_path
    for path, want in found["identity"].items():
        harness.close(found["streams"][path], want, 1e-5, path)
    assert any("coefficients/kernel" in path for path in found["streams"])


@pytest.mark.parametrize("arrangement", ["pre_norm", "post_norm"])
def test_units_of_tokens_start_as_those_with_one_stream(arrangement):
    """The streams stay equal, also after a normalisation."""
    x = harness.images(2, 5, 8)
    block = kp.blocks.Attention(num_heads=2, causal=True)
    options = {"block": block, "arrangement": arrangement, "normalization": "layer", "seed": 1}
    want = harness.numpy(kp.ResidualUnit(8, **options)(x))
    unit = kp.ResidualUnit(8, **options, shortcut="hyper_connections")
    got = harness.numpy(unit(np.concatenate([x] * 4, axis=-1)))
    harness.close(got, np.concatenate([want] * 4, axis=-1), 1e-5)


@on_tensorflow
@of_every_constraint
def test_streams_become_different_in_training(constraint):
    """The second unit reads different shares of them, so no two stay equal."""
    model = network([(4, 2)], shortcut=HyperConnections(constraint=constraint))
    x = harness.images(8, 6, 7, 1)
    harness.compiled(model, keras.optimizers.SGD(1.0), run_eagerly=True)
    model.fit(x, np.arange(8) % 3, epochs=2, verbose=0)
    first = harness.numpy(keras.Model(model.input, model.unit_outputs[0])(x))
    parts = np.split(first, 4, axis=-1)
    for i in range(4):
        for j in range(i):
            assert np.abs(parts[i] - parts[j]).max() > 1e-7, (i, j)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_precisions(dtype):
    """The streams have 16 bits, the coefficients 32. A stream's square does not overflow."""
    x = harness.images(2, 5, 6, 16)
    unit = harness.unit_on(x, 4, shortcut="hyper_connections")
    small = kp.ResidualUnit(4, shortcut="hyper_connections", dtype=dtype)
    small.build(x.shape)
    small.set_weights(unit.get_weights())
    for factor in (1, 1000):
        got, want = small.trace(factor * x), unit.trace(factor * x)
        assert keras.backend.standardize_dtype(got.sum.dtype) in dtype
        harness.close(harness.numpy(got.shortcut), harness.numpy(want.shortcut), 0.02)
    _, coefficients = small.shortcut.read(keras.ops.cast(x, small.compute_dtype))
    kinds = {keras.backend.standardize_dtype(each.dtype) for each in coefficients[0]}
    assert kinds == {"float32"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: HyperConnections(streams=1), ("2 streams", "'identity'")),
        (lambda: HyperConnections(streams=0), ("streams", "0")),
        (lambda: HyperConnections(streams=5, constraint="permutations"), ("4 streams", "5!")),
        (lambda: HyperConnections(constraint="sinkhron"), ("constraint", "sinkhorn")),
        (lambda: HyperConnections(coefficients="image"), ("coefficients", "'map'")),
        (
            lambda: kp.ResidualUnit(4, shortcut="hyper_connections").build((None, 5, 6, 6)),
            ("4 streams", "CopyStreams", "(None, 5, 6, 6)"),
        ),
        (
            lambda: kp.ResidualUnit(
                4, block="dense", shortcut=HyperConnections(coefficients="map")
            ).build((None, 16)),
            ("'map'", "'pixel'", "2 dimensions"),
        ),
    ],
    ids=[
        *("one stream", "no stream", "too many permutations", "constraint", "coefficients"),
        *("input of a unit", "map of vectors"),
    ],
)
def test_wrong_options(make, words):
    message = harness.error_of(make)
    assert all(word in message for word in words)
