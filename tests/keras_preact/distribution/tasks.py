"""What one process of a test does: `python tasks.py CASE RESULTS`, a JSON in and one
out.

CASE: `kind`, `devices` (virtual ones of this process) and `tasks`, a list of `[name,
    options]`; the result has one for each.
"""

import functools
import json
import os
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

import keras_preact as kp
from keras_preact.layers import batch_norm

BATCH = 16
SIZE = 8


def data(count=BATCH * 5, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count)
    images = rng.normal(size=(count, SIZE, SIZE, 3)) + labels[:, None, None, None] / 5
    return images.astype("float32"), labels.astype("int32")


def residual(**options):
    return kp.models.resnet_cifar(8, input_shape=(SIZE, SIZE, 3), width_factor=0.25, **options)


def stacked(**options):
    return kp.models.resnet_cifar(
        20, input_shape=(SIZE, SIZE, 3), width_factor=0.25, stacked=True, **options
    )


def unit():
    inputs = keras.Input((SIZE, SIZE, 3))
    x = kp.ResidualUnit(4, strides=2)(inputs)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))


def normalized():
    """What `reference.normalized` computes."""
    layers = keras.layers
    normalization = batch_norm.BatchNormalization(momentum=0.9, epsilon=1e-5)
    rest = [layers.GlobalAveragePooling2D(), layers.Dense(10, use_bias=False)]
    conv = layers.Conv2D(4, 1, use_bias=False)
    return keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 3)),
            conv,
            normalization,
            layers.Activation(keras.ops.square),
            *rest,
        ]
    )


def linear():
    return keras.Sequential(
        [keras.Input((SIZE, SIZE, 3)), keras.layers.Flatten(), keras.layers.Dense(10)]
    )


NETWORKS = {
    "residual": residual,
    "stacked": stacked,
    "loop": lambda: kp.models.resnet_cifar(
        20, input_shape=(SIZE, SIZE, 3), width_factor=0.25, stacked=True, execution="loop"
    ),
    "unit": unit,
    "normalized": normalized,
    "linear": linear,
}


def sgd(**options):
    return kp.optimizers.CoupledSGD(0.05, coupled_weight_decay=1e-3, **options)


OPTIMIZERS = {
    "plain": sgd,
    "simple": lambda: keras.optimizers.SGD(0.5),
    "averaged": lambda: sgd(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        sgd(global_clipnorm=0.3), initial_scale=4.0
    ),
    "all": lambda: keras.optimizers.LossScaleOptimizer(
        sgd(gradient_accumulation_steps=2, clipnorm=0.1), initial_scale=4.0, dynamic_growth_steps=3
    ),
}


def made(distribution, network, optimizer="plain", policy="float32", **options):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = NETWORKS[network]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    chosen = OPTIMIZERS[optimizer]()
    distribution.compile(
        model, optimizer=chosen, loss=loss, weighted_metrics=["accuracy"], **options
    )
    keras.config.set_dtype_policy("float32")
    return model


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
    return functools.reduce(
        lambda before, batch: before.concatenate(batch), present, batches[0].take(0)
    )


def fit(distribution, model, steps, images=None, **options):
    given, labels = data()
    size = BATCH // distribution.processes
    parts = local(distribution, given if images is None else images, labels)
    fixed = parts.map(
        lambda x, y: (tf.ensure_shape(x, (size, SIZE, SIZE, 3)), tf.ensure_shape(y, (size,)))
    )
    batches = distribution.training_data(fixed.repeat())
    return model.fit(
        batches, steps_per_epoch=1, epochs=steps, verbose=0, shuffle=False, **options
    ).history


def train(distribution, network, steps, health=0, **options):
    """Loss and accuracy of every step, the weights before the first and behind the
    last, and what a health callback saw.
    """
    model = made(distribution, network, **options)
    start = model.get_weights()
    watch = kp.TrainingHealth(health or 1, sample=data()[0][:4], report=lambda message: None)
    history = fit(distribution, model, steps, callbacks=[watch] if health else [])
    records = [
        [
            [record.loss],
            record.gradient_norms,
            record.weight_norms,
            record.update_norms,
            record.activation_means,
        ]
        for record in watch.history
    ]
    seen = [record.step for record in watch.history]
    return {
        "history": history,
        "start": start,
        "weights": model.get_weights(),
        "records": records,
        "seen": seen,
    }


def overflow(distribution):
    """Training where the part of the last device alone has a gradient that is not
    finite.
    """
    model = made(distribution, "linear", "all")
    images = data()[0]
    images[BATCH - 1 :: BATCH] = np.inf
    before = model.get_weights()
    fit(distribution, model, 2, images)
    return {
        "before": before,
        "after": model.get_weights(),
        "scale": float(model.optimizer.dynamic_scale.numpy()),
    }


