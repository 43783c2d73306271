"""Folders of images: their splits, classes and files."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.keras_preact.export.image_files import encode, noise
from tests.training import images as pictures
from tests.training.images import arrays
from training.config import Data
from training.data import load
from training.errors import UserError

#: Class folders of a photo collection: an umlaut, a space, a small class.
PHOTOS = {"Bär": 30, "sea lion": 10, "emu": 3}


def write(folder: Path, *places: str) -> Path:
    """Write an image to each place, such as `train/cat/0.png`; return the folder."""
    for place in places:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(encode(noise(2, 2)))
    return folder


def write_classes(folder: Path, counts: dict[str, int], ending=".JPG") -> Path:
    return write(folder, *(f"{name}/{i}{ending}" for name, n in counts.items() for i in range(n)))


def inside(folder: Path, split) -> set[str]:
    """Return the paths of a split's images inside a folder."""
    return {path.relative_to(folder).as_posix() for path in split.paths}


def of(folder: Path, **options):
    return load(Data("folder", dir=folder, **options))


def test_reads_classes_and_images(tmp_path):
    pictures.write_folder(tmp_path, classes=("cat", "dog", "emu"), images=4)
    data = load(Data("folder", dir=tmp_path, holdout=2))
    assert data.classes == ("cat", "dog", "emu")
    assert (data.train.size, data.holdout.size, data.test.size, data.size) == (10, 2, 12, None)
    for image, label in data.test.open().as_numpy_iterator():
        assert image.shape == (30, 40, 3)
        assert image.mean(axis=(0, 1)).argmax() == label  # the colour of its class
    with (  # an error of the network is not changed
        pytest.raises(tf.errors.InvalidArgumentError, match="not of an image"),
        data.name_broken_images(),
    ):
        tf.debugging.Assert(False, ["not of an image"])


def test_holdout_has_the_same_share_of_every_class(tmp_path):
    """A draw without regard to the class often has no image of a small class. The held-out
    images are always the same, and are not training images.
    """
    for name, count in {"cat": 30, "dog": 10, "emu": 2}.items():
        pictures.write_folder(tmp_path / name, classes=(name,), images=count, size=(2, 2))
        for split in ("train", "test"):
            (tmp_path / split).mkdir(exist_ok=True)
            (tmp_path / name / split / name).rename(tmp_path / split / name)
    data = load(Data("folder", dir=tmp_path, holdout=21))
    np.testing.assert_array_equal(np.bincount(data.holdout.labels), [15, 5, 1])
    assert data.class_weights == pytest.approx({0: 21 / 45, 1: 21 / 15, 2: 21 / 3})
    np.testing.assert_array_equal(np.bincount(data.train.labels), [15, 5, 1])
    train, held = (set(split.paths) for split in (data.train, data.holdout))
    assert train | held == set((tmp_path / "train").glob("*/*"))
    assert not train & held
    assert set(load(Data("folder", dir=tmp_path, holdout=21)).holdout.paths) == held


def test_formats_that_are_read_and_files_that_are_not(tmp_path):
    pictures.write_folder(tmp_path, images=1)
    shown = Image.fromarray(np.full((8, 8, 3), (200, 10, 30), "uint8"))
    cat = tmp_path / "train" / "cat"
    for name in ("a.BMP", "b.webp", "c.tif", "d.tif", "e.gif"):
        shown.save(cat / name)
    (cat / "sub").mkdir()
    shown.save(cat / "sub" / "f.png")
    (cat / ".hidden").write_text("")
    (tmp_path / "train" / "README").write_text("")
    shown.save(tmp_path / "train" / "of_no_class.png")
    data = load(Data("folder", dir=tmp_path))
    names = [path.name for path in data.train.paths]
    assert names == ["0.png", "a.BMP", "b.webp", "f.png", "0.png"]
    for image, _ in list(data.train.open().as_numpy_iterator())[1:4]:
        np.testing.assert_allclose(image, np.broadcast_to((200, 10, 30), (8, 8, 3)), atol=4)
    assert "not read: 2 .tif, 1 without ending, 1 .gif, 1 .png. " in data.notes[0]
    assert data.origins == ("1 image is in a subfolder of its class.",)


