"""No pipeline is autotuned: an autotuned iterator that is dropped can freeze the process
for a minute.
"""

import types

import pytest

import keras_preact as kp
from tests.training import images as pictures
from tests.training.calls import run_evaluate, run_train
from training.config import Data
from training.data import broken, evaluation_batches, load
from training.data.pipelines import training_stream
from training.run.callbacks import Count
from training.run.fit import Fit


@pytest.fixture
def autotuned(monkeypatch):
    """A list with one entry for each iterator that is made: whether its pipeline is
    autotuned.
    """
    import tensorflow as tf

    found = []
    plain = tf.data.Dataset.__iter__  # tests/conftest.py has replaced it to switch autotuning off

    def note(dataset):
        found.append(dataset.options().autotune.enabled)
        return plain(dataset)

    monkeypatch.setattr(tf.data.Dataset, "__iter__", note)
    return found


def test_of_a_run_from_its_training_to_its_evaluation(tmp_path, autotuned):
    """The run has mixed and held-out images, an average of the weights, and the health."""
    options = "--data.holdout 200 --data.mixup 0.2 --optimizer.ema 0.9 --health 1"
    run = run_train(tmp_path / "run", options, "--schedule.length 2")
    run_evaluate(run, "--save-samples", 1)
    # training, health, validation and its statistics; test and held-out images, samples
    assert len(autotuned) >= 6
    assert set(autotuned) == {False}


def test_of_a_folder_and_its_broken_images(tmp_path, autotuned):
    pictures.write_folder(tmp_path, images=2)
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"no image")
    data = load(Data("folder", dir=tmp_path, skip_broken=True))
    broken.check(data.train.paths)
    assert len(autotuned) == 2  # all images, and the training images again
    assert set(autotuned) == {False}


def is_autotuned(dataset) -> bool:
    return dataset.options().autotune.enabled is not False


def test_of_training():
    """The test includes a stream that starts in the middle of an epoch."""
    stream = training_stream(pictures.numbered(4, 8), 2, "none", None, seed=0)
    assert not is_autotuned(stream.dataset())
    assert not is_autotuned(stream.dataset(3, slice(0, 1)))
    resumed = types.SimpleNamespace(
        run=types.SimpleNamespace(training_data=stream.dataset), count=Count(4, 3)
    )
    assert not is_autotuned(Fit._batches(resumed, 3))


def test_of_an_evaluation():
    data = pictures.numbered(4, 8)
    assert not is_autotuned(data.test.open())
    assert not is_autotuned(data.test.open(lambda number: number < 2))
    with kp.distribution.start("none") as distribution:
        for size in (None, 16):
            batches = evaluation_batches(data, data.test, 2, size)
            assert not is_autotuned(batches)
            assert not is_autotuned(distribution.evaluation_data(batches, 2, data.test.size))