def ragged(distribution, count):
    """Evaluation, validation in fit and predictions of `count` images."""
    model = made(distribution, "residual")
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
    """The kernels of which no device has the whole."""
    model = made(distribution, "residual")
    kernels = [weight for weight in model.trainable_weights if weight.path.endswith("kernel")]
    return [
        [list(kernel.shape), list(kernel.value.addressable_shards[0].data.shape)]
        for kernel in kernels
    ]


def saved(distribution):
    """Weights in memory and in a file, and the file's network outside of the
    distribution.
    """
    model = made(distribution, "unit")
    fit(distribution, model, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        loaded = keras.models.load_model(path)
    return {
        "weights": model.get_weights(),
        "loaded": loaded.get_weights(),
        "config": str(loaded.get_config()),
    }


def refused(distribution, network, **options):
    try:
        made(distribution, network, **options)
    except ValueError as error:
        return str(error)
    return None


def exchanges(distribution):
    """How often a batch normalisation, forward and backward, sends something to the
    other processes, and how many arrays.
    """
    model = made(distribution, "normalized")
    [layer] = (each for each in model.layers if isinstance(each, batch_norm.BatchNormalization))
    kernel = layer.statistics.kernel
    images = data()[0][: BATCH // distribution.processes]
    gamma, beta = np.full(3, 2, "float32"), np.ones(3, "float32")
    return EXCHANGES[keras.backend.backend()](distribution, kernel, images, gamma, beta)


def _on_tensorflow(distribution, kernel, *arrays):
    @tf.function
    def step():
        def replica():
            tensors = [tf.constant(array) for array in arrays]
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                total = tf.reduce_sum(kernel(*tensors, 1e-5)[0] ** 3)
            return tape.gradient(total, tensors)

        return distribution._strategy.run(replica)

    graph = step.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
    sends = [node.op for node in nodes if node.op.startswith("Collective")]
    return [len(sends), len(sends)]


def _on_jax(distribution, kernel, *arrays):
    import jax

    def total(*given):
        return (kernel(*given, 1e-5)[0] ** 3).sum()

    mesh = distribution._distribution.device_mesh.backend_mesh
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    images = jax.make_array_from_process_local_data(rows, arrays[0])
    gradients = jax.jit(jax.grad(total, (0, 1, 2))).lower(images, *arrays[1:]).compile()
    sends = [line for line in gradients.as_text().splitlines() if " all-reduce" in line]
    sent = [line.split(" all-reduce")[0].split("=")[1].count("f32[") for line in sends]
    return [len(sends), sum(sent)]


def _on_torch(distribution, kernel, *arrays):
    from unittest import mock

    import torch

    tensors = [torch.tensor(array, requires_grad=True) for array in arrays]
    reduce = torch.distributed.all_reduce
    with mock.patch.object(torch.distributed, "all_reduce", side_effect=reduce) as sends:
        (kernel(*tensors, 1e-5)[0] ** 3).sum().backward()
    return [sends.call_count, sends.call_count]


EXCHANGES = {"tensorflow": _on_tensorflow, "jax": _on_jax, "torch": _on_torch}

TASKS = {
    task.__name__: task
    for task in (train, overflow, ragged, attributes, sharded, saved, refused, exchanges)
}


def outside(kind, batch_norm):
    """What a distribution leaves, after an error inside it."""
    before = settings()
    distribution = kp.distribution.start(kind, batch_norm=batch_norm)
    messages = {}
    try:
        with distribution:
            model = made(distribution, "unit")
            inside = settings(model)
            raise KeyError
    except KeyError:
        pass
    after = settings(model)
    if distribution.replicas > 1:
        try:
            distribution.compile(model)
        except ValueError as error:
            messages["closed"] = str(error)
        try:
            with distribution:
                pass
            with distribution, distribution:
                pass
        except ValueError as error:
            messages["twice"] = str(error)
    images, labels = data()
    alone = normalized()
    alone.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    alone.fit(images, labels, verbose=0)
    if keras.backend.backend() == "torch" and distribution.is_chief:
        model.fit(images, labels, verbose=0)  # would wait for the other process
    return messages | {"before": before, "inside": inside, "after": after}


def settings(model=None):
    """What a distribution changes in this process, and in a model."""
    layers = model._flatten_layers() if model else []
    changed = [
        layer.name
        for layer in layers
        if isinstance(layer, batch_norm.BatchNormalization)
        and layer.statistics != batch_norm.Statistics()
    ]
    return [str(keras.distribution.distribution()), tf.distribute.has_strategy(), changed]


def setup(devices: int) -> None:
    if keras.backend.backend() == "tensorflow" and devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * devices
        )
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_default_matmul_precision", "highest")


def run(kind: str, tasks: list) -> list:
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
    return results


def plain(results):
    """Results as JSON has them."""
    return json.loads(json.dumps(results, default=lambda array: np.asarray(array).tolist()))


if __name__ == "__main__":
    case = json.loads(sys.argv[1])
    setup(case["devices"])
    found = plain(run(case["kind"], case["tasks"]))
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)
