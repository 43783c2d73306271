"""What bundles are made of: zips below a size, and wheels for another Python, which a
real pip picks.
"""

import zipfile

import keras
import numpy as np
import pytest

from training.cli import UserError
from training.reproduce import pieces
from training.reproduce.bundle import wheels

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="nothing of it depends on the backend"
)


def test_zips(tmp_path):
    """No piece reaches the limit, not even with bytes that deflating makes longer; all
    files arrive in their order.
    """
    rng = np.random.default_rng(0)
    members = [
        (f"folder/{number}.whl", rng.bytes(size))
        for number, size in enumerate(rng.integers(0, 9_000, 40))
    ]
    members += [
        (f"{number}.py", rng.bytes(size)) for number, size in enumerate(rng.integers(0, 9_000, 40))
    ]
    paths = pieces.write_zips(members, tmp_path, "piece", 10_000)
    assert all(path.stat().st_size < 10_000 for path in paths)
    assert len(paths) < 60
    arrived = []
    for number in range(len(paths)):
        with zipfile.ZipFile(tmp_path / f"piece-{number}.zip") as archive:
            arrived += [(name, archive.read(name)) for name in archive.namelist()]
    assert arrived == members
    with pytest.raises(UserError, match="no room for b, 3,000 bytes"):
        pieces.write_zips([("a", b"a" * 800), ("b", b"b" * 3_000)], tmp_path, "piece", 1_000)


def test_new_folder(tmp_path):
    def fail(folder):
        (folder / "half").write_text("")
        raise KeyError

    with pytest.raises(KeyError), pieces.new_folder(tmp_path / "a") as folder:
        fail(folder)
    assert not list(tmp_path.iterdir())
    (tmp_path / "a").mkdir()
    with pieces.new_folder(tmp_path / "a") as folder:
        (folder / "whole").write_text("")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "whole"]


def write_wheel(folder, name: str, tag: str, *needs: str) -> None:
    project, version = name.split("-")
    about = f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {n}\n" for n in needs
    )
    with zipfile.ZipFile(folder / f"{name}-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{name}.dist-info/METADATA", about)
        wheel.writestr(
            f"{name}.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
        )
        wheel.writestr(f"{name}.dist-info/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip downloads from, instead of the network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(wheels, "CONSTRAINTS", tmp_path / "constraints.txt")
    wheels.CONSTRAINTS.write_text("keras==3.1\n")
    return folder


def test_download(index):
    """Those of the given Python and platform, of the versions in constraints.txt,
    without what the machine has.
    """
    write_wheel(index, "keras-3.1", "py3-none-any", "h5py", "numpy")
    write_wheel(index, "keras-3.2", "py3-none-any", "h5py", "numpy")
    write_wheel(index, "tyro-1.0", "py3-none-any", "ml_dtypes")
    write_wheel(index, "ml_dtypes-1.0", "py3-none-any")
    for python in ("cp312", "cp313"):
        write_wheel(index, "h5py-3.0", f"{python}-{python}-manylinux2014_x86_64")
        write_wheel(index, "numpy-2.0", f"{python}-{python}-manylinux_2_27_x86_64")
    write_wheel(index, "h5py-3.1", "cp312-cp312-manylinux_2_34_x86_64")  # too new for the platform
    found = dict(wheels.wheels("3.12", "manylinux_2_28_x86_64"))
    kept = [
        "h5py-3.0-cp312-cp312-manylinux2014_x86_64.whl",
        "keras-3.1-py3-none-any.whl",
        "tyro-1.0-py3-none-any.whl",
    ]
    assert list(found) == kept
    assert all(contents == (index / name).read_bytes() for name, contents in found.items())


def test_nothing_to_download(index):
    with pytest.raises(
        UserError,
        match=r"cannot download the wheels for Python 3\.12 on win_amd64: ERROR: .*keras.*--wheels FOLDER",
    ):
        list(wheels.wheels("3.12", "win_amd64"))
