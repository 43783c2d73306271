"""Several devices and processes that train together: the losses and weights of one
device, to the rows of the data.
"""

import functools
import json

import keras
import numpy as np
import pytest

from tests.keras_preact.distribution import processes, reference, tasks

pytestmark = pytest.mark.backend

BACKEND = keras.backend.backend()

#: Backend to (kind, devices of a process, processes).
SETUPS = {
    "jax": [
        ("data_parallel", 2, 1),
        ("data_parallel", 4, 1),
        ("model_parallel", 2, 1),
        ("multi_worker", 2, 2),
    ],
    "tensorflow": [("mirrored", 2, 1), ("mirrored", 4, 1), ("multi_worker", 1, 2)],
    "torch": [("multi_worker", 1, 2)],
}

SLOW = [("data_parallel", 4, 1), ("multi_worker", 2, 2), ("mirrored", 4, 1)]
if BACKEND == "tensorflow":
    SLOW.append(("multi_worker", 1, 2))

STACKED = {
    "jax": {"network": "stacked", "steps": 3},
    "tensorflow": {"network": "loop", "steps": 3},
    "torch": {"network": "stacked", "steps": 3},
}

TRAININGS = {
    "curve": {"network": "residual", "steps": 50},
    "stacked": STACKED[BACKEND],
    "averaged": {"network": "unit", "optimizer": "averaged", "steps": 4},
    "scaled": {"network": "unit", "optimizer": "scaled", "steps": 4},
    "all": {"network": "unit", "optimizer": "all", "steps": 6, "health": 1},
    "half": {"network": "unit", "policy": "mixed_float16", "steps": 3},
}
NORMALIZED = {"network": "normalized", "optimizer": "simple", "steps": 5}
MOST = {
    "attributes": ("attributes", {}),
    **{name: ("train", options) for name, options in TRAININGS.items()},
    "synchronized": ("train", NORMALIZED),
    "per_replica": ("train", NORMALIZED | {"batch_norm": "per_replica"}),
    "overflow": ("overflow", {}),
    "ragged 37": ("ragged", {"count": 37}),
    "ragged 5": ("ragged", {"count": 5}),
    "saved": ("saved", {"batch_norm": "per_replica"}),
    "outside": ("outside", {}),
}
TASKS = {setup: MOST for setup in SETUPS[BACKEND]}
TASKS[SETUPS[BACKEND][0]] = (
    MOST
    if BACKEND == "torch"
    else {name: MOST[name] for name in ("attributes", "curve", "outside")}
)
for setup in SETUPS[BACKEND]:
    if setup[0] == "multi_worker":
        TASKS[setup] = TASKS[setup] | {"exchanges": ("exchanges", {})}
if BACKEND == "jax":
    kept = ("attributes", "curve", "ragged 5")
    TASKS["model_parallel", 2, 1] = {name: MOST[name] for name in kept} | {
        "sharded": ("sharded", {})
    }


def cases(*names):
    """Setups with each of the tasks that they have; the first test of a setup runs all
    of them.
    """
    found = [
        pytest.param(
            setup,
            name,
            id=f"{'-'.join(map(str, setup))}-{name}",
            marks=pytest.mark.soak if setup in SLOW else (),
        )
        for setup, own in TASKS.items()
        for name in names
        if name in own
    ]
    return pytest.mark.parametrize(("setup", "name"), found)


def found(setup, name) -> list:
    """What each process of a setup found for a task."""
    kind, devices, count = setup
    given = json.dumps([list(task) for task in TASKS[setup].values()])
    results = processes.once(kind, given, devices, count)
    return [result[list(TASKS[setup]).index(name)] for result in results]


@functools.cache
def alone(name):
    """The same on one device, in this process."""
    task, options = MOST[name]
    kept = {key: value for key, value in options.items() if key != "batch_norm"}
    [result] = tasks.plain(tasks.run("none", [[task, kept]]))
    return result


