"""Archives of images: nothing is lost, no piece is too large, and damage is found
wherever it is.
"""

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

from tests.training.images import write_folder, write_tfds
from training import data
from training.cli import UserError
from training.config import Data
from training.reproduce import images

# children of these tests compute with JAX, which is not there with every backend
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="nothing of it depends on the backend"
)

ROOT = Path(__file__).parents[3]


def coloured(train=1_230, test=517, channels=3, seed=0) -> images.Images:
    """Return images of 8 x 6 pixels of noise, in numbers that fill no mosaic, and no
    row of one.
    """
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (train + test, 8, 6, channels), "uint8")
    y = rng.integers(0, 3, train + test)
    return images.Images(
        "cifar10", ("ant", "bee", "cat"), x[:train], y[:train], x[train:], y[train:]
    )


def assert_same(one: images.Images, other: images.Images) -> None:
    assert (one.name, one.classes, one.fingerprint) == (
        other.name,
        other.classes,
        other.fingerprint,
    )
    for part in ("train_x", "train_y", "test_x", "test_y"):
        a, b = getattr(one, part), getattr(other, part)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_load_digits():
    ours, theirs = images.load("digits"), data.load(Data("digits"))
    np.testing.assert_array_equal(ours.train_x, theirs.train.reader.images)
    np.testing.assert_array_equal(ours.test_y, theirs.test.reader.labels)
    assert (ours.train_x.shape, ours.test_x.shape) == ((1437, 8, 8, 1), (360, 8, 8, 1))
    assert (ours.mean, ours.std) == (theirs.preprocessing.mean, theirs.preprocessing.std)


def test_load_tfds(tmp_path):
    rng = np.random.default_rng(0)
    x = {
        split: rng.integers(0, 256, (count, 32, 32, 3), "uint8")
        for split, count in (("train", 70), ("test", 30))
    }
    y = {split: rng.integers(0, 10, len(x[split])) for split in x}
    write_tfds("cifar10", tmp_path, x, y)
    loaded = images.load("cifar10", tmp_path)
    for split in x:  # TensorFlow Datasets keeps an order of its own
        own = {image.tobytes(): label for image, label in zip(x[split], y[split], strict=True)}
        found = zip(getattr(loaded, f"{split}_x"), getattr(loaded, f"{split}_y"), strict=True)
        assert {image.tobytes(): label for image, label in found} == own
    assert loaded.classes == data.load(Data("cifar10", dir=tmp_path)).classes
    np.testing.assert_allclose(loaded.mean, x["train"].mean((0, 1, 2)), atol=1e-4)
    images.write_archive(loaded, tmp_path)
    assert_same(images.load("cifar10", tmp_path), loaded)


def test_load_other(tmp_path):
    write_folder(tmp_path)
    with pytest.raises(UserError, match="images of several sizes"):
        images.load("folder", tmp_path)
    with pytest.raises(ValueError, match=r"data\.name"):
        images.load("cifar", tmp_path)


def test_fingerprint():
    one = coloured()
    assert one.fingerprint == coloured().fingerprint
    assert len(one.fingerprint) == 64
    for part in ("train_x", "train_y", "test_x", "test_y"):
        changed = coloured()
        getattr(changed, part)[-1] ^= 1
        assert changed.fingerprint != one.fingerprint
    renamed = images.Images("other", one.classes, one.train_x, one.train_y, one.test_x, one.test_y)
    flat = images.Images(
        one.name, one.classes, one.train_x.reshape(-1, 6, 8, 3), one.train_y, one.test_x, one.test_y
    )
    assert len({one.fingerprint, renamed.fingerprint, flat.fingerprint}) == 3


@pytest.mark.parametrize("channels", [1, 3])
def test_archive(channels, tmp_path):
    whole = coloured(channels=channels)
    limit = 60_000 * channels  # a mosaic of noise has 24,000 bytes a channel
    written = images.write_archive(whole, tmp_path / "one", limit)
    assert [path.name for path in written] == [
        f"cifar10-images-{number}.zip" for number in range(len(written))
    ]
    assert len(written) > 1
    assert all(path.stat().st_size < limit for path in written)
    assert_same(images.read("cifar10", tmp_path / "one"), whole)

    again = images.write_archive(whole, tmp_path / "two", limit)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]
    with pytest.raises(UserError, match="has an archive of cifar10 already"):
        images.write_archive(whole, tmp_path / "one", limit)


def test_digits_archive(tmp_path, monkeypatch):
    digits = images.load("digits")
    images.write_archive(digits, tmp_path)
    monkeypatch.setenv(images.FOLDER, str(tmp_path))
    loaded = images.load("digits")
    assert_same(loaded, digits)
    assert (loaded.mean, loaded.std) == (digits.mean, digits.std)


def test_limit_is_exact(tmp_path):
    """A piece fills the limit as far as whole mosaics do, and a limit that a piece just
    reaches is not kept.
    """
    whole = coloured(400, 100)
    (path,) = images.write_archive(whole, tmp_path / "a")
    size = path.stat().st_size
    for limit in range(size - 150, size + 300, 50):
        pieces = images.write_archive(whole, tmp_path / str(limit), limit)
        assert all(piece.stat().st_size < limit for piece in pieces)
        assert len(pieces) == 1 or limit < size + 150
    with pytest.raises(UserError, match="A piece must have room for"):
        images.write_archive(whole, tmp_path / "small", 5_000)
    assert not (tmp_path / "small").exists()


