"""The run directory: nothing in it is ever half-written, and a run is resumed with its
own options.
"""

import dataclasses
import errno
import fcntl
import json
import os
import re
import socket
from pathlib import Path

import keras
import pytest

from tests.training.commands import files, finish, start
from training import runs
from training.cli import UserError
from training.config import Checkpoint, Config, Data, Optimizer, from_json


class TestNewDirectory:
    def test_default_has_recipe_and_time(self):
        first = runs.new_directory(None, "digits")
        assert first.parent.name == "runs"
        assert first.name.startswith("digits-2")
        assert len(first.name) == len("digits-20260101-120000")

    def test_new_or_empty_is_taken_and_nothing_is_made(self, tmp_path):
        assert runs.new_directory(tmp_path / "new", "digits") == tmp_path / "new"
        assert not (tmp_path / "new").exists()
        assert runs.new_directory(tmp_path, "digits") == tmp_path
        (tmp_path / ".config-3kq.json").touch()  # of a process that was killed while it wrote
        assert runs.new_directory(tmp_path, "digits") == tmp_path

    def test_a_directory_with_anything_in_it_or_a_file_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("")
        for taken in (tmp_path, tmp_path / "file"):
            with pytest.raises(
                ValueError, match=f"{taken} exists and is not empty\\. Give another --output"
            ):
                runs.new_directory(taken, "digits")

    def test_of_a_run_says_how_to_resume(self, tmp_path):
        (tmp_path / "config.json").touch()
        with pytest.raises(
            ValueError, match=f"To resume the run in it: keras-preact train --resume {tmp_path}"
        ):
            runs.new_directory(tmp_path, "digits")


class TestHeld:
    CODE = """
import pathlib, time
from training import runs
with runs.held(pathlib.Path(".")):
    print("held", flush=True)
    time.sleep(600)
"""

    def test_by_one_process_until_it_is_killed(self, tmp_path):
        process = start("-c", self.CODE, cwd=tmp_path)
        try:
            assert process.stdout.readline() == "held\n"
            before = (tmp_path / ".lock").read_text()
            with pytest.raises(UserError) as raised, runs.held(tmp_path):
                pass
        finally:
            process.kill()
            finish(process)
        assert re.fullmatch(
            f"{re.escape(str(tmp_path))} is in use by process {process.pid} on "
            f"{re.escape(socket.gethostname())} since 2[-0-9]+ [:0-9]+\\. Wait for its end, or "
            "give another --output\\.",
            str(raised.value),
        )
        assert (tmp_path / ".lock").read_text() == before
        with runs.held(tmp_path):
            assert f"process {os.getpid()} " in (tmp_path / ".lock").read_text()
        with runs.held(tmp_path):
            pass

    def test_a_file_system_without_locks(self, tmp_path, monkeypatch):
        def flock(*arguments):
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(fcntl, "flock", flock)
        with runs.held(tmp_path):
            pass


class TestReplacing:
    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
    def test_a_failure_leaves_the_old_file_and_no_other(self, tmp_path, error):
        path = tmp_path / "a.json"

        def write_half():
            with runs.replacing(path) as temporary:
                temporary.write_text("ha")
                raise error

        with pytest.raises(error):
            write_half()
        assert files(tmp_path) == []
        path.write_text("old")
        with pytest.raises(error):
            write_half()
        assert path.read_text() == "old"
        assert files(tmp_path) == ["a.json"]

    def test_error_names_the_file_and_the_reason(self, tmp_path):
        with (
            pytest.raises(ValueError, match=rf"Cannot write {tmp_path}/a: .*No space left"),
            runs.replacing(tmp_path / "a"),
        ):
            raise OSError(28, "No space left on device")
        assert files(tmp_path) == []


def test_write_json(tmp_path):
    runs.write_json(tmp_path / "a.json", {"path": tmp_path, "numbers": (1, 2.5, None)})
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "path": str(tmp_path),
        "numbers": [1, 2.5, None],
    }
    with pytest.raises(ValueError, match="Circular"):
        runs.write_json(tmp_path / "a.json", (loop := {}, loop.update(me=loop))[0])
    assert json.loads((tmp_path / "a.json").read_text())["path"] == str(tmp_path)
    assert files(tmp_path) == ["a.json"]


class TestReadConfig:
    def test_reads(self, tmp_path):
        runs.write_json(tmp_path / "config.json", {"config": {"seed": 3}})
        assert runs.read_config(tmp_path) == {"config": {"seed": 3}}

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "is not a run directory: it has no config.json"),
            ('{"config": {', "config.json is damaged"),
            (
                '{"architectures": []}',
                "is not a run directory: its config.json was not written by keras-preact train",
            ),
            ("[]", "is not a run directory: its config.json was not written by keras-preact train"),
        ],
    )
    def test_errors_name_the_path(self, tmp_path, content, message):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message) as error:
            runs.read_config(tmp_path)
        assert str(tmp_path) in str(error.value)


class TestResuming:
    """A run is resumed with its own options."""

    BEGUN = Config(
        seed=3,
        data=Data("digits", dir=Path("images")),
        optimizer=Optimizer(exclude_from_decay=("norm",)),
    )

    @pytest.fixture
    def run(self, tmp_path):
        described = {
            "config": dataclasses.asdict(self.BEGUN),
            "versions": {"backend": keras.backend.backend()},
        }
        runs.write_json(tmp_path / "config.json", described)
        return tmp_path

    def test_the_same_configuration_comes_back_from_json(self, run):
        assert from_json(Config, runs.read_config(run)["config"]) == self.BEGUN

    def test_same_options_and_those_that_change_nothing(self, run):
        runs.check_same(run, self.BEGUN)
        free = {
            "output": run,
            "resume": True,
            "health": 7,
            "checkpoint": Checkpoint(minutes=1),
            "distribution": "mirrored",
        }
        runs.check_same(run, dataclasses.replace(self.BEGUN, **free))

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
        message = (
            rf"was started with another value of .*{named}.* keras-preact train --resume {run}"
        )
        with pytest.raises(ValueError, match=message):
            runs.check_same(run, dataclasses.replace(self.BEGUN, **changes))

    def test_another_backend(self, run):
        runs.write_json(run / "config.json", {"config": {}, "versions": {"backend": "theano"}})
        with pytest.raises(
            ValueError, match=r"was trained on theano: set KERAS_BACKEND=theano to resume it"
        ):
            runs.check_same(run, self.BEGUN)

    def test_an_option_of_another_version(self):
        with pytest.raises(ValueError, match=r"Another version .* its option warp"):
            from_json(Config, {"optimizer": {"warp": 9}})

    def test_what_a_version_before_did_not_know_has_its_default(self):
        assert from_json(Config, {"seed": 5, "data": {"dir": "a"}}) == Config(
            seed=5, data=Data(dir=Path("a"))
        )
