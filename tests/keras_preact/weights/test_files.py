"""State files: what other libraries write is read as they meant it, and nothing in a
file is executed.
"""

import argparse
import os
import pickle

import numpy as np
import pytest

from keras_preact import weights

torch = pytest.importorskip("torch")
import safetensors.numpy  # noqa: E402
import safetensors.torch  # noqa: E402

KERNEL = np.arange(24, dtype="float32").reshape(2, 3, 4) / 7
BIAS = np.float32([1, -2])
STATE = {"fc.weight": KERNEL, "fc.bias": BIAS, "norm.num_batches_tracked": np.int64(3)}


def tensors(prefix="", scale=1):
    return {prefix + name: torch.tensor(scale * array) for name, array in STATE.items()}


def write(content, path, **options):
    """Write a file in the format of its ending."""
    if path.suffix == ".npz":
        np.savez(path, **content)
    elif path.suffix == ".safetensors":
        safetensors.torch.save_file(content, path)
    else:
        torch.save(content, path, **options)


def assert_is_state(read):
    assert read.keys() == STATE.keys()
    for name, array in STATE.items():
        np.testing.assert_array_equal(read[name], array)
        assert read[name].dtype == np.asarray(array).dtype


TRAINING = {"epoch": 3, "optimizer": {"state": {}}, "args": argparse.Namespace(lr=0.1)}
#: What a file may hold, and its ending.
CHECKPOINTS = {
    "plain": (tensors(), ".bin"),
    "training": ({"state_dict": tensors(), **TRAINING}, ".pth"),
    "model": ({"model": tensors()}, ".pt"),
    "averaged": ({"state_dict": tensors(scale=2), "state_dict_ema": tensors()}, ".pth"),
    "data_parallel": ({"state_dict": tensors("module.")}, ".pth"),
    "compiled": (tensors("_orig_mod.module."), ".pth"),
    "safetensors": (tensors("module."), ".safetensors"),
    "npz": (STATE, ".npz"),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_reading(tmp_path, kind):
    content, suffix = CHECKPOINTS[kind]
    write(content, tmp_path / f"w{suffix}")
    assert_is_state(weights.read_state(tmp_path / f"w{suffix}"))


def test_torch_of_before_its_zip_files(tmp_path):
    write(tensors(), tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    assert_is_state(weights.read_state(str(tmp_path / "w.pth")))


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_half_precision_becomes_float32(tmp_path, name):
    halves = {str(dtype): torch.tensor(KERNEL).to(dtype) for dtype in (torch.bfloat16, torch.half)}
    write(halves, tmp_path / name)
    for dtype, read in weights.read_state(tmp_path / name).items():
        assert read.dtype == "float32"
        np.testing.assert_array_equal(read, halves[dtype].float().numpy())


def test_writing(tmp_path):
    path = tmp_path / "w.safetensors"
    turned = KERNEL.transpose(2, 0, 1)  # not dense in memory
    weights.write_state(path, {"w": np.zeros(2)})
    weights.write_state(path, STATE | {"fc.weight": turned})
    read = weights.read_state(path)
    np.testing.assert_array_equal(read["fc.weight"], turned)
    assert_is_state(read | {"fc.weight": KERNEL})
    assert safetensors.torch.load_file(path)["norm.num_batches_tracked"] == 3


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    weights.write_state(path, STATE)

    def full(state, path, metadata):
        path.write_bytes(b"half")
        raise safetensors.SafetensorError("No space left on device")

    with pytest.raises(ValueError, match=r"'w' of the type object"):
        weights.write_state(path, {"w": np.array([None])})
    with pytest.raises(ValueError, match=r"w\.pth"):
        weights.write_state(tmp_path / "w.pth", STATE)
    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        weights.write_state(path, {"w": np.zeros(2)})
    assert_is_state(weights.read_state(path))
    assert os.listdir(tmp_path) == ["w.safetensors"]


class Malicious:
    """Unpickling it makes a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("kind", ["torch", "old torch", "pickle", "npz"])
def test_pickles_do_not_run(tmp_path, kind):
    ran, path = tmp_path / "ran", tmp_path / ("w.npz" if kind == "npz" else "w.pth")
    state = {"w": np.array([Malicious(ran)], dtype=object)}
    if kind == "pickle":
        path.write_bytes(pickle.dumps(state))
    else:
        write(state, path, _use_new_zipfile_serialization=kind == "torch")
    with pytest.raises(ValueError, match=r"w\.(npz|pth)"):
        weights.read_state(path)
    assert not ran.exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".npz"])
def test_damaged_files(tmp_path, suffix):
    path = tmp_path / f"w{suffix}"
    write(STATE if suffix == ".npz" else tensors(), path)
    whole = path.read_bytes()
    for content in (b"<html>", b"", whole[:100], whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"w{suffix}'? (is damaged|holds)"):
            weights.read_state(path)


def write_one_array(path):
    with path.open("wb") as file:
        np.save(file, KERNEL)


FLOAT8 = {"w": torch.zeros(2, dtype=torch.float8_e4m3fn)}
#: What is at a path, as a function that puts it there, and a word of the message.
NO_STATES = {
    "folder.pth": (lambda path: path.mkdir(), "is a folder"),
    "missing.pth": (lambda path: None, "does not exist"),
    "w.h5": (lambda path: path.touch(), "ends in"),
    "empty.npz": (lambda path: write({}, path), "holds no weights"),
    "one.npz": (write_one_array, "without a name"),
    "list.pth": (lambda path: write([torch.zeros(2)], path), "It holds: list"),
    "other.pth": (lambda path: write({"epoch": 3, "w": {}}, path), "It holds: epoch, w"),
    "float8.safetensors": (lambda path: write(FLOAT8, path), "type that NumPy lacks"),
}


@pytest.mark.parametrize("name", NO_STATES)
def test_files_without_a_state(tmp_path, name):
    make, words = NO_STATES[name]
    make(tmp_path / name)
    with pytest.raises(ValueError, match=words) as error:
        weights.read_state(tmp_path / name)
    assert name in str(error.value)