@pytest.mark.parametrize(
    "place",
    [
        *("train/.ipynb_checkpoints/0-checkpoint.png", "train/.thumbnails/large/0.png"),
        *("train/.Trash-1000/files/0.png", "train/__MACOSX/cat/._0.png"),
        *("train/__MACOSX/0.png", "train/@eaDir/0.png", "train/cat/@eaDir/0.png"),
        *("train/cat/.ipynb_checkpoints/1.png", "train/cat/._0.png", "train/lost+found/0.png"),
        *("train/$RECYCLE.BIN/0.png", "train/System Volume Information/0.png"),
        *("test/.cache/0.png", "test/#recycle/0.png", "train/.git/objects/00/0.png"),
    ],
)
def test_hidden_folders_are_no_classes(tmp_path, place):
    """The data set itself may be in a hidden folder."""
    folder = tmp_path / ".cache" / "__MACOSX"
    pictures.write_folder(folder, images=1)
    expected = load(Data("folder", dir=folder))
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "train/cat/0.png", folder / place)
    data = load(Data("folder", dir=folder))
    assert (data.classes, data.notes) == (("cat", "dog"), ())
    assert (data.train.paths, data.test.paths) == (expected.train.paths, expected.test.paths)


def test_a_class_may_be_a_link_and_a_hidden_link_is_none(tmp_path):
    pictures.write_folder(tmp_path / "all", classes=("cat", "dog", "emu"), images=1)
    pictures.write_folder(tmp_path / "linked", classes=("cat",), images=1)
    for split in ("train", "test"):
        for name in ("dog", ".emu"):
            target = tmp_path / "all" / split / name.strip(".")
            (tmp_path / "linked" / split / name).symlink_to(target)
        (tmp_path / "linked" / split / "broken").symlink_to(tmp_path / "nothing")
    data = load(Data("folder", dir=tmp_path / "linked"))
    assert data.classes == ("cat", "dog")
    assert data.train.paths[1] == tmp_path / "linked/train/dog/0.png"


@pytest.mark.parametrize("name", [b"caf\xe9.png", b"\xff.png", "猫.png".encode(), b"a b.png"])
def test_image_files_may_have_any_name(tmp_path, name):
    pictures.write_folder(tmp_path / "plain", images=1)
    expected = load(Data("folder", dir=tmp_path / "plain"))
    folder = tmp_path / os.fsdecode(b"d\xe9")
    shutil.copytree(tmp_path / "plain", folder)
    (folder / "train/cat/0.png").rename(folder / "train/cat" / os.fsdecode(name))
    data = load(Data("folder", dir=folder))
    for found, want in zip(arrays(data.train), arrays(expected.train), strict=True):
        np.testing.assert_array_equal(found, want)
    assert data.train.hash != expected.train.hash


def test_classes_are_utf_8(tmp_path):
    pictures.write_folder(tmp_path, classes=("dog", os.fsdecode(b"caf\xe9")), images=1)
    with pytest.raises(UserError, match=r"name of a class in .* be UTF-8.*'caf\\udce9'"):
        load(Data("folder", dir=tmp_path))


