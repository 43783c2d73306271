"""What one process of a test does: `python tasks.py CASE RESULTS`, a JSON in and one
out.

CASE: `devices` (virtual ones of this process) and `tasks`, a list of `[name, options]` for
    each kind of distribution; the result has one for each.
"""

import contextlib
import functools
import json
import os
import sys
import tempfile
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import dtypes

import keras_preact as kp
from keras_preact.layers import batch_norm

BACKEND = keras.backend.backend()
BATCH = 16
SIZE = 8
SHAPE = (SIZE, SIZE, 3)


def data(count=BATCH * 5, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count)
    images = rng.normal(size=(count, *SHAPE)) + labels[:, None, None, None] / 5
    return images.astype("float32"), labels.astype("int32")


def residual(units, **options):
    return kp.models.ResidualNetwork(
        [(4, units)],
        stem="3x3",
        stem_filters=4,
        block="basic",
        input_shape=SHAPE,
        classes=10,
        **options,
    )


def sequential(*layers):
    return keras.Sequential([keras.Input(SHAPE), *layers])


def head(**options):
    return keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10, **options)


NETWORKS = {
    "residual": lambda: residual(1),
    "stacked": lambda: residual(4, stacked=True),
    "unit": lambda: sequential(kp.ResidualUnit(4, strides=2), *head()),
    # with a square: no ReLU that changes its sign
    "normalized": lambda: sequential(
        keras.layers.Conv2D(4, 1, use_bias=False),
        batch_norm.BatchNormalization(momentum=0.9, epsilon=1e-5),
        keras.layers.Activation(keras.ops.square),
        *head(use_bias=False),
    ),
    "linear": lambda: sequential(keras.layers.Flatten(), keras.layers.Dense(10)),
}


def sgd(**options):
    return kp.optimizers.CoupledSGD(0.05, coupled_weight_decay=1e-3, **options)


OPTIMIZERS = {
    "plain": sgd,
    # a large epsilon: quotients of tiny gradients would magnify rounding errors
    "factors": lambda: kp.optimizers.AdamW(
        0.01, weight_decay=0.5, epsilon=0.01, rate_factors={"branch": 0.5}
    ),
    "simple": lambda: keras.optimizers.SGD(0.5),
    "averaged": lambda: sgd(
        use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2, global_clipnorm=0.3
    ),
    "all": lambda: keras.optimizers.LossScaleOptimizer(
        sgd(gradient_accumulation_steps=2, clipnorm=0.1), initial_scale=4.0, dynamic_growth_steps=3
    ),
}


