"""Every analysis, transfer function, export and the health callback, in the precisions
that recipes choose: on networks of separate units, of stacked units, and of Keras' own
layers.

A row of `FEATURES` returns what the feature measures. In any precision, that must be what
it measures on the same network in float32 with separate units, up to rounding.
"""

import functools

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.backend import arrays
from keras_preact.export import _check, _children, _replay
from keras_preact.health.activations import Activations
from tests.keras_preact import harness
from tests.keras_preact.export import one_process

pytestmark = pytest.mark.backend

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
#: Precision to the largest allowed difference, as a share of the largest value. A number has 8
#: binary digits in bfloat16, 11 in float16, and some of these are the gradients of 8 examples.
PRECISIONS = {"float32": 1e-4, "mixed_bfloat16": 0.3, "mixed_float16": 0.06}
#: Errors of Eq. 4 and 5 that are rounding.
ROUNDING = {"float32": 1e-5, "mixed_bfloat16": 0.02, "mixed_float16": 2e-3}

X = harness.images(8, 6, 6, 1)
LABELS = np.arange(8) % 3

#: Runtime to the function that writes its file, and the name of the file.
EXPORTS = {
    "saved_model": (kp.export.save, "model"),
    "onnx": (kp.export.save_onnx, "model.onnx"),
    "litert": (kp.export.save_litert, "model.tflite"),
}
if not ON_TENSORFLOW:  # the others take the network as the first one does
    del EXPORTS["onnx"], EXPORTS["litert"]


@functools.cache
def network(precision: str, stacked: bool) -> kp.models.ResidualNetwork:
    """A network with a unit that changes the shape, and two equal ones. Features leave it as
    it is.
    """
    if precision == "float32" and not stacked:
        model = kp.models.ResidualNetwork(
            [(4, 1), (4, 3, 2)],
            stem="3x3",
            stem_filters=4,
            block="basic",
            input_shape=(6, 6, 1),
            classes=3,
            stacked=False,
            dtype="float32",
        )
        harness.randomize(model)
        return model
    return kp.models.changed_copy(network("float32", False), stacked=stacked, dtype=precision)


@functools.cache
def foreign(precision: str) -> keras.Model:
    """A network of Keras' own layers."""

    layers = keras.layers

    def branch(x, name):
        for part in (f"{name}a", f"{name}b"):
            x = layers.BatchNormalization(dtype=precision, name=f"norm_{part}")(x)
            x = layers.ReLU(dtype=precision)(x)
            x = layers.Conv2D(4, 3, padding="same", dtype=precision, name=f"conv_{part}")(x)
        return x

    inputs = keras.Input((6, 6, 1))
    x = layers.Conv2D(4, 3, padding="same", dtype=precision, name="stem")(inputs)
    for i in range(3):
        x = layers.Add(dtype=precision)([x, branch(x, i)])
    x = layers.GlobalAveragePooling2D(dtype=precision)(x)
    model = keras.Model(inputs, layers.Dense(3, dtype="float32", name="head")(x))
    harness.randomize(model)
    return model


def numbers(result, *names) -> dict[str, np.ndarray]:
    return {name: np.asarray(getattr(result, name), "float64") for name in names}


def output(model) -> dict[str, np.ndarray]:
    return {"output": harness.numpy(model(X, training=False))}


def answers(model) -> np.ndarray:
    return output(model)["output"].argmax(axis=1)


# --- Analyses of any model


def audit(model):
    findings = kp.analysis.audit(model, X, labels=LABELS).findings
    ranks = list(kp.analysis.Status)
    return {finding.check: np.array(ranks.index(finding.status)) for finding in findings}


def propagation(model):
    signals = kp.analysis.propagation(model, X, LABELS)
    fields = ("x_norm", "x_std", "residual_norm", "shortcut_norm", "gradient_norm", "loss")
    fields = (*fields, "residual_cosine", "residual_parallel", "output_cosine")
    kernels = [name for name in signals.weight_gradients if name.endswith("kernel")]
    return numbers(signals, *fields) | {
        name: signals.weight_gradients[name] for name in kernels if "projection" not in name
    }


def check_identities(model):
    check = kp.analysis.check_identities(model, X, LABELS)
    limit = ROUNDING[model.layers[1].dtype_policy.name]
    assert max(np.nanmax(check.forward_error), np.nanmax(check.gradient_error)) < limit
    return numbers(check, "ends", "direct_norm", "residual_norm")


