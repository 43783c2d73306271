"""A file is replaced completely or not at all."""

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
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


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
