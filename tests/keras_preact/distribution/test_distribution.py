"""Which rows a process feeds, how uneven batches are filled up, and what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_preact as kp
from keras_preact.distribution import environment
from keras_preact.distribution.base import Distribution, padded
from tests.keras_preact.distribution.tasks import BATCH, local
from tests.keras_preact.harness import error_of

BACKEND = keras.backend.backend()


def process(i, count, replicas):
    """A distribution as process `i` of `count` has it."""
    distribution = Distribution()
    distribution.process, distribution.processes, distribution.replicas = i, count, replicas
    return distribution


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    own = (environment.ADDRESSES, environment.PROCESSES, environment.PROCESS)
    for name in (*own, "TF_CONFIG", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("count", "replicas"), [(1, 1), (1, 4), (2, 2), (2, 6), (3, 3), (4, 8)])
def test_rows_are_a_partition(count, replicas):
    for batch_size in (replicas, 5 * replicas):
        slices = [process(i, count, replicas).rows(batch_size) for i in range(count)]
        rows = [row for part in slices for row in range(batch_size)[part]]
        assert rows == list(range(batch_size))
        assert len({part.stop - part.start for part in slices}) == 1


def test_a_batch_that_does_not_divide():
    message = error_of(lambda: process(0, 2, 4).rows(10))
    assert "use 8 or 12" in message
    assert "use 4." in error_of(lambda: process(0, 2, 4).rows(3))


@pytest.mark.parametrize(("workers", "count"), [(1, 1), (1, 32), (2, 5), (2, 37), (4, 1), (4, 13)])
def test_evaluation_has_every_image_once(workers, count):
    images, labels = np.arange(1, count + 1, dtype="float32")[:, None], np.arange(count)
    batches = -(-count // BATCH)
    seen = []
    for i in range(workers):
        distribution = process(i, workers, workers)
        dataset = local(distribution, images, labels)
        filled = padded(dataset, distribution.rows(BATCH), BATCH, count)
        assert [spec.shape[0] for spec in filled.element_spec] == [BATCH // workers] * 3
        own = list(filled.as_numpy_iterator())
        assert len(own) == int(filled.cardinality()) == batches
        seen += own
    x, y, weights = (np.concatenate([batch[part] for batch in seen]) for part in range(3))
    real = weights > 0
    assert sorted(x[real][:, 0]) == list(range(1, count + 1))
    np.testing.assert_array_equal(y[real] + 1, x[real][:, 0])
    assert not x[~real].any()
    # the mean over all rows is that over the images
    np.testing.assert_allclose((weights * x[:, 0]).mean(), images.mean(), rtol=1e-6)


@pytest.mark.backend
def test_kinds_of_other_backends():
    for kind, backend in kp.distribution.KINDS:
        if (kind, BACKEND) not in kp.distribution.KINDS:
            message = error_of(lambda kind=kind: kp.distribution.start(kind))
            assert f"kind={kind!r} is for {backend}. Available on {BACKEND}: none" in message
    assert "Unknown kind" in error_of(lambda: kp.distribution.start("mirorred"))


def test_wrong_arguments():
    start = kp.distribution.start
    assert "per_replica" in error_of(lambda: start(batch_norm="global"))
    assert "takes no `devices`" in error_of(lambda: start(devices=["cpu:0"]))
    empty = tf.data.Dataset.from_tensor_slices(np.zeros((4, 2))).batch(2)
    with start() as distribution:
        assert "at least one image" in error_of(
            lambda: distribution.predict(keras.Sequential(), np.zeros((0, 2)), 4)
        )
        assert "count" in error_of(lambda: distribution.evaluation_data(empty, 2, 0))
    assert "not entered" in error_of(lambda: distribution.training_data(empty))


@pytest.mark.parametrize(
    "given",
    [
        {"PROCESSES": "2", "PROCESS": "0"},
        {"ADDRESSES": "a:1,b:2", "PROCESSES": "3", "PROCESS": "0"},
        {"ADDRESSES": "a:1,b:2", "PROCESS": "2"},
        {"ADDRESSES": "a:1,b:2", "PROCESS": "first"},
    ],
    ids=str,
)
def test_variables_that_do_not_fit(monkeypatch, given):
    for name, value in given.items():
        monkeypatch.setenv(getattr(environment, name), value)
    assert environment.ADDRESSES in error_of(kp.distribution.start)


@pytest.mark.backend
def test_processes_that_would_train_apart(monkeypatch):
    """What Ray's JaxTrainer and other launchers do not tell."""
    assert environment.ADDRESSES in error_of(lambda: kp.distribution.start("multi_worker"))
    monkeypatch.setenv(environment.ADDRESSES, "127.0.0.1:1,127.0.0.1:2")
    monkeypatch.setenv(environment.PROCESS, "1")
    assert environment.job() == environment.Job(("127.0.0.1:1", "127.0.0.1:2"), 2, 1)
    assert "announces 2 processes" in error_of(kp.distribution.start)


@pytest.mark.backend
@pytest.mark.skipif(BACKEND == "jax", reason="JAX looks for launchers by itself")
def test_processes_that_the_frameworks_own_variables_announce(monkeypatch):
    cluster = '{"cluster": {"worker": ["a:1", "b:2", "c:3"]}}'
    own = {"tensorflow": ("TF_CONFIG", cluster), "torch": ("WORLD_SIZE", "3")}
    monkeypatch.setenv(*own[BACKEND])
    assert "announces 3 processes" in error_of(kp.distribution.start)


def test_what_replicas_of_tensorflow_refuse(monkeypatch):
    outside = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    distribution = kp.distribution.start("mirrored", devices=["CPU:0"])
    distribution.replicas = 2  # as far as the checks go

    def refused(model, **options):
        return error_of(lambda: distribution.compile(model, loss="mse", **options))

    with distribution:
        assert "inside" in refused(outside)
        inside = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        assert "jit_compile" in refused(inside, jit_compile=True)
        stacked = kp.models.resnet_cifar(20, input_shape=(8, 8, 1), width_factor=0.25, stacked=True)
        layers = kp.LayerStack.from_units([stacked.segments[1].unit(i) for i in range(2)])
        of_layers = keras.Sequential([keras.Input((8, 8, 4)), layers])
        assert "stacked=False" in refused(stacked)
        assert "stacked=False" in refused(of_layers)
    monkeypatch.setattr(keras, "__version__", "3.99.0")
    assert "3.15.1" in error_of(lambda: kp.distribution.start("multi_worker"))
