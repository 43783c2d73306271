"""The state of unfinished runs travels in pieces: all of it arrives, or nothing."""

import tarfile
from pathlib import Path

import keras
import numpy as np
import pytest

from training.cli import UserError
from training.reproduce.bundle import pack_state, unpack_state

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="nothing of it depends on the backend"
)


@pytest.fixture
def state(tmp_path):
    """A folder as unfinished runs leave one, of 2.5 MiB of numbers and small files."""
    folder = tmp_path / "runs"
    (folder / "a" / "empty").mkdir(parents=True)
    np.save(
        folder / "a" / "weights.npy", np.random.default_rng(0).integers(0, 256, 5 * 2**19, "uint8")
    )
    (folder / "a" / "state.json").write_text('{"step": 12}\n')
    (folder / "b.csv").write_text("")
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: path.read_bytes() if path.is_file() else None for name, path in paths.items()}


def test_state(state, tmp_path):
    written = pack_state(state, tmp_path / "out", piece_mib=1)
    sizes = [path.stat().st_size for path in written]
    assert [path.name for path in written] == [
        "state.json",
        *(f"state-{number:04}.part" for number in range(3)),
    ]
    assert sizes[1:3] == [2**20, 2**20]
    assert 0 < sizes[3] <= 2**20
    assert set((tmp_path / "out").iterdir()) == set(written)
    unpack_state(tmp_path / "out", tmp_path / "new" / "runs")
    assert contents(tmp_path / "new" / "runs") == contents(state)
    # as its documentation says, without this module
    (tmp_path / "whole.tar").write_bytes(b"".join(path.read_bytes() for path in written[1:]))
    with tarfile.open(tmp_path / "whole.tar") as archive:
        archive.extractall(tmp_path / "tar", filter="data")
    assert contents(tmp_path / "tar") == contents(state)
    for action in (
        lambda: pack_state(state, tmp_path / "out"),
        lambda: unpack_state(tmp_path / "out", state),
    ):
        with pytest.raises(UserError, match="exists and is not empty"):
            action()


def test_incomplete_state(state, tmp_path):
    out, target = tmp_path / "out", tmp_path / "target"
    written = pack_state(state, out, piece_mib=1)
    for path in written:
        whole = path.read_bytes()
        path.unlink()
        with pytest.raises(UserError, match=f"lacks {path.name}"):
            unpack_state(out, target)
        for damage in (
            whole[: len(whole) // 2],
            whole[:100] + bytes([whole[100] ^ 1]) + whole[101:],
            b"",
        ):
            path.write_bytes(damage)
            with pytest.raises(
                UserError, match=r"damaged.*" + ("" if path.suffix == ".json" else path.name)
            ):
                unpack_state(out, target)
        path.write_bytes(whole)
        assert not target.exists()
    unpack_state(out, target)
    assert contents(target) == contents(state)


def test_state_mistakes(state, tmp_path):
    with pytest.raises(UserError, match="is no folder with runs"):
        pack_state(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(UserError, match="must be positive"):
        pack_state(state, tmp_path / "out", 0)
    pack_state(state, tmp_path / "out")
    manifest = tmp_path / "out" / "state.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 3'))
    with pytest.raises(UserError, match="has format 3; this version reads 1"):
        unpack_state(tmp_path / "out", tmp_path / "target")
