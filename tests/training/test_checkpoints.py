"""Checkpoints: whole or passed over, exact to the bit, and the state of what else a run
goes on with.
"""

import contextlib
import ctypes
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.health import HEALTHY_RANGES, TrainingHealth
from tests.training.commands import ROOT, files
from training.callbacks import Continued
from training.checkpoints import Best, Checkpoints, Saver
from training.signals import Stop
from training.variables import GROUPS

pytestmark = pytest.mark.backend

BACKEND = keras.backend.backend()
JIT = "auto" if BACKEND == "jax" else False


def no_warning(message):
    raise AssertionError(message)


def compiled(model: keras.Model, optimizer=None) -> keras.Model:
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    return model


def small(seed=0, units=3, optimizer=None, trained=True) -> keras.Model:
    """A network of three layers with everything that a checkpoint holds: statistics,
    seeds, momentum; trained, metrics.
    """
    keras.utils.set_random_seed(seed)
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(units, name="first"),
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
    for i in (0, 4):  # `fit` ends with the averages in place of the weights
        model.train_on_batch(x[i : i + 4], x[i : i + 4, :2])
    return model


def array(variable) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable.value))


def values(model, groups=tuple(GROUPS)) -> dict[str, np.ndarray]:
    """Return all variables as raw bits."""
    found = {}
    for group in groups:
        for i, tensors in enumerate(GROUPS[group](model)):
            found[f"{group} {i} {tensors.name}"] = array(tensors.variable).reshape(-1).view("uint8")
    return found


def same(ours: dict, theirs: dict) -> bool:
    assert ours.keys() == theirs.keys()
    return all(np.array_equal(ours[key], theirs[key]) for key in ours)


@pytest.fixture(scope="module")
def model():
    return small()