class TestShareOfEveryClass:
    """Class folders without folders of splits, and `--data.test`."""

    def test_takes_the_share_of_each_class(self, tmp_path):
        write_classes(tmp_path, PHOTOS)
        data = of(tmp_path, test=0.2)
        assert data.classes == ("Bär", "emu", "sea lion")
        np.testing.assert_array_equal(np.bincount(data.test.labels), [6, 1, 2])
        np.testing.assert_array_equal(np.bincount(data.train.labels), [24, 2, 8])
        train, test = (set(split.paths) for split in (data.train, data.test))
        assert train | test == set(tmp_path.glob("*/*"))
        assert not train & test
        assert data.origins == (
            "Test images: 9 of 43, a share of 0.2 of each class, the same in every run "
            "(--data.test).",
        )
        # at least one to train, also with a large share
        np.testing.assert_array_equal(np.bincount(of(tmp_path, test=0.99).train.labels), [1, 1, 1])

    def test_the_same_everywhere(self, tmp_path):
        """With held-out images, on another machine, inside `train`, without broken images."""
        here = write_classes(tmp_path / "here", PHOTOS)
        test = inside(here, of(here, test=0.2).test)
        data = of(here, test=0.2, holdout=0.25)
        parts = [inside(here, split) for split in (data.train, data.holdout, data.test)]
        assert parts[2] == test
        assert set.union(*parts) == {path.relative_to(here).as_posix() for path in here.glob("*/*")}
        assert sum(map(len, parts)) == sum(PHOTOS.values())
        assert len(parts[1]) == round(0.25 * (43 - 9))
        shutil.copytree(here, tmp_path / "there" / "train")
        (here / "emu" / "broken.png").write_text("text")
        assert inside(here, of(here, test=0.2, skip_broken=True).test) == test
        there = of(tmp_path / "there", test=0.2).test
        assert inside(tmp_path / "there" / "train", there) == test

    @pytest.mark.parametrize("number", range(30, 36))
    def test_an_added_photo_moves_one_at_most(self, tmp_path, number):
        write_classes(tmp_path, PHOTOS)
        before = inside(tmp_path, of(tmp_path, test=0.2).test)
        write(tmp_path, f"Bär/{number}.JPG")
        after = inside(tmp_path, of(tmp_path, test=0.2).test) - {f"Bär/{number}.JPG"}
        assert len(before ^ after) <= 1

    def test_not_the_first_ones_in_the_alphabet(self, tmp_path):
        write_classes(tmp_path, {"a": 100, "b": 100})
        data = of(tmp_path, test=0.5)
        for name in "ab":
            numbers = [int(path.stem) for path in data.test.paths if path.parent.name == name]
            assert 35 < np.mean(numbers) < 64

    def test_what_is_no_class(self, tmp_path):
        """Hidden folders, files beside the classes. A link to a class is one."""
        write_classes(tmp_path / "photos", PHOTOS)
        write(tmp_path / "photos", ".thumbnails/0.png", "@eaDir/0.png")
        (tmp_path / "photos" / "labels.csv").touch()
        write_classes(tmp_path / "other", {"dog": 4})
        (tmp_path / "photos" / "dog").symlink_to(tmp_path / "other" / "dog")
        data = of(tmp_path / "photos", test=0.2)
        assert data.classes == ("Bär", "dog", "emu", "sea lion")
        assert data.test.size == 10
        assert "not read: 1 .csv." in data.notes[0]

    @pytest.mark.parametrize(
        ("places", "options", "words"),
        [
            (
                ("cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png"),
                {},
                r"has no test images.* each class \(cat, dog\), add --data.test 0.2",
            ),
            (
                ("train/cat/0.png", "train/dog/0.png"),
                {},
                r"has no test images.* each class \(cat, dog\), add --data.test 0.2",
            ),
            (
                ("cat/0.png", "cat/1.png", "dog/0.png"),
                {"test": 0.2},
                "every class needs two images or more.* One image has: dog. Add",
            ),
            (("test/cat/0.png", "test/dog/0.png"), {}, "the folder test, but no folder train"),
            (
                ("my archive/train/cat/0.png", "my archive/test/cat/0.png"),
                {},
                "no folder train, but (?P<right>.*/my archive) has: --data.dir '(?P=right)'$",
            ),
            (
                ("a/b/Train/cat/0.png", "a/b/Test/cat/0.png"),
                {"test": 0.2},
                "one class, a; if the classes are in .*/a/b, give --data.dir .*/a/b$",
            ),
            (
                ("photos/cat/0.png", "photos/dog/0.png", "__MACOSX/cat/0.png"),
                {"test": 0.2},
                "one class, photos; if the classes are in .*/photos, give --data.dir .*/photos$",
            ),
            (
                ("train/train/cat/0.png", "train/train/dog/0.png", "test/train/cat/0.png"),
                {},
                r"one class, train; if the folders in it \(cat, dog\) are the classes, move them",
            ),
            (
                ("train/cat/0.png", "Training/cat/0.png", "test/cat/0.png"),
                {},
                "has the folders Training and train, which mean the same",
            ),
            ((), {}, "holds no images: expected .*/CLASS/IMAGE"),
            (("0.png", "1.png"), {"test": 0.2}, "holds no images: expected .*/CLASS/IMAGE"),
        ],
    )
    def test_folders_that_do_not_fit(self, tmp_path, places, options, words):
        with pytest.raises(UserError, match=words):
            of(write(tmp_path, *places), **options)


