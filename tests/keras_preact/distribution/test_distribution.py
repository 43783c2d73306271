"""Which rows a process feeds, how uneven batches are filled up, and what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_preact as kp
from keras_preact.distribution import environment
from keras_preact.distribution.base import Distribution, padded
from tests.keras_preact.harness import error_of

pytestmark = pytest.mark.backend

BACKEND = keras.backend.backend()


def process(i, count, replicas):
    """A distribution as process `i` of `count` has it."""
    distribution = Distribution()
    distribution.process, distribution.processes, distribution.replicas = i, count, replicas
    return distribution


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (
        environment.ADDRESSES,
        environment.PROCESSES,
        environment.PROCESS,
        "TF_CONFIG",
        "WORLD_SIZE",
    ):
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
    assert "4 devices" in message
    assert "8 or 12" in message
    assert "batch_size=10" in message
    assert "use 4." in error_of(lambda: process(0, 2, 4).rows(3))


@pytest.mark.parametrize(
    ("workers", "count"),
    [(1, 1), (1, 13), (1, 16), (2, 5), (2, 37), (4, 1), (4, 8), (4, 12), (4, 13)],
)
def test_evaluation_has_every_image_once(workers, count):
    batch_size = 8
    images, labels = np.arange(1, count + 1, dtype="float32")[:, None], np.arange(count)
    seen = []
    batches = -(-count // batch_size)
    for i in range(workers):
        rows = process(i, workers, workers).rows(batch_size)
        parts = [
            (images[start : start + batch_size][rows], labels[start : start + batch_size][rows])
            for start in range(0, count, batch_size)
        ]
        given = [part for part in parts if len(part[0])]
        spec = (tf.TensorSpec((None, 1), tf.float32), tf.TensorSpec((None,), tf.int64))
        dataset = tf.data.Dataset.from_generator(
            lambda given=given: iter(given), output_signature=spec
        )
        filled = padded(dataset, rows, batch_size, count)
        assert int(filled.cardinality()) == batches
        assert [spec.shape[0] for spec in filled.element_spec] == [batch_size // workers] * 3
        own = list(filled.as_numpy_iterator())
        assert len(own) == batches
        seen.append(own)
    x, y, weights = (
        np.concatenate([batch[part] for own in seen for batch in own]) for part in range(3)
    )
    assert len(weights) == batches * batch_size
    real = weights > 0
    assert sorted(x[real][:, 0]) == list(range(1, count + 1))
    np.testing.assert_array_equal(y[real] + 1, x[real][:, 0])
    assert not x[~real].any()
    # the mean over all rows is that over the images
    np.testing.assert_allclose((weights * x[:, 0]).mean(), images.mean(), rtol=1e-6)


def test_kinds_of_other_backends():
    for kind, backend in kp.distribution.KINDS:
        if (kind, BACKEND) not in kp.distribution.KINDS:
            message = error_of(lambda kind=kind: kp.distribution.start(kind))
            assert f"kind={kind!r} is for {backend}" in message
            assert f"Available on {BACKEND}: none" in message
    assert "Unknown kind" in error_of(lambda: kp.distribution.start("mirorred"))


def test_wrong_arguments():
    assert "per_replica" in error_of(lambda: kp.distribution.start(batch_norm="global"))
    assert "takes no `devices`" in error_of(lambda: kp.distribution.start(devices=["cpu:0"]))
    with kp.distribution.start() as distribution:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        assert "nothing to predict" in error_of(
            lambda: distribution.predict(model, np.zeros((0, 2)), 4)
        )
        empty = tf.data.Dataset.from_tensor_slices(np.zeros((4, 2))).batch(2)
        assert "count" in error_of(lambda: distribution.evaluation_data(empty, 2, 0))
    assert "not entered" in error_of(lambda: distribution.training_data(empty))


@pytest.mark.parametrize(
    "given",
    [
        {environment.PROCESSES: "2", environment.PROCESS: "0"},
        {environment.ADDRESSES: "a:1,b:2", environment.PROCESSES: "3", environment.PROCESS: "0"},
        {environment.ADDRESSES: "a:1,b:2", environment.PROCESS: "2"},
        {environment.ADDRESSES: "a:1,b:2", environment.PROCESS: "first"},
    ],
    ids=["no addresses", "other number", "no such process", "no number"],
)
def test_variables_that_do_not_fit(monkeypatch, given):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert environment.ADDRESSES in error_of(kp.distribution.start)


def test_processes_that_would_train_apart(monkeypatch):
    """What Ray's JaxTrainer and other launchers do not tell."""
    monkeypatch.setenv(environment.ADDRESSES, "127.0.0.1:1,127.0.0.1:2")
    monkeypatch.setenv(environment.PROCESS, "1")
    assert environment.job() == environment.Job(("127.0.0.1:1", "127.0.0.1:2"), 2, 1)
    assert "announces 2 processes" in error_of(kp.distribution.start)


@pytest.mark.skipif(BACKEND == "jax", reason="JAX looks for launchers by itself")
def test_processes_that_the_frameworks_own_variables_announce(monkeypatch):
    own = {
        "tensorflow": ("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:2", "c:3"]}}'),
        "torch": ("WORLD_SIZE", "3"),
    }
    monkeypatch.setenv(*own[BACKEND])
    assert "announces 3 processes" in error_of(kp.distribution.start)


def test_no_launcher():
    message = error_of(lambda: kp.distribution.start("multi_worker"))
    assert message.startswith("The processes ")
    assert environment.ADDRESSES in message


@pytest.mark.skipif(BACKEND != "tensorflow", reason="what TensorFlow's replicas cannot do")
class TestRefused:
    def test_models(self):
        strategy = ["CPU:0"]
        outside = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        distribution = kp.distribution.start("mirrored", devices=strategy)
        distribution.replicas = 2  # as far as the checks go
        with distribution:
            assert "inside" in error_of(lambda: distribution.compile(outside, loss="mse"))
            inside = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            assert "jit_compile" in error_of(
                lambda: distribution.compile(inside, loss="mse", jit_compile=True)
            )
            stacked = kp.models.resnet_cifar(
                20, input_shape=(8, 8, 1), width_factor=0.25, stacked=True
            )
            message = error_of(lambda: distribution.compile(stacked, loss="mse"))
            assert "stacked=False" in message
            assert "per_replica" in message

    def test_versions_of_keras(self, monkeypatch):
        monkeypatch.setattr(keras, "__version__", "3.99.0")
        assert "3.15.1" in error_of(lambda: kp.distribution.start("multi_worker"))
