"""Several devices and processes that train together: the losses and weights of one
device, to the rows of the data.
"""

import functools
import json

import keras
import numpy as np
import pytest

from keras_preact.layers.batch_norm import BatchNormalization, Statistics
from tests.keras_preact.distribution import processes, tasks

pytestmark = pytest.mark.backend

BACKEND = keras.backend.backend()

#: Kind, devices of a process and processes, by backend.
SETUPS = {
    "jax": [("data_parallel", 2, 1), ("model_parallel", 2, 1), ("multi_worker", 2, 2)],
    "tensorflow": [("mirrored", 2, 1), ("multi_worker", 1, 2)],
    "torch": [("multi_worker", 1, 2)],
}[BACKEND]
MARKS = {"tensorflow": pytest.mark.process, "jax": pytest.mark.soak, "torch": ()}[BACKEND]

#: In float64.
ROUNDING = 1e-9

NORMALIZED = {"network": "normalized", "optimizer": "simple", "steps": 5}
TASKS = {
    "attributes": ("attributes", {}),
    "curve": ("curve", {"network": "residual", "optimizer": "factors", "steps": 4}),
    "averaged": ("curve", {"network": "unit", "optimizer": "averaged", "steps": 4}),
    "all": ("curve", {"network": "unit", "optimizer": "all", "steps": 6, "health": True}),
    "synchronized": ("train", NORMALIZED),
    "per_replica": ("train", NORMALIZED | {"batch_norm": "per_replica"}),
    "overflow": ("overflow", {}),
    "ragged": ("ragged", {"count": 37}),
    "saved": ("saved", {"batch_norm": "per_replica"}),
    "outside": ("outside", {}),
}
if BACKEND != "tensorflow":  # whose replicas cannot exchange statistics inside a scan
    TASKS["curve"][1]["network"] = "stacked"
if BACKEND == "torch":
    TASKS["exchanges"] = ("exchanges", {})


def tasks_of(setup) -> dict:
    """What a set-up does, by name."""
    if setup[0] != "model_parallel":
        return TASKS
    kept = {name: TASKS[name] for name in ("attributes", "curve", "ragged")}
    return kept | {name: (name, {}) for name in ("sharded", "layouts")}


def cases(*names):
    """Set-ups with each of the tasks that they have; the first test of a set-up runs
    all of them.
    """
    found = [
        pytest.param(
            setup,
            name,
            id=f"{'-'.join(map(str, setup))}-{name}",
            marks=MARKS if setup[0] == "multi_worker" else (),
        )
        for setup in SETUPS
        for name in names
        if name in tasks_of(setup)
    ]
    return pytest.mark.parametrize(("setup", "name"), found)


def found(setup, name) -> list:
    """What each process of a set-up found for a task. The same processes do the tasks of
    every kind with as many devices.
    """
    kind, *sizes = setup
    given = {each[0]: tasks_of(each) for each in SETUPS if list(each[1:]) == sizes}
    of_each = json.dumps({each: list(tasks.values()) for each, tasks in given.items()})
    place = list(given[kind]).index(name)
    return [result[kind][place] for result in processes.run(of_each, *sizes)]


@functools.cache
def alone(name):
    """The same on one device, in this process."""
    [result] = tasks.run("none", [TASKS[name]])
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


@cases("curve", "averaged", "all")
def test_trains_as_one_device(setup, name):
    wanted = alone(name)
    assert wanted["weights"] != wanted["start"]
    for result in found(setup, name):
        close(result["start"], wanted["start"], 0)
        close(result["history"], wanted["history"], ROUNDING)
        close(result["weights"], wanted["weights"], ROUNDING)
        assert result["seen"] == wanted["seen"]
        close(result["records"], wanted["records"], 1e-5)  # in float32


@cases("synchronized", "per_replica")
def test_batch_statistics(setup, name, monkeypatch):
    """In float32, for which there are kernels: those of one device that takes them over
    the whole batch, or over the part of every replica.
    """
    _, devices, count = setup
    groups = devices * count if name == "per_replica" else 1
    monkeypatch.setattr(BatchNormalization, "statistics", Statistics(groups=groups))
    [wanted] = tasks.run("none", [("train", NORMALIZED)])
    for result in found(setup, name):
        close(result["history"]["loss"], wanted["history"]["loss"], 2e-5)
        close(result["weights"], wanted["weights"], 2e-5)


@cases("exchanges")
def test_a_normalisation_sends_one_array_forward_and_one_backward(setup, name):
    """The latency of each is what a small network pays for processes."""
    assert found(setup, name) == [2, 2]


@cases("overflow")
def test_an_overflow_on_one_device_skips_the_step_on_all(setup, name):
    for result in found(setup, name):
        close(result["after"], result["before"], 0)
        assert result["scale"] == 1.0  # halved twice


@cases("ragged")
def test_uneven_batches(setup, name):
    """Every image counts once, in evaluation, in validation and in predictions, on
    every process.
    """
    wanted = alone(name)
    _, labels = tasks.data(TASKS[name][1]["count"], seed=3)
    for result in found(setup, name):
        close(result["predicted"], wanted["predicted"], 1e-5)
        for figures, logits in (("evaluated", "predicted"), ("validated", "predicted_then")):
            scores = np.array(result[logits])
            losses = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(labels)), labels]
            accuracy = (scores.argmax(1) == labels).mean()
            close(result[figures], {"accuracy": accuracy, "loss": losses.mean()}, 1e-5)


@cases("saved")
def test_saved_models_know_nothing_of_it(setup, name):
    for result in found(setup, name):
        close(result["loaded"], result["weights"], 0)
        assert "'synchronized': True" not in result["config"]
        close(result["weights"], found(setup, name)[0]["weights"], 0)


@cases("outside")
def test_it_leaves_everything_as_it_was(setup, name):
    for result in found(setup, name):
        assert result["inside"] != result["before"]
        assert result["after"] == result["before"]
        assert "not entered" in result["closed"]
        assert "enter it once" in result["twice"]


@cases("sharded", "layouts")
def test_kernels_are_split_over_their_output_channels(setup, name):
    [kernels] = found(setup, name)
    for shape, part in kernels:
        assert part == [*shape[:-1], shape[-1] // 2]
