"""Rows beyond a step are removed from a table, completely or not at all."""

import errno
import os

import pytest

from keras_preact.health._tables import drop_rows
from tests.training.commands import files


class TestDropRows:
    def drop(self, folder, content: bytes, beyond=5):
        path = folder / "table.csv"
        path.write_bytes(content)
        drop_rows(path, "step", beyond)
        assert files(folder) == ["table.csv"]
        return path.read_bytes()

    @pytest.mark.parametrize(
        ("content", "left"),
        [
            (b"step,a\n1,x\n5,y\n6,z\n", b"step,a\n1,x\n5,y\n"),
            (b"a,step\nx,7\n", b"a,step\n"),
            (b'a,step\n"x, y",5\n"x, y",6\n', b'a,step\n"x, y",5\n'),
            (b"step,a\n1,x\n2,", b"step,a\n1,x\n"),  # a line that was not finished
            (b"step,a\r\n1,x\r\n9,y\r\n", b"step,a\r\n1,x\r\n"),
            (b"step,a\n1,x\n", b"step,a\n1,x\n"),
            (b"", b""),
        ],
    )
    def test_beyond(self, tmp_path, content, left):
        assert self.drop(tmp_path, content) == left

    def test_a_file_that_stays_is_not_touched(self, tmp_path):
        path = tmp_path / "table.csv"
        path.write_bytes(b"step\n1\n")
        before = path.stat()
        drop_rows(path, "step", 5)
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        path.chmod(0o640)
        drop_rows(path, "step", 0)
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"step\n", 0o640)
        drop_rows(tmp_path / "none.csv", "step", 5)
        assert files(tmp_path) == ["table.csv"]

    def test_another_table(self, tmp_path):
        with pytest.raises(ValueError, match=r"has no column 'step'. Received: a, b"):
            self.drop(tmp_path, b"a,b\n1,2\n")

    def test_a_failure_leaves_the_file(self, tmp_path, monkeypatch):
        def fail(*arguments):
            raise OSError(errno.ENOSPC, "No space left on device")

        path = tmp_path / "table.csv"
        path.write_bytes(b"step\n9\n")
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            drop_rows(path, "step", 5)
        assert files(tmp_path) == ["table.csv"]
        assert path.read_bytes() == b"step\n9\n"
