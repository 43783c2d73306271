"""State files: what other libraries write is read as they meant it, and nothing in a
file is executed.
"""

import argparse
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from keras_preact import weights

torch = pytest.importorskip("torch")
import safetensors.torch  # noqa: E402

KERNEL = np.arange(24, dtype="float32").reshape(2, 3, 4) / 7
STATE = {
    "fc.weight": KERNEL,
    "fc.bias": np.float32([1, -2]),
    "norm.num_batches_tracked": np.int64(3),
}


def tensors(prefix="", scale=1):
    return {prefix + name: torch.tensor(scale * array) for name, array in STATE.items()}


def assert_is_state(read, scale=1):
    assert read.keys() == STATE.keys()
    for name, array in STATE.items():
        np.testing.assert_array_equal(read[name], scale * array)
        assert read[name].dtype == np.asarray(array).dtype


#: What a .pth file may hold.
CHECKPOINTS = {
    "plain": tensors(),
    "training": {
        "epoch": 3,
        "state_dict": tensors(),
        "optimizer": {"state": {}},
        "args": argparse.Namespace(lr=0.1),
    },
    "model": {"model": tensors()},
    "averaged": {"state_dict": tensors(scale=2), "state_dict_ema": tensors()},
    "data_parallel": {"state_dict": tensors("module.")},
    "compiled": tensors("_orig_mod.module."),
}


#: Reads, then writes as where a disk is full: past its limit a file cannot grow.
CHILD = """
import resource, signal, sys
from keras_preact import weights

print(weights.read_state(sys.argv[1])["w"].sum())

import numpy as np

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    weights.write_state(sys.argv[2], {"w": np.zeros(10_000)})
except OSError as error:
    print("OSError:", error)
"""


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """The lines that a process of its own printed, the file that it could not replace,
    and what was in that before.
    """
    pytest.importorskip("resource")
    halves = tmp_path_factory.mktemp("halves") / "w.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2, dtype=torch.bfloat16)}, halves)
    full = tmp_path_factory.mktemp("full") / "w.safetensors"
    weights.write_state(full, STATE)
    before = full.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, halves, full], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines(), full, before


class TestReading:
    @pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin"])
    @pytest.mark.parametrize("kind", CHECKPOINTS)
    def test_torch(self, tmp_path, kind, suffix):
        torch.save(CHECKPOINTS[kind], tmp_path / f"w{suffix}")
        assert_is_state(weights.read_state(tmp_path / f"w{suffix}"))

    def test_torch_of_before_its_zip_files(self, tmp_path):
        torch.save(tensors(), tmp_path / "w.pth", _use_new_zipfile_serialization=False)
        assert_is_state(weights.read_state(str(tmp_path / "w.pth")))

    def test_torch_parameters_that_are_trained(self, tmp_path):
        torch.save(dict(torch.nn.Linear(2, 3).named_parameters()), tmp_path / "w.pth")
        assert weights.read_state(tmp_path / "w.pth")["weight"].shape == (3, 2)

    def test_safetensors_and_npz(self, tmp_path):
        safetensors.torch.save_file(tensors("module."), tmp_path / "w.safetensors")
        np.savez(tmp_path / "w.npz", **STATE)
        assert_is_state(weights.read_state(tmp_path / "w.safetensors"))
        assert_is_state(weights.read_state(tmp_path / "w.npz"))

    @pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_becomes_float32(self, tmp_path, dtype, suffix):
        halves = {"w": torch.tensor(KERNEL).to(dtype)}
        path = tmp_path / f"w{suffix}"
        torch.save(halves, path) if suffix == ".pth" else safetensors.torch.save_file(halves, path)
        read = weights.read_state(path)["w"]
        assert read.dtype == "float32"
        np.testing.assert_array_equal(read, halves["w"].float().numpy())
        assert np.any(read != KERNEL)

    def test_bfloat16_needs_nothing_else_imported(self, child):
        lines, *_ = child
        assert lines[0] == "2.0"


