"""A file is replaced completely or not at all."""

import os
import subprocess
import sys

import pytest

from keras_preact import atomic


def test_the_new_file_appears_whole(tmp_path):
    path = tmp_path / "net.weights.h5"
    path.write_text("old")
    with atomic.replacing(path) as temporary:
        assert temporary.parent == tmp_path
        assert temporary.name.endswith(".weights.h5")
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o027, 0o077])
@pytest.mark.parametrize("again", [False, True])  # the writer makes the file again
def test_a_new_file_has_the_permissions_of_any_other(tmp_path, umask, again):
    before = os.umask(umask)
    try:
        (tmp_path / "other").touch()
        with atomic.replacing(tmp_path / "new") as temporary:
            # nobody reads more while it is written
            assert temporary.stat().st_mode & umask == 0
            if again:
                temporary.unlink()
                os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))
            temporary.write_text("new")
    finally:
        os.umask(before)
    assert permissions(tmp_path / "new") == permissions(tmp_path / "other") == 0o666 & ~umask


@pytest.mark.parametrize("mode", [0o400, 0o444, 0o600, 0o640, 0o664, 0o666])
def test_a_replaced_file_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "file"
    path.touch()
    path.chmod(mode)
    replace(path)
    assert permissions(path) == mode


def permissions(path) -> int:
    return path.stat().st_mode & 0o777


def fail(*_):
    raise OSError("disk")


def replace(path, afterwards=lambda: None):
    with atomic.replacing(path) as temporary:
        temporary.write_text("new")
        afterwards()


@pytest.mark.parametrize("place", ["content", "disk"])
def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch, place):
    path = tmp_path / "file"
    path.write_text("old")
    if place == "disk":
        monkeypatch.setattr(atomic, "sync", fail)
    with pytest.raises(OSError, match="disk"):
        replace(path, *([fail] if place == "content" else []))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


#: Holds a workshop in the folder of its first argument until stdin ends.
HOLDS = """
import sys
from pathlib import Path
from keras_preact import atomic
with atomic.workshop(Path(sys.argv[1]), sys.argv[2]) as made:
    (made / "part").touch()
    print(made.name, flush=True)
    sys.stdin.read()
"""


@pytest.mark.process
@pytest.mark.parametrize("prefix", [pytest.param(".export-", marks=pytest.mark.soak), ".[a*]-"])
def test_workshops_of_killed_processes_are_removed_and_no_others(tmp_path, prefix):
    others = [f"{prefix}backup", f"x{prefix}{16 * 'a'}", f"{prefix}{16 * 'b'}"]
    for name in others[:2]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    (tmp_path / others[2]).mkdir()  # empty: perhaps another process has made it just now
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", HOLDS, str(tmp_path), prefix]
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            name = process.stdout.readline().strip()
            for living in (True, False):
                if not living:
                    process.kill()
                    process.wait()
                    assert (tmp_path / name / "part").exists()
                with atomic.workshop(tmp_path, prefix) as made:
                    expected = {*others, made.name} | ({name} if living else set())
                    assert {path.name for path in tmp_path.iterdir()} == expected
        finally:
            process.kill()
    assert {path.name for path in tmp_path.iterdir()} == {*others}


def test_a_workshop_on_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*arguments):
        raise OSError("Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    left = tmp_path / f".export-{16 * 'a'}"
    left.mkdir()
    (left / "part").touch()
    with atomic.workshop(tmp_path, ".export-") as made:
        assert made.is_dir()
    assert list(tmp_path.iterdir()) == [left]