class TestSplits:
    def test_val_is_the_test_set_without_test(self, tmp_path):
        for name in ("val", "valid", "Validation"):
            folder = tmp_path / name
            write(folder, *(f"{split}/{c}/{split}.png" for split in ("train", name) for c in "ab"))
            data = of(folder, holdout=0.5)
            assert {path.stem for path in data.test.paths} == {name}
            assert (data.train.size, data.holdout.size, data.test.size) == (1, 1, 2)
            assert data.origins == (
                f"Test images: {folder / name}, because there is no folder test.",
            )

    def test_val_is_held_out_beside_test(self, tmp_path):
        write(
            tmp_path,
            *(f"{s}/{c}/{s}{i}.png" for s in ("train", "val", "test") for c in "ab" for i in "01"),
        )
        data = of(tmp_path, holdout=0.1)
        for split, name in ((data.train, "train"), (data.holdout, "val"), (data.test, "test")):
            assert {path.parent.parent.name for path in split.paths} == {name}
            assert split.size == 4
        assert data.origins == (
            f"Held-out images: {tmp_path / 'val'}, in place of --data.holdout.",
        )
        assert of(tmp_path).holdout is None
        write(tmp_path, "val/c/0.png")
        with pytest.raises(UserError, match=r"held-out images of a class without .*: c\."):
            of(tmp_path, holdout=0.1)

    def test_a_class_of_trains(self, tmp_path):
        write_classes(tmp_path, {"bus": 2, "train": 2})
        assert of(tmp_path, test=0.5).classes == ("bus", "train")


class TestSubfolders:
    def test_have_the_class_above_at_any_depth(self, tmp_path):
        write(tmp_path, "train/cat/0.png", "train/cat/2024/1.PNG", "train/dog/a/b c/ü/2.jpeg")
        write(tmp_path, "train/cat/2024/.hidden/3.png", "test/dog/x/4.png", "test/cat/5.png")
        data = of(tmp_path)
        assert data.classes == ("cat", "dog")
        for split, stems in ((data.train, "012"), (data.test, "54")):
            assert [path.stem for path in split.paths] == list(stems)
        np.testing.assert_array_equal(data.train.labels, [0, 0, 1])
        assert data.origins == ("3 images are in subfolders of their classes.",)
        assert not data.notes

    def test_images_with_one_name_are_different_ones(self, tmp_path):
        """The hash of a split, by which a run recognises its images, has the whole path."""
        places = [f"{name}/{year}/0.png" for name in ("cat", "dog") for year in (2023, 2024)]
        one, other = tmp_path / "one", tmp_path / "other"
        write(one, *(f"{split}/{place}" for split in ("train", "test") for place in places))
        shutil.copytree(one, other)
        assert of(one).train.hash == of(other).train.hash
        (other / "train/cat/2024").rename(other / "train/cat/2025")
        assert of(one).train.hash != of(other).train.hash

    def test_links_to_folders_are_followed_but_not_in_circles(self, tmp_path):
        folder = write(
            tmp_path / "data", *(f"{s}/{c}/0.png" for s in ("train", "test") for c in "ab")
        )
        write(tmp_path, "elsewhere/1.png")
        (folder / "train/a/linked").symlink_to(tmp_path / "elsewhere")
        (folder / "train/b/above").symlink_to(folder / "train")
        (folder / "train/b/itself").symlink_to(folder / "train/b/itself")
        assert inside(folder, of(folder).train) == {
            "train/a/0.png",
            "train/a/linked/1.png",
            "train/b/0.png",
        }


@pytest.mark.parametrize(
    ("keep", "options", "message"),
    [
        (("train/cat", "test/cat"), {}, "one class, cat; a classifier needs two or more"),
        (("train/cat", "test"), {}, "test images of a class without training images: dog"),
        (("train", "test"), {"holdout": 12}, "leaves some of the 12 for training"),
    ],
)
def test_data_that_cannot_be_learned(tmp_path, keep, options, message):
    pictures.write_folder(tmp_path / "all")
    for part in keep:
        (tmp_path / "kept" / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "all" / part).rename(tmp_path / "kept" / part)
    with pytest.raises(UserError, match=message):
        of(tmp_path / "kept", **options)


def test_no_folder(tmp_path):
    with pytest.raises(UserError, match=r"or with CLASS/IMAGE. Received: nothing"):
        load(Data("folder"))


def test_classes_are_checked_before_a_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("training.data.broken._fault", lambda path: pytest.fail("read"))
    write_classes(tmp_path, {"cat": 3, "dog": 1})
    with pytest.raises(UserError, match="One image has: dog"):
        of(tmp_path, test=0.2, skip_broken=True)