def direct_path(model):
    return numbers(kp.analysis.direct_path(model, X, LABELS), "gain", "survival")


def lesions(model):
    """The labels are the model's own answers, so that none is close to another."""
    labels = answers(model)
    result = kp.analysis.lesions(model, X, labels, [(), (0, 1, 2)], batch_size=3)
    assert result.error[0] == result.intact_error == 0
    return {}


def curvature(model):
    return numbers(kp.analysis.curvature(model, X, LABELS, probes=1), "eigenvalues")


def gradient_noise(model):
    return numbers(kp.analysis.gradient_noise(model, X, LABELS, parts=2), "variance")


def grad_cam(model):
    return {"maps": kp.analysis.grad_cam(model, X, LABELS)}


def contributions(model):
    """The rounding of the logits is a part of the bias."""
    found = kp.analysis.contributions(model, X, LABELS)
    return numbers(found, "start", "residual", "logits")


def channel_profile(model):
    return numbers(kp.analysis.channel_profile(model, X), "size")


# --- Networks of this package


def fit(model, *callbacks, **options) -> None:
    """Train a model for two updates."""
    harness.compiled(model, kp.optimizers.CoupledSGD(0.01), **options)
    model.fit(X, LABELS, batch_size=4, shuffle=False, verbose=0, callbacks=list(callbacks))


def training_health(model):
    health = kp.TrainingHealth(1, sample=X, report=lambda message: None)
    fit(kp.models.changed_copy(model), health)
    order, inputs = np.argsort(health.weights), np.argsort(health.inputs)
    record = health.history[0]
    norms = ("gradient_norms", "weight_norms", "update_norms")
    return {name: getattr(record, name)[order] for name in norms} | {
        "activation_stds": record.activation_stds[inputs],
        "layer_gradient_ratio": np.asarray(record.layer_gradient_ratio),
    }


def spectrum(model):
    body, x = kp.analysis.between(model, 2, 4), harness.images(1, 3, 3, 4)
    return {
        "values": kp.analysis.spectrum(body, x).values,
        "largest": kp.analysis.spectrum(body, x, k=1, method="lanczos").values,
    }


def feature_extractor(model):
    features = kp.transfer.feature_extractor(model, ["stem", "stage2_unit2", "stage2", "pool"])
    return {name: harness.numpy(value) for name, value in features(X, training=False).items()}


def changed_copy(model):
    return output(kp.transfer.changed_copy(model, dropout=0.1))


def reset_classifier(model):
    assert kp.transfer.reset_classifier(model, 5)(X).shape == (8, 5)
    return output(kp.transfer.reset_classifier(model, 0))


def apply_temperature(model):
    """All labels but one are the model's own answers: it is sometimes wrong."""
    labels = answers(network("float32", False))
    labels[0] = (labels[0] + 1) % 3
    temperature = kp.transfer.fit_temperature(output(model)["output"], labels)
    return output(kp.transfer.apply_temperature(model, temperature))


def fine_tuning(model):
    """The stem and the first stage are frozen, with all batch normalisations. Unfrozen, all
    weights but those of the normalisations change.
    """
    model = kp.transfer.freeze_batch_norm(model)
    kp.transfer.freeze(model, up_to="stage1")
    assert kp.transfer.rate_factors(model, 0.5)["stage2"] == 0.5
    before = harness.weights(model)
    fit(model, run_eagerly=ON_TENSORFLOW)  # without compiling
    trained = harness.weights(model)
    assert harness.changed(model, before) == {
        path
        for path in before
        if path.startswith(("stage2", "head_classifier")) and path.endswith(("kernel", "bias"))
    }
    kp.transfer.unfreeze(model)
    fit(model, run_eagerly=ON_TENSORFLOW)
    assert harness.changed(model, trained) == {
        path for path in before if path.endswith(("kernel", "bias"))
    }
    return {path: value for path, value in trained.items() if path.startswith("head_classifier")}


OF_ANY_MODEL = (
    audit,
    propagation,
    check_identities,
    direct_path,
    lesions,
    curvature,
    gradient_noise,
    grad_cam,
    contributions,
    channel_profile,
)
OF_NETWORKS = (
    training_health,
    spectrum,
    feature_extractor,
    changed_copy,
    reset_classifier,
    apply_temperature,
    fine_tuning,
)
FEATURES = {feature.__name__: feature for feature in (*OF_ANY_MODEL, *OF_NETWORKS)}