def made(distribution, network, optimizer="plain"):
    keras.utils.set_random_seed(0)
    model = NETWORKS[network]()
    distribution.compile(
        model,
        optimizer=OPTIMIZERS[optimizer](),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    return model


@contextlib.contextmanager
def double_precision():
    """In float64 a few steps on several devices are those on one, to many digits. In
    float32 they are not: one ReLU that changes its sign moves weights by 1e-4.
    """
    with contextlib.ExitStack() as stack:
        # except on TensorFlow, Keras rounds what it computes in float64 to float32 by this table
        stack.enter_context(mock.patch.dict(dtypes.BIT64_TO_BIT32_DTYPE, float64="float64"))
        if BACKEND == "jax":
            import jax

            stack.enter_context(jax.enable_x64(True))
        for choose in (keras.config.set_floatx, keras.config.set_dtype_policy):
            choose("float64")
            stack.callback(choose, "float32")
        yield


def local(distribution, images, labels):
    """This process's rows of every batch as a data set, whatever is left at the end."""
    rows = distribution.rows(BATCH)
    parts = [
        (images[i : i + BATCH][rows], labels[i : i + BATCH][rows])
        for i in range(0, len(images), BATCH)
    ]
    # not from_generator: TensorFlow computes in place in the arrays that come from there
    batches = [tf.data.Dataset.from_tensors(part) for part in parts]
    present = [batch for batch, part in zip(batches, parts, strict=True) if len(part[0])]
    nothing = batches[0].take(0)
    return functools.reduce(lambda before, batch: before.concatenate(batch), present, nothing)


def fit(distribution, model, steps, images=None, **options):
    given, labels = data()
    size = BATCH // distribution.processes
    parts = local(distribution, given if images is None else images, labels)
    fixed = parts.map(
        lambda x, y: (tf.ensure_shape(x, (size, *SHAPE)), tf.ensure_shape(y, (size,)))
    )
    batches = distribution.training_data(fixed.repeat())
    return model.fit(
        batches, steps_per_epoch=1, epochs=steps, verbose=0, shuffle=False, **options
    ).history


def train(distribution, network, steps, health=False, **options):
    """Loss and accuracy of every step, the weights before the first and after the
    last, and what a health callback saw.
    """
    model = made(distribution, network, **options)
    start = model.get_weights()
    watch = kp.TrainingHealth(1, sample=data()[0][:4], report=lambda message: None)
    history = fit(distribution, model, steps, callbacks=[watch] if health else [])
    records = [
        [record.gradient_norms, record.weight_norms, record.update_norms, record.activation_means]
        for record in watch.history
    ]
    return {
        "history": history,
        "start": start,
        "weights": model.get_weights(),
        "records": records,
        "seen": [record.step for record in watch.history],
    }


def curve(distribution, **options):
    with double_precision():
        return train(distribution, **options)


def overflow(distribution):
    """Training where the part of the last device alone has a gradient that is not
    finite.
    """
    model = made(distribution, "linear", "all")
    images = data()[0]
    images[BATCH - 1 :: BATCH] = np.inf
    before = model.get_weights()
    fit(distribution, model, 2, images)
    scale = float(model.optimizer.dynamic_scale.numpy())
    return {"before": before, "after": model.get_weights(), "scale": scale}


def ragged(distribution, count):
    """Evaluation, validation in fit and predictions of `count` images."""
    model = made(distribution, "unit")
    images, labels = data(count, seed=3)

    def evaluation():
        return distribution.evaluation_data(local(distribution, images, labels), BATCH, count)

    evaluated = model.evaluate(evaluation(), return_dict=True, verbose=0)
    predicted = distribution.predict(model, images, BATCH)
    history = fit(distribution, model, 1, validation_data=evaluation())
    return {
        "evaluated": evaluated,
        "predicted": predicted,
        "validated": {name: history[f"val_{name}"][0] for name in ("loss", "accuracy")},
        "predicted_then": distribution.predict(model, images, BATCH),
    }


def attributes(distribution):
    rows = distribution.rows(BATCH)
    names = ("kind", "replicas", "processes", "process", "is_chief")
    return {name: getattr(distribution, name) for name in names} | {"rows": [rows.start, rows.stop]}


def sharded(distribution):
    """Shapes of the kernels, and of the parts that a device has."""
    return kernels_and_parts(made(distribution, "residual"))


def kernels_and_parts(layer):
    kernels = [weight for weight in layer.trainable_weights if weight.path.endswith("kernel")]
    return [[each.shape, each.value.addressable_shards[0].data.shape] for each in kernels]


def layouts(distribution):
    """The same of a stack, with a layout that has the axis of its units."""
    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((1, len(devices)), ["batch", "model"], devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*/kernel"] = None, None, None, None, "model"
    with keras.distribution.ModelParallel(layout_map=layouts).scope():
        stack = kp.UnitStack(kp.ResidualUnit(4), 3)
        stack.build((None, 4, 4, 4))
    return kernels_and_parts(stack)


def saved(distribution):
    """Weights in memory and in a file, and the config of the file's network."""
    model = made(distribution, "unit")
    fit(distribution, model, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        loaded = keras.models.load_model(path)
    weights = {"weights": model.get_weights(), "loaded": loaded.get_weights()}
    return weights | {"config": str(loaded.get_config())}


def exchanges(distribution):
    """How often a batch normalisation on torch, forward and backward, sends something
    to the other processes.
    """
    import torch

    kernel = distribution._statistics().kernel
    arrays = [data()[0][:4], np.full(3, 2, "float32"), np.ones(3, "float32")]
    tensors = [torch.tensor(array, requires_grad=True) for array in arrays]
    reduce = torch.distributed.all_reduce
    with mock.patch.object(torch.distributed, "all_reduce", side_effect=reduce) as sends:
        (kernel(*tensors, 1e-5)[0] ** 3).sum().backward()
    return sends.call_count


def error_of(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def outside(kind, batch_norm):
    """What a distribution leaves, after an error inside it."""
    before = settings()
    distribution = kp.distribution.start(kind, batch_norm=batch_norm)
    with contextlib.suppress(KeyError), distribution:
        model = made(distribution, "unit")
        inside = settings(model)
        raise KeyError
    after = settings(model)
    closed = error_of(lambda: distribution.compile(model))
    with distribution:
        twice = error_of(distribution.__enter__)
    if BACKEND != "torch":
        model = NETWORKS["normalized"]()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if distribution.is_chief:  # an exchange would wait for the other process
        model.fit(*data(), verbose=0)
    return {"before": before, "inside": inside, "after": after, "closed": closed, "twice": twice}


def settings(model=None):
    """What a distribution changes in this process, and in a model."""
    changed = [
        layer.name
        for layer in (model._flatten_layers() if model else [])
        if isinstance(layer, batch_norm.BatchNormalization)
        and layer.statistics != batch_norm.Statistics()
    ]
    return [str(keras.distribution.distribution()), tf.distribute.has_strategy(), changed]


TASKS = {
    task.__name__: task
    for task in (train, curve, overflow, ragged, attributes, sharded, layouts, saved, exchanges)
}


def setup(devices: int) -> None:
    if BACKEND == "tensorflow" and devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * devices
        )
    if BACKEND == "jax":
        import jax

        jax.config.update("jax_default_matmul_precision", "highest")


def run(kind: str, tasks: list) -> list:
    """Return the results of tasks as JSON has them."""
    results = []
    distributions: dict = {}
    for name, options in tasks:
        options = dict(options)
        batch_norm = options.pop("batch_norm", "synchronized")
        if name == "outside":
            results.append(outside(kind, batch_norm))
            continue
        if batch_norm not in distributions:
            distributions[batch_norm] = kp.distribution.start(kind, batch_norm=batch_norm)
        with distributions[batch_norm] as distribution:
            results.append(TASKS[name](distribution, **options))
    return json.loads(json.dumps(results, default=lambda array: np.asarray(array).tolist()))


if __name__ == "__main__":
    case = json.loads(sys.argv[1])
    setup(case["devices"])
    found = {kind: run(kind, tasks) for kind, tasks in case["tasks"].items()}
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)