def close(one, other, tolerance):
    for a, b in zip(keras.tree.flatten(one), keras.tree.flatten(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@cases("attributes")
def test_every_row_of_a_batch_is_fed_once(setup, name):
    kind, devices, count = setup
    results = found(setup, name)
    rows = [row for result in results for row in range(*result["rows"])]
    assert rows == list(range(tasks.BATCH))
    assert [result["process"] for result in results] == list(range(count))
    assert [result["is_chief"] for result in results] == [i == 0 for i in range(count)]
    replicas = 1 if kind == "model_parallel" else devices * count
    assert {(result["kind"], result["processes"], result["replicas"]) for result in results} == {
        (kind, count, replicas)
    }


@cases("curve", "stacked", "averaged", "scaled", "all")
def test_trains_as_one_device(setup, name):
    wanted = alone(name)
    assert wanted["weights"] != wanted["start"]
    for result in found(setup, name):
        close(result["start"], wanted["start"], 0)
        close(result["history"], wanted["history"], 1e-4)
        close(result["weights"], wanted["weights"], 1e-4)
        assert result["seen"] == wanted["seen"]
        close(result["records"], wanted["records"], 1e-4)


@cases("half")
def test_half_precision(setup, name):
    """Roundings differ, and grow with each step."""
    wanted = alone(name)
    for result in found(setup, name):
        close(result["history"]["loss"], wanted["history"]["loss"], 1e-2)
        close(result["weights"], wanted["weights"], 2e-2)


@cases("synchronized", "per_replica")
def test_batch_statistics(setup, name):
    _, devices, count = setup
    for result in found(setup, name):
        network = reference.Normalized(
            result["start"], devices * count if name == "per_replica" else 1
        )
        images, labels = (
            array.reshape(-1, tasks.BATCH, *array.shape[1:]) for array in tasks.data()
        )
        losses = [network.step(x, y, rate=0.5) for x, y in zip(images, labels, strict=True)]
        close(result["history"]["loss"], losses, 2e-5)
        close(result["weights"], [weight.tolist() for weight in network.weights], 2e-5)


@cases("exchanges")
def test_a_normalisation_sends_one_array_forward_and_one_backward(setup, name):
    """The latency of each is what a small network pays for processes."""
    assert found(setup, name) == [[2, 2]] * setup[2]


@cases("overflow")
def test_an_overflow_on_one_device_skips_the_step_on_all(setup, name):
    for result in found(setup, name):
        close(result["after"], result["before"], 0)
        assert result["scale"] == 1.0  # halved twice


@cases("ragged 37", "ragged 5")
def test_uneven_batches(setup, name):
    """Every image counts once, in evaluation, in validation and in predictions, on
    every process.
    """
    wanted = alone(name)
    _, labels = tasks.data(MOST[name][1]["count"], seed=3)
    for result in found(setup, name):
        close(result["predicted"], wanted["predicted"], 1e-5)
        for figures, logits in (("evaluated", "predicted"), ("validated", "predicted_then")):
            scores = np.array(result[logits])
            assert len(scores) == len(labels)
            losses = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(labels)), labels]
            right = scores.argmax(1) == labels
            close(
                [result[figures][key] for key in ("loss", "accuracy")],
                [losses.mean(), right.mean()],
                1e-5,
            )


@cases("saved")
def test_saved_models_know_nothing_of_it(setup, name):
    for result in found(setup, name):
        close(result["loaded"], result["weights"], 0)
        assert "'synchronized': True" not in result["config"]
        close(result["weights"], found(setup, name)[0]["weights"], 0)


@cases("outside")
def test_nothing_is_left_behind_it(setup, name):
    for result in found(setup, name):
        assert result["inside"] != result["before"]
        assert result["after"] == result["before"]
        assert "not entered" in result["closed"]
        assert "enter it once" in result["twice"]


@cases("sharded")
def test_kernels_are_split_over_their_output_channels(setup, name):
    [kernels] = found(setup, name)
    for shape, part in kernels:
        assert part == [*shape[:-1], shape[-1] // 2]
