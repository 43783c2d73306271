"""A file is replaced completely or not at all."""

import pytest

from keras_preact import atomic
from keras_preact.health._tables import drop_rows


def test_the_new_file_appears_whole(tmp_path):
    path = tmp_path / "net.weights.h5"
    path.write_text("old")
    with atomic.replacing(path) as temporary:
        assert temporary.parent == tmp_path
        assert temporary.name.endswith(".weights.h5")
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def fail(*_):
    raise OSError("disk")


def broken_content(path):
    with atomic.replacing(path) as temporary:
        temporary.write_text("new")
        fail()


def table(path):
    drop_rows(path, "step", 5)


@pytest.mark.parametrize("write", [broken_content, table])
def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch, write):
    path = tmp_path / "file"
    path.write_text("step\n9\n")
    if write is not broken_content:
        monkeypatch.setattr(atomic, "sync", fail)
    with pytest.raises(OSError, match="disk"):
        write(path)
    assert path.read_text() == "step\n9\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (b"step,a\n1,x\n5,y\n6,z\n", b"step,a\n1,x\n5,y\n"),
        (b'a,step\n"x, y",5\n"x, y",6\n', b'a,step\n"x, y",5\n'),
        (b"step,a\n1,x\n2,", b"step,a\n1,x\n"),  # a line that was not finished
        (b"step,a\r\n1,x\r\n9,y\r\n", b"step,a\r\n1,x\r\n"),
        (b"", b""),
    ],
)
def test_rows_after_a_step_are_dropped(tmp_path, content, left):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    path.chmod(0o640)
    table(path)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (left, 0o640)
    table(tmp_path / "none.csv")
    assert list(tmp_path.iterdir()) == [path]
