"""Networks of random options: each is saved, copied, stacked, trained, measured and exported.

The other tests combine the features that somebody thought of together. A seed that fails
here shows two that nobody did. Its name prints the arguments of the network.
"""

import random

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

pytestmark = [pytest.mark.backend, pytest.mark.soak]

BACKEND = keras.backend.backend()
SEEDS = 20 if BACKEND == "jax" else 60
#: Values of an option, and the share of the networks that have it.
OF_ALL = {
    "normalization": (0.4, ["batch", "layer", "none", "group", "rms"]),
    "dropout": (0.3, [0.2]),
    "dropout_varies": (0.2, [True]),
    "stochastic_depth": (0.3, [0.3]),
    "dtype": (0.4, ["mixed_bfloat16", "mixed_float16", "bfloat16"]),
    "bias_initializer": (0.2, ["ones"]),
    "kernel_regularizer": (0.2, [keras.regularizers.L2(1e-4)]),
    "classifier_activation": (0.3, ["softmax", "sigmoid", "linear"]),
    "arrangement": (0.5, [*kp.ARRANGEMENTS]),
    "shortcut": (
        0.5,
        [
            *kp.SHORTCUTS,
            kp.shortcuts.ConstantScaling(shortcut=0.9, residual=0.7),
            kp.shortcuts.ExclusiveGating(bias=-2.0),
            kp.shortcuts.HyperConnections(streams=2),
        ],
    ),
}
OF_RESIDUAL_NETWORKS = {
    "activation": (0.4, ["gelu", "silu", "tanh"]),
    "stacked": (0.3, [True]),
    "execution": (0.2, ["loop"] if BACKEND == "torch" else ["scan", "loop"]),
    "remat": (0.2, [True, 2]),
    "unroll": (0.1, [2]),
    "use_bias": (0.3, [True, False, "unless_norm"]),
    "zero_init_last": (0.2, [True]),
    "dropout_at": (0.2, ["before_addition", "between_weights"]),
    "pooling": (0.2, ["max", "avg"]),
}
OF_CONVOLUTIONS = {
    "shape_shortcut": (0.3, ["auto", "zero_pad", "projection"]),
    "activate_shape_shortcut": (0.2, [True, False]),
    "downsampling": (0.4, ["strided", "average", "blur", "max"]),
    "squeeze_excitation": (0.2, [2]),
    "standardize_weights": (0.2, [True]),
    "output_stride": (0.1, [2, 4]),
}
OF_TRANSFORMERS = {
    "causal": (0.3, [True]),
    "mlp": (0.4, ["swiglu", "gelu"]),
    "arrangement": (0.5, ["original", "full_preactivation"]),
}
BLOCKS = (0.3, ["basic", "bottleneck", "single", kp.blocks.Bottleneck(groups=2)])
SMALL = {"width_factor": 0.25}
#: Builder, its arguments, the shape of its inputs, and the options that it takes.
NETWORKS = [
    (kp.models.resnet_cifar, (8,), SMALL, (9, 9, 3), OF_RESIDUAL_NETWORKS | OF_CONVOLUTIONS),
    (
        kp.models.resnet_cifar,
        (20,),
        SMALL,
        (12, 12, 1),
        OF_RESIDUAL_NETWORKS | OF_CONVOLUTIONS | {"block": BLOCKS},
    ),
    (
        kp.models.resnet_imagenet,
        ((1, 2),),
        {"width_factor": 0.125, "stem": "3x3"},
        (16, 16, 3),
        OF_RESIDUAL_NETWORKS | OF_CONVOLUTIONS | {"block": BLOCKS},
    ),
    (kp.models.fast_resnet, (1,), SMALL, (11, 11, 3), OF_RESIDUAL_NETWORKS | OF_CONVOLUTIONS),
    (kp.models.resnet_1d, (14,), SMALL, (24, 3), OF_RESIDUAL_NETWORKS | OF_CONVOLUTIONS),
    (kp.models.dense_resnet, (6,), {"width": 8}, (7,), OF_RESIDUAL_NETWORKS),
    (
        kp.models.transformer,
        (2,),
        {"width": 8, "num_heads": 2, "patch_size": None},
        (5, 6),
        OF_TRANSFORMERS,
    ),
]


