"""Steps that are computed together on the device are the steps of an ordinary training
of the bare network.
"""

import dataclasses
import functools
import re

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.training.reproduce import tiny
from training import backends
from training.data import crops
from training.data.resident import Cut, Stream
from training.reproduce.on_device import OnDevice
from training.reproduce.run import build

BACKEND = keras.backend.backend()
IMAGES = tiny.images()
TOGETHER, FIRST = 3, 5
TRIALS = {"plain": tiny.PLAIN, "dropout": tiny.DROPOUT}


def padded() -> np.ndarray:
    return crops.PADDINGS["mean"](IMAGES.train_x, IMAGES.mean)


def compile_(model, **options) -> None:
    rate = kp.schedules.step_schedule(0.1, (6,), warmup_steps=2)
    optimizer = kp.optimizers.CoupledSGD(rate, momentum=0.9, coupled_weight_decay=1e-4)
    jit = backends.jit_compile("auto")
    model.compile(
        optimizer,
        kp.losses.SparseCategoricalCrossentropy(),
        metrics=["accuracy"],
        jit_compile=jit,
        **options,
    )
    optimizer.build(model.trainable_variables)


def network(name: str) -> keras.Model:
    keras.utils.set_random_seed(0)
    return build(TRIALS[name], IMAGES)


def state(net: keras.Model, model: keras.Model) -> list[np.ndarray]:
    return [
        np.array(keras.ops.convert_to_numpy(each))
        for each in [*net.variables, *model.optimizer.variables]
    ]


def on_device(
    name: str, together: int, executions: int
) -> tuple[list[np.ndarray], list[dict], int]:
    """Train `executions * together` steps; return what they changed, the logs of each
    execution, and the calls of `fit`.
    """
    net = network(name)
    model = OnDevice(net, Cut(padded()), together)
    compile_(model, steps_per_execution=model.together)
    model.evaluate(
        np.zeros(2, "int32"), np.zeros(2, "int32"), batch_size=2, verbose=0
    )  # builds the metrics
    stream = Stream(IMAGES.train_y, tiny.BATCH, 7, augment=True)
    found: list[dict] = []
    collect = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: found.append(dict(logs))
    )
    last = FIRST + executions * together
    batches = model.batches(stream, FIRST, last)
    per_epoch = (last - FIRST) // model.steps_per_batch
    seeds = [
        keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: seed_torch(batch))
    ]
    model.fit(
        batches, steps_per_epoch=per_epoch, shuffle=False, verbose=0, callbacks=[*seeds, collect]
    )
    return state(net, model), found, per_epoch


def seed_torch(step: int) -> None:
    if BACKEND == "torch":  # whose dropout has no state in the model
        import torch

        torch.manual_seed(step)


def bare(name: str, steps: int) -> tuple[list[np.ndarray], dict]:
    """Train the network alone, batch by batch, on crops that NumPy cuts out; return the
    means over the batches, too.
    """
    net = network(name)
    compile_(net)
    stream = Stream(IMAGES.train_y, tiny.BATCH, 7, augment=True)
    around = padded()
    logs = []
    for step in range(FIRST, FIRST + steps):
        codes, labels = stream.batch(step)
        pixels = []
        for code in codes.tolist():
            number, place = divmod(code, 162)
            top, left, flip = place // 18, place // 2 % 9, place % 2
            crop = around[number, top : top + 8, left : left + 8]
            pixels.append(crop[:, ::-1] if flip else crop)
        seed_torch(step - FIRST)
        logs.append(
            net.train_on_batch(np.stack(pixels).astype("float32"), labels, return_dict=True)
        )
    return state(net, net), {
        key: float(np.mean([each[key] for each in logs])) for key in ("loss", "accuracy")
    }


