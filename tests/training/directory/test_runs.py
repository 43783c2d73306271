"""The run directory: nothing in it is ever half-written, and a run is resumed with its
own options.
"""

import dataclasses
import errno
import fcntl
import os
import re
import socket
import typing
from pathlib import Path

import keras
import pytest

from tests.training.calls import files
from training import backends, disk
from training.config import Checkpoint, Config, Data, Optimizer, from_json
from training.directory import runs
from training.errors import UserError


class TestNewDirectory:
    def test_default_has_recipe_and_time(self):
        assert re.fullmatch(r"runs/digits-2\d{7}-\d{6}", str(runs.new_directory(None, "digits")))

    def test_new_or_empty_is_taken_and_nothing_is_made(self, tmp_path):
        assert runs.new_directory(tmp_path / "new", "digits") == tmp_path / "new"
        assert not (tmp_path / "new").exists()
        assert runs.new_directory(tmp_path, "digits") == tmp_path
        (tmp_path / ".config-3kq.json").touch()  # left by a process that was killed while writing
        assert runs.new_directory(tmp_path, "digits") == tmp_path

    def test_a_directory_with_anything_in_it_or_a_file_is_refused(self, tmp_path):
        (tmp_path / "config.json").write_text("")
        for taken in (tmp_path, tmp_path / "config.json"):
            with pytest.raises(UserError, match=f"{taken} exists and is not empty\\."):
                runs.new_directory(taken, "digits")
        with pytest.raises(UserError, match=f"keras-preact resume {tmp_path}"):
            runs.new_directory(tmp_path, "digits")

    def test_a_name_that_is_not_utf_8_is_refused(self):
        with pytest.raises(UserError, match=r"--output must be UTF-8.*'out\\udce9'"):
            runs.new_directory(Path(os.fsdecode(b"out\xe9")), "digits")


class TestHeld:
    def test_by_one_until_its_end(self, tmp_path):
        owner = f"process {os.getpid()} on {socket.gethostname()} since "
        for _ in range(2):
            with runs.locked(tmp_path):
                before = (tmp_path / ".lock").read_text()
                assert before.startswith(owner)
                with pytest.raises(UserError) as raised, runs.locked(tmp_path):
                    pass
                assert str(raised.value).startswith(f"{tmp_path} is in use by {owner}")
                assert (tmp_path / ".lock").read_text() == before

    def test_what_killed_processes_left_is_removed(self, tmp_path):
        for name in (f".model-{16 * 'a'}.keras", "model.keras", ".mine"):
            (tmp_path / name).touch()
        with runs.locked(tmp_path):
            (tmp_path / ".model-b.keras").touch()  # this process writes it
            with pytest.raises(UserError), runs.locked(tmp_path):
                pass
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            *(".lock", ".mine", ".model-b.keras", "model.keras")
        ]

    def test_a_file_system_without_locks(self, tmp_path, monkeypatch):
        def flock(*arguments):
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(fcntl, "flock", flock)
        with runs.locked(tmp_path):
            pass


def test_replacing_names_the_file_and_the_reason(tmp_path):
    with pytest.raises(UserError, match=rf"Cannot write {tmp_path}/a: .*No space left"):  # noqa: SIM117
        with disk.replacing(tmp_path / "a"):
            raise OSError(errno.ENOSPC, "No space left on device")
    assert files(tmp_path) == []