def drawn(seed: int):
    """Return a network that can be built, its arguments, and images for it."""
    choose = random.Random(seed)
    while True:
        build, depth, arguments, shape, own = choose.choice(NETWORKS)
        options = {
            name: choose.choice(values)
            for name, (share, values) in (OF_ALL | own).items()
            if choose.random() < share
        }
        given = shape
        if choose.random() < 0.2 and len(shape) == 3:
            given = (None, None, shape[2])
        options |= {"classes": choose.choice([1, 2, 5]), "input_shape": given, **arguments}
        if options["classes"] == 1 and options.get("classifier_activation") == "softmax":
            del options["classifier_activation"]
        if options.get("dtype") == "bfloat16":  # Keras cannot add its loss on TensorFlow
            options.pop("kernel_regularizer", None)
        try:
            model = build(*depth, **options)
        except ValueError:  # options that do not fit together
            continue
        harness.randomize(model)
        return model, f"kp.models.{build.__name__}{depth}, {options}", harness.images(4, *shape)


def labels_of(model):
    rng, count = np.random.default_rng(0), model.output_shape[-1]
    is_binary = count == 1 or model.get_config()["classifier_activation"] == "sigmoid"
    if is_binary and count > 1:
        return rng.integers(0, 2, (4, count)).astype("float32")
    return rng.integers(0, 2 if is_binary else count, 4)


def outputs(model, x):
    return harness.numpy(model(x, training=False)).astype("float32")


def is_half(model) -> bool:
    return any("16" in (layer.compute_dtype or "") for layer in model.layers)


def same(found, model, x) -> None:
    """Compare the outputs of another network with the model's."""
    close(outputs(found, x), outputs(model, x), is_half(model))


def close(got, want, half: bool) -> None:
    """Compare outputs. A new network in float16 may overflow."""
    assert got.shape == want.shape
    finite = np.isfinite(want) & (np.isfinite(got) | (not half))
    assert half or finite.all()
    limit = (0.1 if half else 1e-4) * (np.abs(want[finite]).max(initial=0) + 1)
    np.testing.assert_allclose(got[finite], want[finite], rtol=0, atol=limit)


def saved(model, x, folder):
    model.save(folder / "model.keras")
    same(keras.saving.load_model(folder / "model.keras"), model, x)


def copied(model, x, folder):
    same(kp.models.changed_copy(model, dtype="float32"), model, x)


def stacked(model, x, folder):
    if isinstance(model, kp.models.ResidualNetwork):
        other = kp.models.stack(model)
        same(other, model, x)
        same(kp.models.unstack(other), model, x)


def trained(model, x, folder):
    model = kp.models.changed_copy(model)
    labels = labels_of(model)
    is_binary = model.output_shape[-1] == 1 or labels.ndim > 1
    losses = keras.losses
    loss = losses.BinaryCrossentropy if is_binary else losses.SparseCategoricalCrossentropy
    activation = model.get_config()["classifier_activation"]
    model.compile("sgd", loss(from_logits=activation in (None, "linear")), jit_compile=False)
    history = model.fit(
        x, labels, batch_size=2, verbose=0, callbacks=[kp.TrainingHealth(1, sample=x)]
    )
    assert len(history.history["loss"]) == 1
    saved(model, x, folder)


def exported(model, x, folder):
    import tensorflow as tf

    count = model.output_shape[-1]
    path = kp.export.save(model, folder / "e", classes=list("abcde"[:count]), batch_sizes=[1])
    served = tf.saved_model.load(path).signatures["serving_default"](images=tf.constant(x))
    activation = model.get_config()["classifier_activation"]
    key = "logits" if activation in (None, "linear") else "probabilities"
    close(served[key].numpy(), outputs(model, x), is_half(model))


def audited(model, x, folder):
    if model.get_config()["shortcut"]["class_name"] != "NoShortcut":
        kp.analysis.audit(model, x, labels=labels_of(model))


def measured(model, x, folder):
    kp.analysis.propagation(model, x, labels_of(model))
    kp.analysis.check_identities(model, x, labels_of(model))
    kp.analysis.weight_spectra(model)


def refused_or_measured(model, x, folder):
    """Some networks have no such measure; the error says so."""
    refused = []
    for measure in (
        kp.analysis.contributions,
        kp.analysis.grad_cam,
        kp.analysis.composite_gain,
        lambda model, x: kp.analysis.lesions(model, x, labels_of(model)),
    ):
        try:
            measure(model, x)
        except ValueError as error:
            refused.append(str(error))
    assert all("Received: " in message for message in refused), refused


CHECKS = [saved, copied, stacked, audited, measured, refused_or_measured, trained]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_feature(seed, tmp_path):
    model, arguments, x = drawn(seed)
    print(arguments)
    for check in CHECKS:
        check(model, x, tmp_path)
    if seed % 4 == 0 and BACKEND == "tensorflow":
        exported(model, x, tmp_path)