def test_steps_together_are_single_steps():
    """With dropout: of all that training changes, the random numbers of every step,
    too.
    """
    name, executions = "dropout", 2
    steps = executions * TOGETHER
    single, single_logs, _ = on_device(name, 1, steps)
    together, logs, calls = on_device(name, TOGETHER, executions)
    expected, expected_logs = bare(name, steps)
    assert len(single_logs) == steps
    # on JAX a batch holds an execution; TensorFlow counts steps, and calls back behind each
    # execution
    assert (calls, len(logs)) == {"jax": (2, 2), "tensorflow": (steps, 2), "torch": (steps, steps)}[
        BACKEND
    ]
    for found in (single, together):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    for key in ("loss", "accuracy"):
        assert float(single_logs[-1][key]) == pytest.approx(expected_logs[key], rel=1e-4)
        assert float(logs[-1][key]) == pytest.approx(expected_logs[key], rel=1e-4)
        half = logs[0 if BACKEND != "torch" else TOGETHER - 1]
        assert float(half[key]) == pytest.approx(float(single_logs[TOGETHER - 1][key]), rel=1e-4)
    # it was no small change that they agree on
    before = [
        np.array(keras.ops.convert_to_numpy(each)) for each in network(name).trainable_variables
    ]
    after = network_values(together, name)
    assert all(np.abs(one - other).max() > 1e-3 for one, other in zip(before, after, strict=True))


def network_values(found: list[np.ndarray], name: str) -> list[np.ndarray]:
    """Return those of the values that belong to trainable variables."""
    variables = network(name).variables
    return [value for value, variable in zip(found, variables, strict=False) if variable.trainable]


def test_batches():
    stream = Stream(IMAGES.train_y, tiny.BATCH, 7, augment=True)
    model = OnDevice(network("plain"), Cut(padded()), 3)
    found = list(model.batches(stream, 3, 9))
    expected = [stream.batch(step) for step in range(3, 9)]
    if BACKEND == "jax":
        expected = [
            tuple(np.stack(part) for part in zip(*expected[i : i + 3], strict=True)) for i in (0, 3)
        ]
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


def test_only_the_network_is_trained():
    net = network("plain")
    model = OnDevice(net, Cut(padded()))
    model(np.zeros(2, "int32"))
    assert [id(each) for each in model.trainable_variables] == [
        id(each) for each in net.trainable_variables
    ]


class Seen(Exception):
    """Holds shapes and types of what a step of training gets."""


@pytest.mark.skipif(
    BACKEND != "jax",
    reason="other backends have no loop over steps in the graph, or compile as they run",
)
def test_steps_together_lower_for_a_gpu(monkeypatch):
    """Where none is at hand: the whole loop is one program, which asks nothing of the
    host and convolves in bfloat16.
    """
    import jax

    class Watched(OnDevice):
        def train_step(self, *arguments):
            raise Seen(
                jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), arguments)
            )

    arguments = tiny.PLAIN.arguments | {"depth": 26, "stacked": True}
    net = build(dataclasses.replace(tiny.PLAIN, arguments=arguments), IMAGES, "mixed_bfloat16")
    model = Watched(net, Cut(padded()), TOGETHER)
    compile_(model)
    model.evaluate(np.zeros(2, "int32"), np.zeros(2, "int32"), batch_size=2, verbose=0)
    batches = model.batches(Stream(IMAGES.train_y, tiny.BATCH, 7, augment=True), 0, TOGETHER)
    with pytest.raises(Seen) as seen:
        model.fit(batches, shuffle=False, verbose=0)
    (shapes,) = seen.value.args

    monkeypatch.setattr(
        jax, "default_backend", lambda: "gpu"
    )  # what convolutions in a loop are made of depends on it
    step = functools.partial(OnDevice.train_step, model)
    text = jax.jit(step).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert (
        text.count("stablehlo.while") == 1 + 2 * 3
    )  # the steps; there and back through each stage
    convolutions = re.findall(r"stablehlo\.convolution.* : (.*)", text)
    # forward, back to images, but not to the pixels, and to weights: of the stem, of each stage's
    # first unit and of its others
    assert len(convolutions) == 3 * (1 + 3 * 2 * 2) - 1
    assert all(re.findall(r"x([a-z]+\d+)>", types) == ["bf16"] * 3 for types in convolutions)
    assert "custom_call" not in text  # as calls of the host would be