def test_format(tmp_path):
    """What the module says of the format, read with nothing of ours."""
    whole = coloured(channels=1)
    images.write_archive(whole, tmp_path, 60_000)
    x, y = {"train": [], "test": []}, {"train": [], "test": []}
    for number in range(len(list(tmp_path.iterdir()))):
        with zipfile.ZipFile(tmp_path / f"cifar10-images-{number}.zip") as archive:
            manifest = json.loads(archive.read("manifest.json"))
            assert (manifest["piece"], manifest["classes"]) == (number, ["ant", "bee", "cat"])
            for mosaic in manifest["mosaics"]:
                picture = Image.open(io.BytesIO(archive.read(mosaic["file"])))
                assert picture.format == "WEBP"
                for i, label in enumerate(mosaic["labels"]):
                    top, left = i // 20 * 8, i % 20 * 6
                    x[mosaic["split"]].append(
                        np.asarray(picture.crop((left, top, left + 6, top + 8)))[..., :1]
                    )
                    y[mosaic["split"]].append(label)
    for split in x:
        np.testing.assert_array_equal(np.array(x[split]), getattr(whole, f"{split}_x"))
        np.testing.assert_array_equal(y[split], getattr(whole, f"{split}_y"))


def test_missing_piece(tmp_path):
    written = images.write_archive(coloured(), tmp_path, 80_000)
    assert len(written) > 2
    for path in written:
        contents = path.read_bytes()
        path.unlink()
        with pytest.raises(UserError, match=rf"lacks {path.name} of {len(written)} pieces"):
            images.load("cifar10", tmp_path)
        path.write_bytes(contents)
    images.load("cifar10", tmp_path)
    with pytest.raises(UserError, match="has no archive of cifar100"):
        images.read("cifar100", tmp_path)


def test_flipped_bytes(tmp_path):
    """Wherever a byte is flipped, the piece is named, or the byte was none that counts."""
    whole = coloured(60, 25)
    (path,) = images.write_archive(whole, tmp_path)
    contents = path.read_bytes()
    size = len(contents)
    places = {
        *range(60),
        *range(size - 250, size),
        *np.random.default_rng(0).integers(0, size, 100).tolist(),
    }
    found = 0
    for place in places:
        path.write_bytes(contents[:place] + bytes([contents[place] ^ 0xFF]) + contents[place + 1 :])
        try:
            assert_same(images.read("cifar10", tmp_path), whole)
        except UserError as error:
            assert str(path) in str(error)  # noqa: PT017
            found += 1
    assert found > 200
    for cut in (0, 100, size // 2, size - 1):
        path.write_bytes(contents[:cut])
        with pytest.raises(UserError, match=r"cifar10-images-0\.zip is damaged"):
            images.read("cifar10", tmp_path)


def test_mixed_archives(tmp_path):
    for seed in (0, 1):
        written = images.write_archive(coloured(seed=seed), tmp_path / str(seed), 150_000)
    written[1].replace(tmp_path / "0" / written[1].name)
    with pytest.raises(UserError, match="different archives"):
        images.read("cifar10", tmp_path / "0")


def test_wrong_labels(tmp_path):
    """An archive that is a good zip file, but not of these images."""
    (path,) = images.write_archive(coloured(60, 25), tmp_path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(members["manifest.json"])
    for change, part in (
        ({"mosaics": manifest["mosaics"][::-1]}, "do not match"),
        ({"format": 2}, "has format 2"),
    ):
        manifest["mosaics"][0]["labels"][0] ^= 1
        with zipfile.ZipFile(path, "w") as archive:
            for name, contents in (
                members | {"manifest.json": json.dumps(manifest | change)}
            ).items():
                archive.writestr(name, contents)
        with pytest.raises(UserError, match=part):
            images.read("cifar10", tmp_path)


@pytest.mark.parametrize("shape", [(5, 8, 8, 4), (5, 8, 8)])
def test_wrong_shape(shape, tmp_path):
    x, y = np.zeros(shape, "uint8"), np.zeros(5, "int64")
    with pytest.raises(UserError, match="must be"):
        images.write_archive(images.Images("a", ("a",), x, y, x, y), tmp_path)


def test_without_tensorflow(tmp_path):
    """An archive is read in a process in which neither TensorFlow nor what else the
    machine lacks can be imported.
    """
    images.write_archive(whole := coloured(), tmp_path)
    blocked = dict.fromkeys(("tensorflow", "tensorflow_datasets", "sklearn", "matplotlib"))
    code = (
        f"import sys; sys.modules.update({blocked}); from pathlib import Path; from "
        "training.reproduce import images\n"
        f"print(images.load('cifar10', Path({str(tmp_path)!r})).fingerprint)"
    )
    options = {"env": {"KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT)}, "cwd": tmp_path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)
    assert done.stdout.strip() == whole.fingerprint, done.stderr