class TestExactness:
    def test_every_variable_comes_back_to_the_bit(self, model, tmp_path):
        checkpoints = Checkpoints(tmp_path)
        progress = {"step": 7, "text": "é", "numbers": [1, 0.1, float("inf")], "none": None}
        path = checkpoints.save(model, progress)
        assert re.fullmatch(r"state-000000007-[0-9a-f]{16}\.npz", path.name)
        assert files(tmp_path) == [path.name]
        before = values(model)
        assert any("seed" in key for key in before)
        assert any("average" in key for key in before)
        assert any("momentum" in key for key in before)
        assert any("moving_variance" in key for key in before)
        assert any(key.startswith("metrics") for key in before)
        assert {tensors.variable.dtype for tensors in GROUPS["model"](model)} > {
            "float32",
            "bfloat16",
        }

        other = small(seed=1)
        assert not same(values(other), before)
        saved = checkpoints.newest(no_warning)
        assert (saved.progress, saved.step, saved.path) == (progress, 7, path)
        metrics = values(other, ("metrics",))
        saved.restore(other)
        assert same(values(other, ("model", "optimizer")), values(model, ("model", "optimizer")))
        assert same(values(other, ("metrics",)), metrics)
        saved.restore_metrics(other)
        assert same(values(other), before)

    def test_optimizer_that_is_not_built_yet(self, model, tmp_path):
        Checkpoints(tmp_path).save(model, {"step": 1})
        other = compiled(keras.models.clone_model(model))
        Checkpoints(tmp_path).newest(no_warning).restore(other)
        assert same(values(other, ("model", "optimizer")), values(model, ("model", "optimizer")))

    def test_a_model_that_is_not_compiled_gets_its_weights(self, model, tmp_path):
        Checkpoints(tmp_path).save(model, {"step": 1})
        other = keras.models.clone_model(model)
        Checkpoints(tmp_path).newest(no_warning).restore(other)
        assert same(values(other, ("model",)), values(model, ("model",)))

    def test_probe_of_the_health_is_not_in_it(self, tmp_path):
        class Save(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                Checkpoints(tmp_path).save(self.model, {"step": batch})

        model = small(trained=False)
        x = np.ones((8, 4), "float32")
        model.fit(
            x,
            x[:, :2],
            batch_size=4,
            verbose=0,
            callbacks=[TrainingHealth(1, report=lambda message: None), Save()],
        )
        other = small(seed=1, trained=False)
        Checkpoints(tmp_path).newest(no_warning).restore(other)
        optimizer = values(other, ("optimizer",))
        assert not any("figures" in key or "measured" in key for key in optimizer)
        assert same(optimizer, values(model, ("optimizer",)))


class TestWhatDoesNotFit:
    @pytest.fixture
    def saved(self, model, tmp_path):
        Checkpoints(tmp_path).save(model, {"step": 1})
        return Checkpoints(tmp_path).newest(no_warning)

    def refused(self, saved, other, message):
        before = values(other)
        with pytest.raises(ValueError, match=message) as error:
            saved.restore(other)
        assert str(saved.path) in str(error.value)
        assert same(values(other), before)

    def test_shape(self, saved):
        message = (
            r"first/kernel has shape \[4, 5\] here, and .*first/kernel has \[4, 3\] in the file"
        )
        self.refused(saved, small(1, units=5, trained=False), message)

    @pytest.mark.parametrize(
        ("kept", "own", "message"),
        [
            (
                3,
                [keras.layers.Dense(3, name="half"), keras.layers.Dense(2, name="second")],
                "half/kernel has dtype float32 here, and .*half/kernel has bfloat16 in the file",
            ),
            (4, [keras.layers.Dense(2, name="third")], "third/kernel has name"),
            (4, [], "it has .*second/kernel, which is unknown here"),
            (5, [keras.layers.Dense(2)], "it lacks .*kernel"),
        ],
        ids=["dtype", "name", "fewer", "more"],
    )
    def test_layers(self, saved, kept, own, message):
        layers = small(1, trained=False).layers[:kept]
        other = keras.Sequential([keras.Input((4,)), *layers, *own], name="small")
        self.refused(saved, compiled(other), message)

    @pytest.mark.parametrize(
        ("optimizer", "message"),
        [
            (keras.optimizers.SGD(0.1, use_ema=True), "optimizer"),
            (keras.optimizers.SGD(0.1, momentum=0.9), "optimizer"),
            (keras.optimizers.RMSprop(0.1, use_ema=True), "has name"),
        ],
        ids=["momentum", "averages", "kind"],
    )
    def test_another_optimizer(self, saved, optimizer, message):
        self.refused(saved, small(1, optimizer=optimizer, trained=False), message)

    def test_other_metrics(self, saved):
        other = small(1, trained=False)
        other.compile(other.optimizer, "mse", metrics=["mse", "mae"], jit_compile=False)
        x = np.ones((4, 4), "float32")
        other.evaluate(x, x[:, :2], verbose=0)
        before = values(other)
        with pytest.raises(ValueError, match="does not fit the metrics"):
            saved.restore_metrics(other)
        assert same(values(other), before)

    def test_numbers_that_keras_gives_do_not_count_but_their_order_does(self, tmp_path):
        def model(*layers):
            made = keras.Sequential([keras.Input((2,)), *layers])
            made.compile("sgd", "mse")
            return made

        def unnamed():
            return model(keras.layers.Dense(2), keras.layers.Dense(2))

        def named(*names):
            return model(*(keras.layers.Dense(2, name=name) for name in names))

        Checkpoints(tmp_path).save(unnamed(), {"step": 1})
        Checkpoints(tmp_path).newest(no_warning).restore(unnamed())
        Checkpoints(tmp_path).save(named("unit1", "unit2"), {"step": 2})
        saved = Checkpoints(tmp_path).newest(no_warning)
        saved.restore(named("unit1", "unit2"))
        with pytest.raises(ValueError, match="does not fit the model"):
            saved.restore(named("stage1", "stage2"))


class TestDamage:
    """What is not as it was written is passed over."""

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

    def test_flipped_bits_anywhere(self, folder):
        newest = max(folder.iterdir())
        content = newest.read_bytes()
        chosen = random.Random(0)
        places = {*range(0, 200, 7), *range(len(content) - 1, len(content) - 200, -7)}
        places |= {chosen.randrange(len(content)) for _ in range(100)}
        for place in places:
            damaged = bytearray(content)
            damaged[place] ^= 1 << chosen.randrange(8)
            newest.write_bytes(damaged)
            step, warnings = self.newest(folder)
            assert step == 1, place
            assert len(warnings) == 1
            assert str(newest) in warnings[0]
        newest.write_bytes(content)
        assert self.newest(folder) == (2, [])

    def test_truncations_and_what_comes_behind(self, folder):
        newest = max(folder.iterdir())
        content = newest.read_bytes()
        for length in (0, 1, 100, len(content) // 2, len(content) - 22, len(content) - 1):
            newest.write_bytes(content[:length])
            assert self.newest(folder)[0] == 1, length
        newest.write_bytes(content + b"\0")
        assert self.newest(folder)[0] == 1

    def test_what_is_no_checkpoint(self, folder):
        import hashlib

        (folder / "state-000000009-0123456789abcdef.npz").mkdir()
        zipped = folder / "other.npz"
        np.savez(zipped, allow_pickle=False, description=np.zeros(3, np.uint8))
        evil = folder / "evil.npz"
        np.savez(evil, description=np.array([{"an": "object"}], dtype=object))
        for step, path in ((8, zipped), (7, evil)):
            name = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            path.rename(folder / f"state-{step:09d}-{name}.npz")
        (folder / "state-5-short.npz").touch()
        step, warnings = self.newest(folder)
        assert step == 2
        assert [re.search(r"state-\d+", warning)[0] for warning in warnings] == [
            "state-000000009",
            "state-000000008",
            "state-000000007",
        ]

    def test_unreadable(self, folder, monkeypatch):
        newest = max(folder.iterdir())
        plain = Path.open

        def fail(path, *arguments, **options):
            if path == newest:
                raise OSError(errno.EIO, "Input/output error")
            return plain(path, *arguments, **options)

        monkeypatch.setattr(Path, "open", fail)
        step, warnings = self.newest(folder)
        assert step == 1
        assert "Input/output error" in warnings[0]


class TestKeep:
    @staticmethod
    def steps(folder):
        return sorted(int(path.name[6:15]) for path in folder.glob("state-*"))

    @pytest.mark.parametrize("keep", [1, 3])
    def test_the_last_stay(self, model, tmp_path, keep):
        (tmp_path / "best.keras").touch()
        checkpoints = Checkpoints(tmp_path, keep)
        for step in range(5, 30, 5):
            checkpoints.save(model, {"step": step})
            assert self.steps(tmp_path) == list(range(5, step + 1, 5))[-keep:]
        assert (tmp_path / "best.keras").exists()

    def test_another_of_one_step_takes_its_place(self, model, tmp_path):
        checkpoints = Checkpoints(tmp_path, 2)
        for progress in ({"step": 1}, {"step": 2}, {"step": 2, "more": 1}):
            checkpoints.save(model, progress)
        assert self.steps(tmp_path) == [1, 2]
        assert Checkpoints(tmp_path).newest(no_warning).progress == {"step": 2, "more": 1}

    def test_at_least_one(self, tmp_path):
        with pytest.raises(ValueError, match=r"keep must be at least 1.*Received: 0"):
            Checkpoints(tmp_path, 0)

    def test_what_was_passed_over_does_not_count(self, model, tmp_path):
        """With room for two, a damaged one of a later step takes no place, and goes
        with the next save.
        """
        for step in (1, 2, 3, 9):
            Checkpoints(tmp_path, 9).save(model, {"step": step})
        damaged = [path for path in tmp_path.iterdir() if int(path.name[6:15]) in (3, 9)]
        for path in damaged:
            path.write_bytes(path.read_bytes()[:-1])
        checkpoints = Checkpoints(tmp_path, 2)
        assert checkpoints.newest(lambda message: None).step == 2
        assert self.steps(tmp_path) == [1, 2, 3, 9]  # reading changes nothing
        checkpoints.save(model, {"step": 4})
        assert self.steps(tmp_path) == [2, 4]
        assert Checkpoints(tmp_path).newest(no_warning).step == 4

    def test_a_damaged_one_is_written_again(self, model, tmp_path):
        path = Checkpoints(tmp_path).save(model, {"step": 1})
        content = path.read_bytes()
        path.write_bytes(b"")
        checkpoints = Checkpoints(tmp_path)
        assert checkpoints.newest(lambda message: None) is None
        assert checkpoints.save(model, {"step": 1}) == path
        assert path.read_bytes() == content

    def test_leftovers_of_killed_processes(self, tmp_path):
        for name in (".state-000000001.npz", ".best-abc.keras", "best.keras", ".hidden"):
            (tmp_path / name).touch()
        Checkpoints(tmp_path, write=False).clean()
        assert len(files(tmp_path)) == 4
        Checkpoints(tmp_path).clean()
        assert files(tmp_path) == [".hidden", "best.keras"]


class TestFullDisk:
    """Nothing is lost, and nothing remains."""

    def refused(self, folder, model, reason):
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert before
        with pytest.raises(ValueError, match=f"Cannot write a checkpoint to {folder}: .*{reason}"):
            Checkpoints(folder, keep=1).save(model, {"step": 9})
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert Checkpoints(folder).newest(no_warning).step == 2

    @pytest.fixture
    def folder(self, model, tmp_path):
        for step in (1, 2):
            Checkpoints(tmp_path).save(model, {"step": step})
        return tmp_path

    @pytest.mark.parametrize(
        "where", [(os, "fsync"), (os, "replace"), (np, "savez"), (Path, "replace")]
    )
    def test_wherever_it_shows(self, folder, model, monkeypatch, where):
        def fail(*arguments, **options):
            raise OSError(errno.ENOSPC, "No space left on device")

        if where == (os, "replace"):
            monkeypatch.setattr(os, "rename", fail)
        monkeypatch.setattr(*where, fail)
        self.refused(folder, model, "No space left")

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.99])
    def test_no_room_for_the_whole_file(self, folder, model, share):
        """The system refuses what goes beyond a share of the file's size."""
        import resource

        size = int(share * max(path.stat().st_size for path in folder.iterdir()))
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            self.refused(folder, model, "File too large")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)