class TestWriting:
    def test_round_trip(self, tmp_path):
        path = tmp_path / "w.safetensors"
        weights.write_state(
            path, STATE | {"fc.weight": KERNEL.transpose(2, 0, 1)}
        )  # not dense in memory
        read = weights.read_state(path)
        np.testing.assert_array_equal(read["fc.weight"], KERNEL.transpose(2, 0, 1))
        assert_is_state(read | {"fc.weight": KERNEL})
        assert safetensors.torch.load_file(path)["norm.num_batches_tracked"] == 3

    def test_file_that_is_there_is_replaced_or_stays(self, tmp_path):
        path = tmp_path / "w.safetensors"
        weights.write_state(path, {"w": np.zeros(2)})
        weights.write_state(path, STATE)
        before = path.read_bytes()
        with pytest.raises(
            ValueError, match=r"arrays of numbers\. Received: 'w' of the type object"
        ):
            weights.write_state(path, {"w": np.array([None])})
        with pytest.raises(OSError, match=r"missing"):
            weights.write_state(tmp_path / "missing" / "w.safetensors", STATE)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["w.safetensors"]

    def test_full_disk_leaves_the_old_file(self, child):
        lines, path, before = child
        assert lines[1].startswith("OSError:")
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == ["w.safetensors"]

    def test_other_endings(self, tmp_path):
        with pytest.raises(ValueError, match=r"\.safetensors file\. Received: .*w\.pth"):
            weights.write_state(tmp_path / "w.pth", STATE)
        assert not list(tmp_path.iterdir())


class Malicious:
    """Unpickling it makes a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


class TestRefusal:
    @pytest.mark.parametrize("kind", ["torch", "old torch", "pickle", "npz"])
    def test_pickles_do_not_run(self, tmp_path, kind):
        ran = tmp_path / "ran"
        path = tmp_path / ("w.npz" if kind == "npz" else "w.pth")
        if kind == "npz":
            np.savez(path, w=np.array([Malicious(ran)], dtype=object))
            load = np.load(path, allow_pickle=True)
        elif kind == "pickle":
            path.write_bytes(pickle.dumps({"state_dict": {"w": Malicious(ran)}}))
        else:
            new = kind == "torch"
            torch.save(
                {"state_dict": {"w": Malicious(ran)}}, path, _use_new_zipfile_serialization=new
            )
        with pytest.raises(ValueError, match=r"w\.(npz|pth)"):
            weights.read_state(path)
        assert not ran.exists()
        # and it would have
        if kind == "npz":
            with load:
                load["w"]
        elif kind == "pickle":
            pickle.loads(path.read_bytes())
        else:
            torch.load(path, weights_only=False)
        assert ran.exists()

    @pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".npz"])
    def test_truncated(self, tmp_path, suffix):
        path = tmp_path / f"w{suffix}"
        if suffix == ".npz":
            np.savez(path, **STATE)
        else:
            torch.save(tensors(), path) if suffix == ".pth" else safetensors.torch.save_file(
                tensors(), path
            )
        whole = path.read_bytes()
        for length in (0, 1, 7, 100, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            with pytest.raises(ValueError, match=rf"w{suffix}'? (is damaged|holds)"):
                weights.read_state(path)

    def test_a_type_that_numpy_lacks(self, tmp_path):
        path = tmp_path / "w.safetensors"
        safetensors.torch.save_file({"w": torch.zeros(2, dtype=torch.float8_e4m3fn)}, path)
        with pytest.raises(ValueError, match=r"w\.safetensors' .*type that NumPy lacks.*float8"):
            weights.read_state(path)

    @pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".npz"])
    def test_other_content(self, tmp_path, suffix):
        path = tmp_path / f"w{suffix}"
        path.write_text("<html>not found</html>")
        with pytest.raises(ValueError, match=rf"w{suffix}'"):
            weights.read_state(path)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ([torch.zeros(2)], r"no mapping of names to tensors.* It holds: list"),
            ({"epoch": 3, "weights": {"w": torch.zeros(2)}}, r"It holds: epoch, weights"),
            ({}, r"no mapping"),
        ],
    )
    def test_no_state(self, tmp_path, content, message):
        torch.save(content, tmp_path / "w.pth")
        with pytest.raises(ValueError, match=message):
            weights.read_state(tmp_path / "w.pth")

    def test_no_file(self, tmp_path):
        (tmp_path / "folder.pth").mkdir()
        (tmp_path / "w.h5").touch()
        np.savez(tmp_path / "empty.npz")
        np.save(tmp_path / "one.npy", KERNEL)
        (tmp_path / "one.npy").rename(tmp_path / "one.npz")
        for name, message in (
            ("folder.pth", r"folder\.pth' is a folder"),
            ("missing.pth", r"missing\.pth' does not exist"),
            ("w.h5", r"ends in \.safetensors or \.npz or .* Received: .*w\.h5"),
            ("empty.npz", r"holds no weights"),
            ("one.npz", r"one array without a name"),
        ):
            with pytest.raises(ValueError, match=message):
                weights.read_state(tmp_path / name)