def check(feature: str, got: dict, want: dict, precision: str) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        limit = PRECISIONS[precision] * np.nanmax(np.abs(value))
        np.testing.assert_allclose(got[name], value, 0, limit, err_msg=f"{feature}: {name}")


@functools.cache
def expected(feature: str, is_foreign: bool) -> dict[str, np.ndarray]:
    model = foreign("float32") if is_foreign else network("float32", False)
    return FEATURES[feature](model)


#: Each precision once, and two of the three in stacked units; the other pairs are slow.
PAIRS = [
    pytest.param("float32", True, id="float32-stacked"),
    pytest.param("mixed_bfloat16", True, id="mixed_bfloat16-stacked"),
    pytest.param("mixed_float16", False, id="mixed_float16-separate"),
    pytest.param("mixed_bfloat16", False, id="mixed_bfloat16-separate", marks=pytest.mark.soak),
    pytest.param("mixed_float16", True, id="mixed_float16-stacked", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(
    ("feature", "precision", "stacked"),
    [
        pytest.param(
            name,
            *pair.values,
            id=f"{name}-{pair.id}",
            # test_both_stacks.py has the analyses of stacks in float32
            marks=pytest.mark.soak if feature in OF_ANY_MODEL and pair is PAIRS[0] else pair.marks,
        )
        for name, feature in FEATURES.items()
        for pair in PAIRS
    ],
)
def test_networks_of_this_package(feature, precision, stacked):
    got = FEATURES[feature](network(precision, stacked))
    check(feature, got, expected(feature, False), precision)


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("feature", [feature.__name__ for feature in OF_ANY_MODEL])
def test_networks_of_other_layers(feature, precision):
    check(feature, FEATURES[feature](foreign(precision)), expected(feature, True), precision)


@pytest.mark.parametrize("feature", ["propagation", "check_identities", "gradient_noise"])
def test_small_gradients_in_float16(feature, monkeypatch):
    """The network is so sure of its answers that float16 cannot hold their gradients."""
    sure = kp.transfer.apply_temperature(network("float32", False), 0.006)
    mixed = kp.models.changed_copy(sure, dtype="mixed_float16")
    monkeypatch.setattr(f"{__name__}.LABELS", answers(sure))
    check(feature, FEATURES[feature](mixed), FEATURES[feature](sure), "mixed_bfloat16")


@pytest.mark.skipif(not ON_TENSORFLOW, reason="the measurements are in NumPy")
def test_an_audit_of_a_network_that_overflows():
    """In a new network, nothing normalises the signal at inference. In float16, this one
    becomes infinite.
    """
    model = kp.models.ResidualNetwork(
        [(4, 12)],
        stem="3x3",
        stem_filters=4,
        block="basic",
        input_shape=(6, 6, 1),
        classes=3,
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.5),
        dtype="mixed_float16",
    )
    assert not np.isfinite(output(model)["output"]).all()
    finding = kp.analysis.audit(model, X)["identity path"]
    assert (finding.status, finding.figure) == (kp.analysis.Status.PASS, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_batches_of_16_bits(dtype):
    """They are measured, and a wrong range is seen."""
    model = network("mixed_bfloat16", False)
    x = keras.ops.cast(X, dtype)
    got = kp.analysis.propagation(model, x, LABELS)
    np.testing.assert_allclose(got.x_norm, expected("propagation", False)["x_norm"], 0.05)
    assert kp.preprocessing.InputRange().problem(arrays.as_numpy(x)) is None
    assert kp.preprocessing.InputRange().problem(arrays.as_numpy(100 * x))
    assert Activations(model, x).wrong_input() is None
    assert "wrong range" in Activations(model, 100 * x).wrong_input()


@pytest.fixture(scope="module")
def one_child():
    """One process converts all exports; it and this one compare them."""
    with one_process.started() as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_children, "run", run)
        patch.setattr(_check, "compare", lambda *_: {})  # closer below, and without a process
        yield


@pytest.mark.usefixtures("one_child")
@pytest.mark.parametrize(("precision", "stacked"), PAIRS)
def test_files(precision, stacked, tmp_path):
    """Exports compute in float32, whatever the network computes in."""
    model, want = network(precision, stacked), output(network("float32", False))
    model.save(tmp_path / "model.keras")
    check("keras", output(keras.saving.load_model(tmp_path / "model.keras")), want, precision)
    for name, (save, file) in EXPORTS.items():
        path = save(model, tmp_path / file, classes=["a", "b", "c"])
        got = {"output": _replay.RUNTIMES[name](str(path))(X)["logits"]}
        check(name, got, want, "float32")