def test_of_several_processes_one_writes(model, tmp_path):
    assert Checkpoints(tmp_path, write=False).save(model, {"step": 1}) is None
    assert files(tmp_path) == []
    assert Checkpoints(tmp_path).save(model, {"step": 1}).is_file()
    assert Checkpoints(tmp_path, write=False).newest(no_warning).step == 1


SAVING = """
import os, sys, time
from pathlib import Path
import keras
from training.checkpoints import Checkpoints

model = keras.Sequential([keras.Input((300,)), *(keras.layers.Dense(300) for _ in range(4))])
model.compile("sgd", "mse")
checkpoints, step = Checkpoints(Path("folder"), keep=2), 0
for line in sys.stdin:  # the seconds that each child has
    told, tells = os.pipe()
    child = os.fork()
    if not child:
        checkpoints.clean()
        while True:
            step += 1
            checkpoints.save(model, {"step": step})
            os.write(tells, b"%d\\n" % step)
    os.close(tells)
    time.sleep(float(line))
    os.kill(child, 9)
    os.waitpid(child, 0)
    with os.fdopen(told) as said:
        step = max([step, *map(int, said.read().split())])
    warnings = []
    left = [path.name for path in checkpoints.folder.glob(".*")]
    newest = checkpoints.newest(warnings.append)
    print(step, newest.step if newest else 0, len(warnings), len(left), flush=True)
"""


