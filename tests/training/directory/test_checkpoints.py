"""Checkpoints: damaged ones are skipped, restored ones are exact to the bit, and when they are
saved. test_resume.py tests that runs resume from them.
"""

import concurrent.futures
import contextlib
import ctypes
import errno
import hashlib
import json
import os
import random
import re
import signal
import threading
import types
import weakref
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_preact.health import TrainingHealth
from tests.training.calls import files
from training.directory.checkpoints import Best, Checkpoints, Saver
from training.directory.variables import GROUPS
from training.run.signals import Stop


def no_warning(message):
    raise AssertionError(message)


def compiled(model: keras.Model, optimizer=None) -> keras.Model:
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    return model


def small(seed=0, optimizer=None, trained=True) -> keras.Model:
    """A network of three layers with everything that a checkpoint holds: statistics,
    seeds, momentum and, if it is trained, metrics.
    """
    keras.utils.set_random_seed(seed)
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(3, name="first"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.5, name="drop"),
        keras.layers.Dense(3, name="half", dtype="bfloat16"),
        keras.layers.Dense(2, name="second"),
    ]
    model = compiled(keras.Sequential(layers, name="small"), optimizer)
    if not trained:
        model.optimizer.build(model.trainable_variables)
        return model
    x = np.random.default_rng(seed).normal(size=(8, 4)).astype("float32")
    for i in (0, 4):  # at its end, `fit` replaces the weights by their averages
        model.train_on_batch(x[i : i + 4], x[i : i + 4, :2])
    return model


def values(model, groups=tuple(GROUPS)) -> dict[str, np.ndarray]:
    """Return all variables as raw bits."""
    found = {}
    for group in groups:
        for i, tensors in enumerate(GROUPS[group](model)):
            array = np.array(keras.ops.convert_to_numpy(tensors.variable.value))
            found[f"{group} {i} {tensors.name}"] = array.reshape(-1).view("uint8")
    return found


