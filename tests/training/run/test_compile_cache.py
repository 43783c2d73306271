"""Compiled steps stay on disk: where, for whom, how long, and that a run uses them."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from tests.training.calls import TINY, error_of, finish, start
from training import backends
from training.commands import train
from training.directory import models
from training.run import compile_cache

JAX, TORCH, TENSORFLOW = "JAX_COMPILATION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TF_XLA_FLAGS"
DAY = 24 * 3600


@pytest.fixture
def variables(monkeypatch, tmp_path) -> dict[str, str]:
    """Environment variables without those of a cache, and with a home of their own."""
    own = {key: value for key, value in os.environ.items() if key not in (JAX, TORCH, TENSORFLOW)}
    own |= {"XDG_CACHE_HOME": str(tmp_path / "caches"), "HOME": str(tmp_path)}
    monkeypatch.setattr(os, "environ", own)
    return own


def set_by(choice: str, variables: dict[str, str]) -> dict[str, str]:
    """Return the environment variables that `use` sets."""
    before = dict(variables)
    compile_cache.use(choice)
    return {key: value for key, value in variables.items() if before.get(key) != value}


class TestVariables:
    def test_by_default_jax_has_a_folder_in_the_users_cache(self, variables, tmp_path):
        [(name, folder)] = set_by("auto", variables).items()
        assert name == JAX
        assert Path(folder).parent == tmp_path / "caches" / "keras-preact" / "compiled"
        assert Path(folder).is_dir()

    def test_without_xdg_cache_home_it_is_in_the_home(self, variables, tmp_path):
        del variables["XDG_CACHE_HOME"]
        assert Path(set_by("auto", variables)[JAX]).is_relative_to(tmp_path / ".cache")

    def test_a_folder_that_a_person_has_set_stays(self, variables):
        variables[JAX] = "/of/a/person"
        assert set_by("auto", variables) == {}

    def test_a_folder_that_is_named_is_used_by_every_backend(self, variables, tmp_path):
        variables |= {JAX: "/of/a/person", TENSORFLOW: "--tf_xla_auto_jit=2"}
        found = set_by(str(tmp_path / "named"), variables)
        folder = found[JAX]
        assert Path(folder).parent == tmp_path / "named"
        assert found == {
            JAX: folder,
            TORCH: folder,
            TENSORFLOW: f"--tf_xla_auto_jit=2 --tf_xla_persistent_cache_directory={folder}",
        }

    def test_off(self, variables):
        assert set_by("off", variables) == {"JAX_ENABLE_COMPILATION_CACHE": "false"}

    def test_other_machines_have_other_folders(self, variables, monkeypatch, tmp_path):
        """Code for AVX-512 ends the process of a CPU without it."""
        folders = set()
        for flags in ("avx2", "avx2 avx512f"):
            monkeypatch.setattr(backends, "instructions", lambda flags=flags: flags)
            folders.add(set_by(str(tmp_path), variables)[JAX])
        assert len(folders) == 2

    def test_a_home_that_cannot_be_written_is_no_error(self, variables, tmp_path):
        (tmp_path / "caches").write_text("no folder")
        assert set_by("auto", variables) == {}


def test_files_that_nobody_reads_are_deleted(variables, tmp_path, monkeypatch):
    """Those of another user stay in a folder that several share."""
    unlink = Path.unlink

    def not_of_another_user(path):
        if path.name == "of another":
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path)

    monkeypatch.setattr(Path, "unlink", not_of_another_user)
    folder = Path(set_by(str(tmp_path), variables)[JAX])
    now = time.time()
    ages = {"read": (1, 90), "written": (90, 1), "old": (31, 31), "new": (0, 0)}
    ages["of another"] = (31, 31)
    for name, (read, written) in ages.items():
        (folder / name).write_text("compiled")
        os.utime(folder / name, (now - read * DAY, now - written * DAY))
    (folder / "inner").mkdir()  # PyTorch's
    os.utime(folder / "inner", (now - 90 * DAY, now - 90 * DAY))
    set_by(str(tmp_path), variables)
    kept = ["inner", "new", "of another", "read", "written"]
    assert sorted(path.name for path in folder.iterdir()) == kept


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path, capsys):
    file = tmp_path / "compiled"
    file.write_text("no folder")
    options = ["digits", *TINY, "--compile-cache", str(file), "--output", str(tmp_path / "run")]
    assert str(file) in error_of(capsys, train.main, options)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_writes_nothing(variables, tmp_path, capsys):
    folder = tmp_path / "compiled"
    train.main(["digits", *TINY, "--compile-cache", str(folder), "--dry-run"])
    assert "to compile" in capsys.readouterr().out
    assert not folder.exists()
    assert not {JAX, TORCH, TENSORFLOW} & variables.keys()


@pytest.mark.soak
@pytest.mark.process
def test_the_second_run_does_not_compile_its_steps(monkeypatch, tmp_path):
    """On JAX. The weights are the same, to the bit."""
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_LOG_COMPILES", "1")
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # quick to compile
    runs = [tmp_path / "first", tmp_path / "second"]
    messages = []
    for run in runs:
        options = [*TINY, "--compile-cache", tmp_path / "compiled", "--output", run]
        command = ["-m", "training", "train", "digits", *options]
        status, _, err = finish(start(*command, cwd=tmp_path, KERAS_BACKEND="jax"))
        assert status == 0, err
        messages.append(err)
    hit = "Persistent compilation cache hit for 'jit_train_step'"
    assert [hit in text for text in messages] == [False, True]
    first, second = (models.load(run / "model.keras").get_weights() for run in runs)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