@pytest.mark.skipif(BACKEND != "tensorflow", reason="the process has a backend of its own")
def test_killed_while_it_saves(tmp_path):
    """Keras' NumPy backend has no threads, so that its process can be copied as often
    as one is killed.
    """
    pytest.importorskip("jax")  # Keras' NumPy backend imports it
    (tmp_path / "folder").mkdir()
    environment = os.environ | {"KERAS_BACKEND": "numpy", "PYTHONPATH": str(ROOT)}
    chosen = random.Random(0)
    pauses = [chosen.uniform(0.02, 0.2) for _ in range(30)]
    ended = subprocess.run(
        [sys.executable, "-c", SAVING],
        input="".join(f"{pause}\n" for pause in pauses),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    rows = [list(map(int, line.split())) for line in ended.stdout.splitlines()]
    assert len(rows) == len(pauses)
    for told, newest, warnings, _ in rows:
        assert warnings == 0
        assert newest in (told, told + 1)
    assert rows[-1][0] > len(pauses) / 2
    assert any(left for *_, left in rows), "no process was killed in the middle of a file"
    assert all(left <= 1 for *_, left in rows)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Recorded:
    """Stands for `Checkpoints`."""

    write = True

    def __init__(self):
        self.steps, self.cleaned = [], 0

    def clean(self):
        self.cleaned += 1

    def save(self, model, progress):
        self.steps.append(progress["step"])


class TestSaver:
    def run(self, minutes, every, epochs=(4, 4), seconds=0.0, execution=1):
        """Pretend a fit; return after which steps was saved, with half a step more
        where it was behind an epoch.
        """
        clock, recorded = Clock(), Recorded()
        saver = Saver(recorded, minutes, every, lambda: {"step": done}, clock)
        saver.set_model(object())
        done = 0
        saver.on_train_begin()
        for steps in epochs:
            for batch in range(0, steps, execution):
                saver.on_train_batch_begin(batch)
                clock.now += seconds
                done += execution
                saver.on_train_batch_end(batch + execution - 1)
            done += 0.5  # validation, history
            saver.on_epoch_end(0)
            done -= 0.5
        assert recorded.cleaned == 1
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

    def test_several_steps_an_execution(self):
        assert self.run(9, every=3, execution=2, epochs=(8, 8)) == [4, 8.5, 12, 16.5]

    def test_at_once_and_the_count_begins_anew(self):
        recorded = Recorded()
        saver = Saver(recorded, 9, 2, lambda: {"step": batch + 1})
        saver.set_model(object())
        saver.on_train_begin()
        for batch in range(6):
            saver.on_train_batch_begin(batch)
            saver.on_train_batch_end(batch)
            if batch == 0:
                saver.save_now()
        assert recorded.steps == [1, 4, 6]


class TestBest:
    @pytest.mark.parametrize(
        ("higher_is_better", "scores", "best"),
        [
            (True, [0.5, 0.7, 0.6, 0.7, 0.8, 0.1], [1, 2, 2, 2, 5, 5]),  # the first of equals stays
            (False, [0.5, 0.7, 0.4, 0.4, 0.45, 0.1], [1, 1, 3, 3, 3, 6]),
            (True, [-3.0, -2.0], [1, 2]),
            (False, [float("nan"), 2.0, float("nan")], [None, 2, 2]),
        ],
    )
    @pytest.mark.parametrize("ended", [False, True])
    def test_is_replaced_only_by_a_better_one(
        self, tmp_path, higher_is_better, scores, best, ended
    ):
        """Even if every epoch is trained by another process."""

        def save(path):
            saved.append((path.relative_to(tmp_path).as_posix(), epoch + 1))

        saved = []
        callback = Best(tmp_path, "val_score", higher_is_better, save)
        for epoch, (score, expected) in enumerate(zip(scores, best, strict=True)):
            if ended:
                state = json.loads(json.dumps(callback.state()))
                callback = Best(tmp_path, "val_score", higher_is_better, save)
                callback.restore(state)
            callback.on_epoch_end(epoch, {"val_score": score, "score": -score})
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
    def test_is_not_lost_where_errors_are_and_comes_behind_the_step(self, number, error, status):
        saves = []
        with Stop(save=lambda: saves.append(1)) as stop:
            stop.on_train_batch_begin(0)
            stop.on_epoch_end(0)
            # an error in there would go nowhere
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

    def test_a_machine_that_asks_again_gets_the_same(self):
        with Stop() as stop:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(SystemExit):
                stop.on_train_batch_begin(1)

    def test_says_that_a_validation_is_waited_for(self):
        told = []
        with Stop(report=told.append) as stop:
            stop.on_test_batch_end(0)
            signal.raise_signal(signal.SIGINT)
            stop.on_test_batch_end(1)
            stop.on_test_batch_end(2)
        assert sorted(told) == [
            "Stopping after this step; checkpoint follows. Press again to stop at once.",
            "The step was the last of its epoch: stopping after this validation.",
        ]

    @pytest.mark.parametrize(
        ("number", "again"),
        [(signal.SIGINT, " Press again to stop at once."), (signal.SIGTERM, "")],
    )
    def test_is_confirmed_while_native_code_runs(self, number, again):
        """The main thread waits in C for a lock that the report opens: Python's handlers
        cannot run meanwhile.
        """
        libc = ctypes.CDLL(None)
        lock = ctypes.create_string_buffer(64)  # a pthread_mutex_t of zeros is an open one
        told = []

        def report(message):
            told.append(message)
            libc.pthread_mutex_unlock(lock)

        late = threading.Timer(60, report, ["too late"])
        late.daemon = True
        with Stop(report=report) as stop:
            libc.pthread_mutex_lock(lock)
            late.start()
            threading.Timer(0.01, os.kill, [os.getpid(), number]).start()
            libc.pthread_mutex_lock(lock)
            late.cancel()
            assert told == [f"Stopping after this step; checkpoint follows.{again}"]
            signal.raise_signal(signal.SIGTERM)
            assert stop.requested == signal.SIGTERM
        assert len(told) == 1
        assert signal.set_wakeup_fd(-1) == -1

    def test_of_several_processes_each_ends_after_the_same_step(self):
        """The signal comes to the second process, during its step 4."""
        ended = {}

        def train(process):
            stop = stops[process]
            for step in range(12):
                with contextlib.suppress(SystemExit):
                    stop.on_train_batch_begin(step)
                    if (process, step) == (1, 4):
                        stop._request(signal.SIGTERM, None)
                    continue
                ended[process] = step
                return

        together = threading.Barrier(2)
        values = [0, 0]

        def highest(process, value):
            values[process] = value
            together.wait(10)
            found = max(values)
            together.wait(10)
            return found

        saves = []
        stops = [
            Stop(lambda i=i: saves.append(i), highest=lambda value, i=i: highest(i, value), every=4)
            for i in range(2)
        ]
        threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ended == {0: 7, 1: 7}
        assert sorted(saves) == [0, 1]

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_process_that_ignores_a_signal_goes_on_doing_so(self, number):
        signal.signal(number, signal.SIG_IGN)
        with Stop() as stop:
            signal.raise_signal(number)
            stop.on_train_batch_begin(0)
        assert signal.getsignal(number) is signal.SIG_IGN

    def test_in_another_thread(self):
        def enter():
            with Stop() as stop:
                stop.on_train_batch_begin(0)
                done.append(1)

        done = []
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert done == [1]


def network(case: str) -> keras.Model:
    """Networks with dropout and batch normalisation, and between them all that an
    optimizer can keep.
    """
    keras.utils.set_random_seed(1)
    options = {"dtype": "mixed_float16"} if case == "loss scale" else {"stacked": True}
    model = kp.models.dense_resnet(10, input_shape=(6,), width=4, classes=3, dropout=0.2, **options)
    rate = kp.schedules.cosine_schedule(0.05, 12, warmup_steps=2)
    if case == "loss scale":  # so high that it skips steps, and grows soon
        optimizer = keras.optimizers.LossScaleOptimizer(
            kp.optimizers.CoupledSGD(rate), initial_scale=2.0**20, dynamic_growth_steps=2
        )
    else:
        optimizer = kp.optimizers.CoupledSGD(
            rate, use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=2
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=JIT)
    return model


def batches(step: int):
    while True:
        random = np.random.default_rng((5, step))
        yield random.normal(size=(8, 6)).astype("float32"), random.integers(0, 3, size=8)
        step += 1


class Steps(keras.callbacks.Callback):
    """Counts the steps, and keeps what each epoch left behind."""

    def __init__(self, done, epochs):
        super().__init__()
        self.step, self.epochs = done, list(epochs)

    def on_train_batch_begin(self, batch, logs=None):
        if BACKEND == "torch":
            import torch

            torch.manual_seed(self.step)

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append({name: float(value) for name, value in logs.items()})


class TestGoingOn:
    """A fit that goes on from a checkpoint ends as one that was never interrupted: to
    the bit, on every backend.
    """

    STEPS, EPOCHS = 5, 2

    def fit(self, folder, case, saved=None):
        model = network(case)
        steps = Steps(saved.step if saved else 0, saved.progress["epochs"] if saved else [])
        reports = []
        health = TrainingHealth(2, csv=folder / "health.csv", report=reports.append)
        saver = Saver(
            Checkpoints(folder, keep=9),
            0,
            3,
            lambda: {
                "step": steps.step,
                "epochs": steps.epochs,
                "health": health.state(),
                "reports": list(reports),
            },
        )
        if saved:
            saved.restore(model)
            health.restore(saved.progress["health"])
            reports += saved.progress["reports"]
        epoch = len(steps.epochs)
        done = steps.step - epoch * self.STEPS

        def restore():
            if BACKEND == "tensorflow":  # elsewhere, `fit` has made the metrics
                model.compute_metrics(None, np.zeros(8, "int64"), np.zeros((8, 3), "float32"))
            saved.restore_metrics(model)

        watching = Continued(
            [steps, health, saver],
            done=done,
            restore=restore,
            model=model,
            epochs=self.EPOCHS,
            steps=self.STEPS,
        )
        model.fit(
            batches(steps.step - done),
            initial_epoch=epoch,
            epochs=self.EPOCHS,
            steps_per_epoch=self.STEPS,
            shuffle=False,
            callbacks=watching,
            verbose=0,
        )
        return values(model), steps.epochs, reports, (folder / "health.csv").read_text()

    @pytest.mark.parametrize("case", ["averages of accumulated steps in a stack", "loss scale"])
    def test_ends_as_if_nothing_had_happened(self, case, tmp_path):
        straight = self.fit(tmp_path, case)
        assert sorted(int(path.name[6:15]) for path in tmp_path.glob("state-*")) == [3, 6, 9]
        assert len(straight[3].splitlines()) > 2
        for path in sorted(tmp_path.glob("state-*"))[1:]:
            path.rename(path.with_suffix(".kept"))
        saved = Checkpoints(tmp_path).newest(no_warning)
        # in the middle of the first epoch; what stands in health.csv is of the whole fit
        assert saved.step == 3
        went_on = self.fit(tmp_path, case, saved)
        assert straight[1:] == went_on[1:]
        for name, value in straight[0].items():
            np.testing.assert_array_equal(went_on[0][name], value, err_msg=name)
        assert len(straight[1]) == self.EPOCHS


class TestStateOfTheHealth:
    def test_divergence_in_an_interval_that_was_interrupted(self, tmp_path):
        """The gradient of step 3 is too large, which shows at the end of the interval,
        in step 5.
        """
        x = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
        x[8:12] *= 1e3

        class Save(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 3:
                    Checkpoints(tmp_path).save(self.model, {"step": 4, "health": health.state()})

        told = []
        for begin in (0, 16):
            keras.utils.set_random_seed(0)
            model = keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(1, name="only")], name="network"
            )
            model.compile(keras.optimizers.SGD(1e-9), "mse", jit_compile=JIT)
            reports = []
            health = TrainingHealth(
                5,
                ranges=dict.fromkeys(HEALTHY_RANGES),
                stop_on_divergence=1e3,
                report=reports.append,
            )
            if begin:
                saved = Checkpoints(tmp_path).newest(no_warning)
                saved.restore(model)
                health.restore(saved.progress["health"])
            model.fit(
                x[begin:],
                x[begin:, :1],
                batch_size=4,
                shuffle=False,
                verbose=0,
                callbacks=[health, Save()],
            )
            told.append((reports, health.divergence, [record.step for record in health.history]))
            np.testing.assert_array_less(1e3, health.history[0].gradient_norm)
        assert told[0] == told[1]
        assert "training diverged in update 3: the gradient norm" in told[0][0][0]

    def test_of_one_that_has_not_trained(self):
        """A run may be killed before its first step."""
        state = TrainingHealth(1).state()
        assert np.isnan([state.pop("gap"), state.pop("first_loss")]).all()
        assert state == {"seen": 0, "gaps": [], "reported": [], "suspected": []}
