"""Broken image files: where they are found, and how they are named."""

import os
import re
import tempfile
import zlib
from pathlib import Path

import pytest

from tests.keras_preact.export.image_files import encode, noise, png
from tests.training import images as pictures
from tests.training.images import arrays
from training import image_paths
from training.config import Data
from training.data import broken, load
from training.errors import UserError

#: A JPEG of more than 2,000 bytes.
JPEG = encode(noise(64, 64), "JPEG")
#: A PNG without pixels, whose header and checksums are right: only decoding shows it.
HOLLOW = png(64, 64, 8, 2, b"")


@pytest.mark.parametrize(
    "use",
    [
        lambda data: data.check(),
        lambda data: data.train.open(),
        lambda data: data.train.shuffled(1, 0),
        lambda data: data.train.hash,
        lambda data: data.preprocessing,
    ],
    ids=["check", "open", "shuffled", "hash", "preprocessing"],
)
def test_broken_headers_are_named_before_anything_is_decoded(tmp_path, use):
    pictures.write_folder(tmp_path)
    bad = tmp_path / "train" / "dog" / "broken.jpg"
    whole = (tmp_path / "train" / "dog" / "0.png").read_bytes()
    huge = whole[:16] + (60_000).to_bytes(4, "big") * 2 + whole[24:29]
    huge += zlib.crc32(huge[12:29]).to_bytes(4, "big") + whole[33:]
    for content, fault in (
        (b"no image at all", "it is not an image"),
        (huge, "it has more than 89,478,485 pixels"),
        (whole[: len(whole) // 2], "Truncated File Read"),
        (JPEG[:2000], "it cannot be decoded"),
    ):
        bad.write_bytes(content)
        with pytest.raises(UserError, match=re.escape(f"1 broken image: {bad}: {fault}")):
            use(load(Data("folder", dir=tmp_path)))
    bad.unlink()
    os.mkfifo(tmp_path / "train" / "dog" / "pipe.png")  # opening it would wait
    with pytest.raises(UserError, match=r"pipe\.png: it is not a file"):
        use(load(Data("folder", dir=tmp_path)))


def test_each_of_many_files_keeps_its_own_fault(tmp_path):
    paths = [tmp_path / f"{number:02d}.jpg" for number in range(40)]
    for number, path in enumerate(paths):
        path.write_bytes((b"none", JPEG[:2000], JPEG)[number % 3])
    expected = {
        path: ("it is not an image", "it cannot be decoded")[number % 3]
        for number, path in enumerate(paths)
        if number % 3 < 2
    }
    assert list(broken.faults(paths[::-1]).items()) == list(expected.items())


def test_a_header_that_is_longer_than_what_is_read_at_first(tmp_path):
    """An application's part of 60,000 bytes, as a colour profile, before the size."""
    long = JPEG[:2] + b"\xff\xe2" + (60_002).to_bytes(2, "big") + bytes(60_000) + JPEG[2:]
    paths = [tmp_path / f"{number}.jpg" for number in range(3)]
    for path, content in zip(paths, (long, long[:30_000], long[:-2]), strict=True):
        path.write_bytes(content)
    assert list(broken.faults(paths, decode=False)) == paths[1:]


def test_paths_come_in_the_order_of_their_parts(tmp_path):
    names = ("b/z.png", "b/a/c.png", "b-a/c.png", "b.a", "a/2", "a/10/x", "a/10.x", "é/y", "B/y")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert image_paths.files(tmp_path, pytest.fail) == sorted(tmp_path / name for name in names)


def test_only_headers_that_are_needed_are_read_and_once(tmp_path, monkeypatch):
    pictures.write_folder(tmp_path)
    read, fault = [], broken._fault
    monkeypatch.setattr(broken, "_fault", lambda path: read.append(path) or fault(path))
    monkeypatch.setattr(
        broken, "_undecodable", lambda paths: pytest.fail("decoded") if paths else []
    )
    data = load(Data("folder", dir=tmp_path, holdout=2))
    assert data.class_weights
    assert read == []
    for _ in range(2):
        arrays(data.test)
        assert read == data.test.paths
    data.check()
    assert sorted(read) == sorted(tmp_path.glob("*/*/*"))


def test_images_that_the_header_does_not_show(tmp_path):
    """The statistics find a broken image in the training split, the evaluation finds one
    in the test split. `skip_broken` leaves out both.
    """
    pictures.write_folder(tmp_path)
    bad = [tmp_path / split / "dog" / "hollow.jpg" for split in ("train", "test")]
    for path in bad:
        path.write_bytes(HOLLOW)
    data = load(Data("folder", dir=tmp_path))
    data.check()
    with pytest.raises(UserError, match=re.escape(f"2 broken images: {bad[1]}: it cannot")):
        _ = data.preprocessing
    bad[0].unlink()
    data = load(Data("folder", dir=tmp_path))
    assert data.preprocessing.size == 224
    with (
        pytest.raises(UserError, match=re.escape(f"1 broken image: {bad[1]}: it cannot")),
        data.name_broken_images(),
    ):
        arrays(data.test)
    text = tmp_path / "train" / "cat" / "text.png"
    text.write_text("no image")
    data = load(Data("folder", dir=tmp_path, skip_broken=True))
    assert arrays(data.test)[0].shape == (12, 30, 40, 3)
    assert data.train.size == 12
    assert data.notes == (f"Left out {broken.named(data.broken)}",)
    assert data.broken == {bad[1]: "it cannot be decoded", text: "it is not an image"}


@pytest.mark.parametrize("use", [lambda data: data.check(), lambda data: data.preprocessing])
def test_one_error_names_all(tmp_path, monkeypatch, use):
    """Those of all splits, whether headers show them or only decoding. A list has all of them
    if there are too many for the message.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pictures.write_folder(tmp_path, images=2)
    expected = {}
    for split in ("train", "test"):
        for name, content in (
            ("text.png", b"text"),
            ("cut.jpg", JPEG[:2000]),
            ("hollow.jpg", HOLLOW),
        ):
            path = tmp_path / split / "dog" / name
            path.write_bytes(content)
            expected[path] = "it is not an image" if name == "text.png" else "it cannot be decoded"
    with pytest.raises(UserError) as caught:
        use(load(Data("folder", dir=tmp_path)))
    message, (first, *_) = str(caught.value), sorted(expected)
    assert f"Found 6 broken images: {first}: it cannot be decoded; " in message
    assert "; and 3 more. All of them are listed in " in message
    assert message.endswith("or leave them out with --data.skip-broken.")
    [listed] = re.findall(r"listed in (\S+/broken\.txt)\. ", message)
    with open(listed, encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    assert rows == [[str(path), fault] for path, fault in sorted(expected.items())]


def test_a_name_that_is_not_utf_8_has_its_bytes_in_the_list():
    path = Path(os.fsdecode(b"caf\xe9.jpg"))
    assert broken.lines({path: "two\nlines"}) == b"caf\xe9.jpg\ttwo lines\n"


@pytest.mark.parametrize(
    ("kind", "is_broken"),
    [
        ("JPEG", True),
        ("PNG", True),
        ("WEBP", True),
        ("BMP", True),
        ("longer", False),  # as some cameras and programs write it
    ],
)
def test_files_that_are_cut_off_are_found_without_decoding_all(
    tmp_path, monkeypatch, kind, is_broken
):
    content = JPEG if kind == "longer" else encode(noise(64, 64), kind)
    path = tmp_path / "image.png"
    path.write_bytes(content[:-200] if is_broken else content + bytes(200))
    sound = tmp_path / "sound.png"
    sound.write_bytes(encode(noise()))
    decoded, undecodable = [], broken._undecodable
    monkeypatch.setattr(
        broken, "_undecodable", lambda paths: decoded.extend(paths) or undecodable(paths)
    )
    assert list(broken.faults([path, sound], decode=False)) == [path] * is_broken
    assert sound not in decoded


def test_every_image_is_broken(tmp_path):
    pictures.write_folder(tmp_path, images=1)
    for path in (tmp_path / "test").glob("*/*"):
        path.write_text("text")
    with pytest.raises(UserError, match=r"Every image of .*test is broken: 2 broken images: "):
        load(Data("folder", dir=tmp_path, skip_broken=True))