class TestResuming:
    """A run is resumed with its own options."""

    OPTIMIZER = Optimizer(exclude_from_decay=("norm",))
    IMAGES: typing.ClassVar[dict] = {
        "classes": ["cat", "dog"],
        "images": {"train": 20, "holdout": 2, "test": 6},
        "hashes": {"train": "a", "holdout": "b", "test": "c"},
        "preprocessing": {"mean": [1.0], "std": [2.0]},
    }
    BEGUN = Config(seed=3, data=Data("digits", dir=Path("images")), optimizer=OPTIMIZER)

    @pytest.fixture
    def run(self, tmp_path):
        versions = {"backend": keras.backend.backend()}
        described = {"config": dataclasses.asdict(self.BEGUN), "versions": versions}
        described |= self.IMAGES
        disk.write_json(tmp_path / "config.json", described)
        return tmp_path

    def test_same_options_and_those_that_change_nothing(self, run):
        runs.check_same(run, self.BEGUN, self.IMAGES)
        free = {"output": run, "resume": True, "health": 7, "distribution": "mirrored"}
        free["checkpoint"] = Checkpoint(minutes=1)
        runs.check_same(run, dataclasses.replace(self.BEGUN, **free), self.IMAGES)

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"seed": 4}, "--seed"),
            ({"batch_norm": "per_replica"}, "--batch-norm"),
            ({"data": Data("digits")}, "--data.dir"),
            (
                {"optimizer": Optimizer(label_smoothing=0.1), "batch_size": 8},
                "--optimizer.exclude-from-decay, .*--batch-size",
            ),
        ],
    )
    def test_others_are_named(self, run, changes, named):
        message = rf"was started with another value of .*{named}.* keras-preact resume {run}"
        with pytest.raises(ValueError, match=message):
            runs.check_same(run, dataclasses.replace(self.BEGUN, **changes), self.IMAGES)

    def test_another_backend(self, run):
        disk.write_json(run / "config.json", {"config": {}, "versions": {"backend": "theano"}})
        with pytest.raises(
            ValueError, match=r"was trained on theano: set KERAS_BACKEND=theano to resume it"
        ):
            runs.check_same(run, self.BEGUN, self.IMAGES)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"images": IMAGES["images"] | {"train": 21}}, "20 training images, now 21."),
            ({"images": IMAGES["images"] | {"holdout": 3}}, "2 held-out images, now 3."),
            ({"images": IMAGES["images"] | {"test": 4}}, "6 test images, now 4."),
            ({"hashes": IMAGES["hashes"] | {"train": "x"}}, "other training images."),
            ({"hashes": IMAGES["hashes"] | {"holdout": "x"}}, "other held-out images."),
            ({"hashes": IMAGES["hashes"] | {"test": "x"}}, "other test images."),
            ({"classes": ["cat", "emu"]}, "2 classes, now 2 (gone: dog; new: emu)."),
            ({"classes": ["cat", "dog", "emu"]}, "2 classes, now 3 (gone: none; new: emu)."),
            ({"preprocessing": {"mean": [3.0], "std": [2.0]}}, "mean of the pixels [1.0], now [3"),
            ({"preprocessing": {"mean": [1.0], "std": [2.1]}}, "std of the pixels [2.0], now [2"),
        ],
    )
    def test_other_images(self, run, changes, words):
        message = f"The images of {run} in images have changed since it was started: {words}"
        with pytest.raises(UserError, match=re.escape(message)):
            runs.check_same(run, self.BEGUN, self.IMAGES | changes)
        # an older version did not record this
        described = runs.read_config(run)
        del described[next(iter(changes))]
        disk.write_json(run / "config.json", described)
        runs.check_same(run, self.BEGUN, self.IMAGES | changes)

    def test_means_of_another_machine(self, run):
        rounded = self.IMAGES | {"preprocessing": {"mean": [1.0 + 1e-9], "std": [2.0]}}
        runs.check_same(run, self.BEGUN, rounded)

    def test_options_of_another_version(self):
        """An unknown option is an error, a missing option has its default."""
        with pytest.raises(ValueError, match=r"Another version .* its option warp"):
            from_json(Config, {"optimizer": {"warp": 9}})
        assert from_json(Config, {"seed": 5, "data": {"dir": "a"}}) == Config(
            seed=5, data=Data(dir=Path("a"))
        )


def test_code_behind_a_link_has_its_commit(tmp_path, monkeypatch):
    link = tmp_path / "training"
    link.symlink_to(Path(backends.__file__).parent)
    expected = backends.code()
    monkeypatch.setattr(backends, "__file__", str(link / "backends.py"))
    assert backends.code.__wrapped__() == expected