def same(ours: dict, theirs: dict) -> bool:
    assert ours.keys() == theirs.keys()
    return all(np.array_equal(ours[key], theirs[key]) for key in ours)


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.mark.backend
class TestExactness:
    @pytest.mark.parametrize("scaled", [False, True])
    def test_every_variable_comes_back_to_the_bit(self, tmp_path, scaled):
        def made(seed):
            scale = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
            return small(seed, scale if scaled else None)

        model, other = made(0), made(1)
        checkpoints = Checkpoints(tmp_path)
        progress = {"step": 7, "text": "é", "numbers": [1, 0.1, float("inf")], "none": None}
        path = checkpoints.save(model, progress)
        assert re.fullmatch(r"state-000000007-[0-9a-f]{16}\.npz", path.name)
        assert files(tmp_path) == [path.name]
        before = values(model)
        parts = ("seed", "momentum", "moving_variance", "scale" if scaled else "average")
        for part in parts:
            assert any(part in key for key in before)
        dtypes = {tensors.variable.dtype for tensors in GROUPS["model"](model)}
        assert dtypes > {"float32", "bfloat16"}

        assert not same(values(other), before)
        saved = checkpoints.newest(no_warning)
        assert (saved.progress, saved.step, saved.path) == (progress, 7, path)
        metrics = values(other, ("metrics",))
        saved.restore(other)
        assert same(values(other, ("model", "optimizer")), values(model, ("model", "optimizer")))
        assert same(values(other, ("metrics",)), metrics)
        saved.restore_metrics(other)
        assert same(values(other), before)

    def test_probe_of_the_health_is_not_in_it(self, tmp_path):
        class Save(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                Checkpoints(tmp_path).save(self.model, {"step": batch})

        model = small(trained=False)
        x = np.ones((8, 4), "float32")
        callbacks = [TrainingHealth(1, report=lambda message: None), Save()]
        model.fit(x, x[:, :2], batch_size=4, verbose=0, callbacks=callbacks)
        other = small(seed=1, trained=False)
        Checkpoints(tmp_path).newest(no_warning).restore(other)
        assert same(values(other, ("optimizer",)), values(model, ("optimizer",)))


class TestWhatDoesNotFit:
    @pytest.fixture
    def saved(self, model, tmp_path):
        Checkpoints(tmp_path).save(model, {"step": 1})
        return Checkpoints(tmp_path).newest(no_warning)

    def refused(self, saved, other, message):
        """Check that an error is raised and nothing is assigned."""
        before = values(other)
        with pytest.raises(ValueError, match=message) as error:
            saved.restore(other)
        assert str(saved.path) in str(error.value)
        assert same(values(other), before)

    @pytest.mark.parametrize(
        ("kept", "name", "units", "dtype", "message"),
        [
            (0, "first", 5, None, r"first/kernel has shape \[4, 5\] here, .* \[4, 3\] in the file"),
            (3, "half", 3, "float32", "half/kernel has dtype float32 here"),
            (4, "third", 2, None, "third/kernel has name"),
            (4, None, 0, None, "it has .*second/kernel, which is unknown here"),
            (5, "more", 2, None, "it lacks .*kernel"),
        ],
    )
    def test_layers(self, saved, kept, name, units, dtype, message):
        layers = small(1, trained=False).layers[:kept]
        own = [keras.layers.Dense(units, name=name, dtype=dtype)] if name else []
        other = keras.Sequential([keras.Input((4,)), *layers, *own], name="small")
        self.refused(saved, compiled(other), message)

    @pytest.mark.parametrize("options", [{"use_ema": True}, {"momentum": 0.9}])
    def test_another_optimizer(self, saved, options):
        other = small(1, optimizer=keras.optimizers.SGD(0.1, **options), trained=False)
        self.refused(saved, other, "does not fit the optimizer")

    def test_numbers_in_keras_names_do_not_count_but_their_order_does(self, tmp_path):
        def model(*names):
            layers = [keras.layers.Dense(2, name=name) for name in names]
            made = keras.Sequential([keras.Input((2,)), *layers])
            made.compile("sgd", "mse")
            return made

        Checkpoints(tmp_path).save(model(None, None), {"step": 1})
        Checkpoints(tmp_path).newest(no_warning).restore(model(None, None))
        Checkpoints(tmp_path).save(model("unit1", "unit2"), {"step": 2})
        saved = Checkpoints(tmp_path).newest(no_warning)
        saved.restore(model("unit1", "unit2"))
        with pytest.raises(ValueError, match="does not fit the model"):
            saved.restore(model("stage1", "stage2"))


class TestDamage:
    """Checkpoints that differ from what was written are skipped."""

    @pytest.fixture
    def folder(self, model, tmp_path):
        for step in (1, 2):
            Checkpoints(tmp_path).save(model, {"step": step})
        return tmp_path

    @staticmethod
    def newest(folder):
        warnings = []
        saved = Checkpoints(folder).newest(warnings.append)
        return saved and saved.step, warnings

    def test_flipped_bits_truncations_and_additions(self, folder):
        newest = max(folder.iterdir())
        content = newest.read_bytes()
        chosen = random.Random(0)
        places = {*range(0, 200, 7), *range(len(content) - 1, len(content) - 200, -7)}
        places |= {chosen.randrange(len(content)) for _ in range(100)}
        damaged = [content[:length] for length in (0, 1, 100, len(content) // 2, len(content) - 1)]
        for place in places:
            flipped = bytearray(content)
            flipped[place] ^= 1 << chosen.randrange(8)
            damaged.append(flipped)
        for each in (*damaged, content + b"\0"):
            newest.write_bytes(each)
            step, [warning] = self.newest(folder)
            assert step == 1
            assert str(newest) in warning
        newest.write_bytes(content)
        assert self.newest(folder) == (2, [])

    def test_files_that_are_not_checkpoints(self, folder):
        (folder / "state-000000009-0123456789abcdef.npz").mkdir()
        evil = folder / "evil.npz"
        np.savez(evil, description=np.array([{"an": "object"}], dtype=object))
        name = hashlib.sha256(evil.read_bytes()).hexdigest()[:16]
        evil.rename(folder / f"state-000000007-{name}.npz")
        (folder / "state-5-short.npz").touch()
        step, warnings = self.newest(folder)
        assert step == 2
        names = [re.search(r"state-\d+", warning)[0] for warning in warnings]
        assert names == ["state-000000009", "state-000000007"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """Otherwise the last checkpoint would be that of a diverged run."""
    model = small()
    Checkpoints(tmp_path, keep=1).save(model, {"step": 3})
    model.get_layer("first").kernel.assign(np.full((4, 3), np.nan))
    assert Checkpoints(tmp_path, keep=1).save(model, {"step": 4}) is None
    assert Checkpoints(tmp_path).newest(no_warning).step == 3


class TestKeep:
    @staticmethod
    def steps(folder):
        return sorted(int(path.name[6:15]) for path in folder.glob("state-*"))

    @pytest.mark.parametrize("keep", [1, 3])
    def test_the_last_stay(self, model, tmp_path, keep):
        checkpoints = Checkpoints(tmp_path, keep)
        for step in range(5, 30, 5):
            checkpoints.save(model, {"step": step})
            assert self.steps(tmp_path) == list(range(5, step + 1, 5))[-keep:]
        # a second checkpoint of a step replaces the first
        checkpoints.save(model, {"step": step, "more": 1})
        assert self.steps(tmp_path) == list(range(5, step + 1, 5))[-keep:]
        assert checkpoints.newest(no_warning).progress == {"step": step, "more": 1}

    def test_damaged_checkpoints_do_not_count(self, model, tmp_path):
        """Two checkpoints are kept. Damaged ones, also of later steps, are not counted, and
        the next save removes them.
        """
        for step in (1, 2, 3, 9):
            path = Checkpoints(tmp_path, 9).save(model, {"step": step})
            if step in (3, 9):
                path.write_bytes(path.read_bytes()[:-1])
        checkpoints = Checkpoints(tmp_path, 2)
        assert checkpoints.newest(lambda message: None).step == 2
        assert self.steps(tmp_path) == [1, 2, 3, 9]  # reading changes nothing
        checkpoints.save(model, {"step": 4})
        assert self.steps(tmp_path) == [2, 4]
        assert checkpoints.newest(no_warning).step == 4

    def test_a_damaged_one_is_written_again(self, model, tmp_path):
        path = Checkpoints(tmp_path).save(model, {"step": 1})
        content = path.read_bytes()
        path.write_bytes(b"")
        checkpoints = Checkpoints(tmp_path)
        assert checkpoints.newest(lambda message: None) is None
        assert checkpoints.save(model, {"step": 1}) == path
        assert path.read_bytes() == content

    def test_only_one_of_several_processes_writes_and_cleans(self, model, tmp_path):
        for name in (".state-000000001.npz", ".best-abc.keras", "best.keras", ".hidden"):
            (tmp_path / name).touch()
        other = Checkpoints(tmp_path, write=False)
        other.clean()
        assert other.save(model, {"step": 1}) is None
        assert len(files(tmp_path)) == 4
        Checkpoints(tmp_path).clean()
        assert files(tmp_path) == [".hidden", "best.keras"]
        assert Checkpoints(tmp_path).save(model, {"step": 1}).is_file()
        assert other.newest(no_warning).step == 1


@pytest.mark.parametrize("where", [(os, "fsync"), (np, "savez"), (Path, "replace")])
def test_a_full_disk_loses_nothing_and_leaves_nothing(model, tmp_path, monkeypatch, where):
    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    Checkpoints(tmp_path).save(model, {"step": 1})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(*where, fail)
    with pytest.raises(ValueError, match=f"Cannot write a checkpoint to {tmp_path}: .*No space"):
        Checkpoints(tmp_path, keep=1).save(model, {"step": 9})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert Checkpoints(tmp_path).newest(no_warning).step == 1


class Recorded:
    """Replaces `Checkpoints`; records the steps of its saves."""

    write = True

    def __init__(self):
        self.steps = []

    def clean(self):
        pass

    def save(self, model, progress):
        self.steps.append(progress["step"])


class TestSaver:
    def run(self, minutes, every, epochs=(4, 4), seconds=0.0, execution=1, last=99, stopped=False):
        """Imitate a fit of `last` epochs, up to its end or not. Return the steps after which
        was saved, plus 0.5 if it was after an epoch.
        """
        now, done, recorded = 0.0, 0, Recorded()
        saver = Saver(recorded, minutes, every, lambda: {"step": done}, lambda: now)
        saver.set_model(types.SimpleNamespace(stop_training=stopped))
        saver.set_params({"epochs": last})
        saver.on_train_begin()
        for epoch, steps in enumerate(epochs):
            for batch in range(0, steps, execution):
                saver.on_train_batch_begin(batch)
                now += seconds
                done += execution
                saver.on_train_batch_end(batch + execution - 1)
            done += 0.5  # validation, history
            saver.on_epoch_end(epoch)
            done -= 0.5
        return recorded.steps

    @pytest.mark.parametrize(
        ("every", "steps"),
        [(1, [1, 2, 3, 4.5, 5, 6, 7, 8.5]), (3, [3, 6]), (4, [4.5, 8.5]), (5, [5]), (100, [])],
    )
    def test_by_steps_whatever_the_time(self, every, steps):
        assert self.run(minutes=1e-9, every=every, seconds=60) == steps
        assert self.run(minutes=1e9, every=every) == steps

    @pytest.mark.parametrize(
        ("minutes", "steps"),
        [(0.5, [3, 6]), (0.6, [4.5, 8.5]), (0, [1, 2, 3, 4.5, 5, 6, 7, 8.5]), (9, [])],
    )
    def test_by_time(self, minutes, steps):
        assert self.run(minutes, every=0, seconds=10) == steps

    def test_after_the_last_epoch(self):
        assert self.run(9, every=3, last=2) == [3, 6, 8.5]
        assert self.run(9, every=0, epochs=(4,), stopped=True) == [4.5]

    def test_several_steps_an_execution(self):
        assert self.run(9, every=3, execution=2, epochs=(8, 8)) == [4, 8.5, 12, 16.5]


class TestBest:
    @pytest.mark.parametrize(
        ("higher_is_better", "scores", "best"),
        [
            (
                True,
                [0.5, 0.7, 0.6, 0.7, 0.8, 0.1],
                [1, 2, 2, 2, 5, 5],
            ),  # of equal scores, the first is kept
            (False, [0.5, 0.7, 0.4, 0.4, 0.45, 0.1], [1, 1, 3, 3, 3, 6]),
            (False, [float("nan"), 2.0, float("nan")], [None, 2, 2]),
        ],
    )
    def test_is_replaced_only_by_a_better_one(self, tmp_path, higher_is_better, scores, best):
        """This holds also if every epoch is trained by another process."""

        def save(path):
            saved.append((path.relative_to(tmp_path).as_posix(), epoch + 1))

        saved, state = [], None
        for epoch, (score, expected) in enumerate(zip(scores, best, strict=True)):
            callback = Best(tmp_path, "val_score", higher_is_better, save)
            if state is not None:
                callback.restore(json.loads(state))
            callback.on_epoch_end(epoch, {"val_score": score, "score": -score})
            state = json.dumps(callback.state())
            assert (saved[-1] if saved else None) == (expected and ("best.keras", expected))


class TestStop:
    @pytest.fixture(autouse=True)
    def usual_handlers(self):
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        yield
        for number, handler in before.items():
            signal.signal(number, handler)

    ENDS = ((signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, SystemExit, os.EX_TEMPFAIL))

    @pytest.mark.parametrize(("number", "error", "status"), ENDS)
    def test_a_signal_in_a_finalizer_is_not_lost_and_comes_after_the_step(
        self, number, error, status
    ):
        saves = []
        with Stop(save=lambda: saves.append(1)) as stop:
            stop.on_train_batch_begin(0)
            stop.on_epoch_end(0)
            # an error in a finalizer would be lost
            weakref.finalize(type("Gone", (), {})(), signal.raise_signal, number)
            stop.on_train_batch_end(0)  # the epoch may be over
            stop.on_test_batch_end(0)
            assert saves == []
            for ends in (stop.on_train_batch_begin, stop.on_epoch_end):
                with pytest.raises(error) as ended:
                    ends(1)
                assert getattr(ended.value, "code", None) == status
            assert saves == [1, 1]

    def test_the_second_interruption_comes_at_once(self):
        with Stop():
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def test_reports_that_it_waits_for_a_validation(self):
        messages = []
        with Stop(report=messages.append) as stop:
            stop.on_test_batch_end(0)
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)  # a machine that asks again
            stop.on_test_batch_end(1)
            stop.on_test_batch_end(2)
            with pytest.raises(SystemExit):
                stop.on_train_batch_begin(1)
        assert sum("stopping after this validation" in message for message in messages) == 1
        assert sum("Stopping after this step" in message for message in messages) == 1

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_is_confirmed_while_native_code_runs(self, number):
        """The main thread waits in C for a lock, so that Python's handlers cannot run. The
        report opens the lock.
        """
        libc = ctypes.CDLL(None)
        lock = ctypes.create_string_buffer(64)  # a pthread_mutex_t of zeros is an open one
        messages = []

        def report(message):
            messages.append(message)
            libc.pthread_mutex_unlock(lock)

        late = threading.Timer(60, report, ["too late"])
        late.daemon = True
        with Stop(report=report) as stop:
            libc.pthread_mutex_lock(lock)
            late.start()
            threading.Timer(0.01, os.kill, [os.getpid(), number]).start()
            libc.pthread_mutex_lock(lock)
            late.cancel()
            assert "Stopping after this step" in messages[0]
            assert ("Press again" in messages[0]) == (number == signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            assert stop.requested == signal.SIGTERM
        assert len(messages) == 1
        assert signal.set_wakeup_fd(-1) == -1

    def test_several_processes_stop_after_the_same_step(self):
        """Only the second process receives the signal, during its step 4."""
        ended, saves = [], []

        def highest(value):
            return max(stop.requested or 0 for stop in stops)

        stops = [Stop(lambda i=i: saves.append(i), highest=highest, every=4) for i in range(2)]
        for step in range(12):
            for process, stop in enumerate(stops):
                if process not in saves:
                    with contextlib.suppress(SystemExit):
                        stop.on_train_batch_begin(step)
                    if process in saves:
                        ended.append(step)
            if step == 4:
                stops[1]._request(signal.SIGTERM, None)
        assert (ended, saves) == ([7, 7], [0, 1])

    def test_an_ignored_signal_stays_so(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with Stop() as stop:
            signal.raise_signal(signal.SIGTERM)
            stop.on_train_batch_begin(0)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN

    def test_in_another_thread(self):
        """In another thread, handlers cannot be set."""

        def enter():
            with Stop() as stop:
                stop.on_train_batch_begin(0)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            pool.submit(enter).result()
