"""An exported version: where it is found, its card, its files, its frozen network; and
everything that takes the path of one says the same about a wrong path.
"""

import asyncio
import gc
import json
import re
import sys
import types
import weakref
from pathlib import Path

import numpy as np
import pytest

import keras_preact as kp
from keras_preact.export import version
from keras_preact.export.version import GRAPH, Version, VersionError
from tests.keras_preact.export import layouts
from tests.rights import of_a_user

tf = pytest.importorskip("tensorflow")


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_the_versions_in_a_folder_or_what_is_wrong_with_it(tmp_path, name):
    files, expected, words = layouts.LAYOUTS[name]
    folder = tmp_path / "m"
    layouts.build(folder, files)
    found = version.layout(folder)
    assert found.versions == {number: folder / entry for number, entry in expected.items()}
    assert list(found.versions) == sorted(expected)
    assert re.search(words, found.problem)
    assert bool(words) == bool(found.problem)
    assert str(tmp_path) not in found.problem
    assert [path.name for path in found.models] == (["a", "b"] if name == "models" else [])


def test_a_version_is_no_model(tmp_path):
    layouts.build(tmp_path / "m", {"01": ""})
    assert "It is itself a version, 01. Use" in version.layout(tmp_path / "m" / "01").problem


def test_a_folder_of_many_others_is_not_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(version, "MOST", 2)
    layouts.build(tmp_path / "m", {"a": None, "b": None, "v1": ""})
    assert "Found: 'a', 'b', 'v1'. Export" in version.layout(tmp_path / "m").problem


@pytest.mark.parametrize(
    ("name", "number"),
    [("0", 0), ("007", 7), ("0" * 300 + "7", 7), ("1" * 300, None), ("", None), (" 1", None)],
)
def test_the_number_of_a_name(name, number):
    assert version.number_of(name) == number


@pytest.fixture
def placed(tmp_path):
    layouts.build_places(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "number", "found"),
    [
        *[("m", 0, "m/0"), ("m", 1, "m/0001"), ("m", None, "m/0001")],
        *[("m/0", 0, "m/0"), ("m/0001", 1, "m/0001"), ("m/latest", None, "m/latest")],
        *[("flat", None, "flat"), ("v/v1", None, "v/v1"), ("m/latest", 1, "m/latest")],
    ],
)
def test_a_version_is_found_in_every_place(placed, monkeypatch, folder, number, found):
    one = version.find(placed / folder, number)
    assert one.path == placed / found
    assert one.number == {"m/0": 0, "flat": None, "v/v1": None}.get(found, 1)
    monkeypatch.chdir(placed / folder)
    here = version.find(Path(), number)
    assert (here.path.resolve(), here.number) == (one.path.resolve(), one.number)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("place", layouts.PLACES)
def test_everyone_says_the_same_about_a_path(placed, small, place):
    """`find`, which `predict` and `evaluate` use, the exporter and the server."""
    path, (words, taken_by) = placed / place, layouts.PLACES[place]
    readers = {
        "find": lambda: version.find(path),
        "export": lambda: kp.export.save(small, path, classes=["a", "b"]),
    }
    before = sorted(placed.rglob("*"))
    if path.is_dir():
        said = served(path) or version.models(path)[1]  # as one of its models, or as the folder
        assert bool(said) == ("serve" not in taken_by)
        assert re.match(words, said)
    for name, read in readers.items():
        if name in taken_by:
            read()
            continue
        sentence = f"^{re.escape(str(path))} cannot be used as an exported model. {words}"
        with pytest.raises(VersionError, match=sentence):
            read()
        assert sorted(placed.rglob("*")) == before


def served(model) -> str:
    """Return what a server of models, this one among them, says instead of serving it."""
    pytest.importorskip("granian")
    from keras_preact.serving.errors import NotFound
    from keras_preact.serving.repository import Repository
    from keras_preact.serving.settings import Settings

    async def answer():
        async def close():
            pass

        loaded = types.SimpleNamespace(close=close)
        repository = Repository(Settings(model.parent), lambda path, settings: loaded)
        await repository.start()
        try:
            with repository.lease(model.name):
                return ""
        except NotFound as error:
            return error.message.partition("is not served. ")[2]
        finally:
            await repository.stop()

    return asyncio.run(answer())


def test_the_versions_and_models_that_exist_are_named(placed):
    for path, number, words in [
        (placed / "m", 7, "It has no version 7. It has: 0, 1."),
        (placed / "m/0", 1, "It is itself a version, but not version 1. Use the folder above it."),
        (placed / "models" / "o", None, "no such folder. Models beside it: 'm', 'n'."),
    ]:
        with pytest.raises(VersionError, match=words):
            version.find(path, number)
    layouts.build(placed / "new", {".export-x/version": ""})
    with pytest.raises(VersionError, match="Its first version is being written"):
        version.find(placed / "new")


# --- the card and the files


@pytest.fixture
def one(tmp_path):
    """A version whose files are in its card."""
    path = tmp_path / "m" / "7"
    (path / "variables").mkdir(parents=True)
    (path / version.OWN_CARD).parent.mkdir()
    for name in ("saved_model.pb", "variables/data"):
        (path / name).write_text(name)
    hashes = {name: version.sha256(path / name) for name in ("saved_model.pb", "variables/data")}
    (path / version.OWN_CARD).write_text(json.dumps({"files": hashes, "classes": ["a"]}))
    return Version(path)


CARD = version.OWN_CARD.as_posix()


def endless(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def listed(path):
    """Add a file outside the version to its card."""
    card = json.loads((path / CARD).read_text())
    (path / CARD).write_text(json.dumps(card | {"files": card["files"] | {"../x": "0"}}))


DAMAGE = [
    (lambda path: (path / "saved_model.pb").write_text("x"), "Its saved_model.pb is damaged: the"),
    (
        lambda path: (path / "variables/data").unlink(),
        "Its variables/data is missing, or not a regular file. Copy it again.",
    ),
    (
        lambda path: (path / "more.txt").touch(),
        "It holds more.txt, which its model card does not list. Remove this file",
    ),
    (lambda path: (path / "caf\udce9").touch(), r"It holds caf\udce9, which its model card"),
    (listed, "Its ../x is missing"),
    (lambda path: endless(path / "saved_model.pb"), "Its saved_model.pb is missing, or not a reg"),
    (lambda path: endless(path / CARD), f"It has no {CARD}: only exports"),
    (lambda path: (path / CARD).unlink(), f"It has no {CARD}: only exports"),
    (lambda path: (path / CARD).write_text("{"), "cannot be read: JSONDecodeError"),
    (lambda path: (path / CARD).write_text("[]"), "cannot be read: KeyError('files')"),
    (lambda path: (path / CARD).write_text("3"), "cannot be read: TypeError"),
    (lambda path: (path / CARD).write_text('{"files": 3}'), "cannot be read: TypeError"),
]


@pytest.mark.parametrize(("damage", "problem"), DAMAGE)
def test_damaged_files_are_named(one, damage, problem):
    one.check_files()
    damage(one.path)
    with pytest.raises(VersionError) as caught:
        one.check_files()
    assert problem in caught.value.problem
    assert caught.value.problem.isprintable()
    assert str(one.path) not in caught.value.problem
    assert str(caught.value).startswith(f"{one.path} cannot be used as an exported model. It")


@pytest.mark.skipif(sys.platform != "linux", reason="the rights of Linux")
def test_a_file_that_a_user_may_not_read(one):
    (one.path / GRAPH).chmod(0)
    with of_a_user(), pytest.raises(VersionError, match=f"{GRAPH} cannot be read: Permission den"):
        one.check_files()


def test_what_a_reader_misses_in_the_card_is_named(one):
    with one.reading_card() as card:
        assert card["classes"] == ["a"]
    with pytest.raises(VersionError, match=r"KeyError\('top_k'\)"), one.reading_card() as card:
        card["top_k"]


def linked(disk, place):
    """Link each entry of a version, as KServe does."""
    place.mkdir()
    for entry in disk.iterdir():
        (place / entry.name).symlink_to(entry)


def in_a_volume(disk, place):
    """Link each entry through a hidden folder, as Kubernetes does in a volume."""
    disk.rename(place.with_name("moved"))
    place.mkdir()
    place.with_name("moved").rename(place / "..2026_11_27")
    (place / "..data").symlink_to("..2026_11_27")
    for entry in (place / "..data").iterdir():
        (place / entry.name).symlink_to(f"..data/{entry.name}")


def with_a_loop(disk, place):
    linked(disk, place)
    (place / "again").symlink_to(place)
    (place / "above").symlink_to("..")


@pytest.mark.parametrize("link", [linked, in_a_volume, with_a_loop])
def test_a_version_of_links(one, tmp_path, link):
    place = tmp_path / "other" / "07"
    place.parent.mkdir()
    link(one.path, place)
    Version(place).check_files()
    (place / "variables" / "more").touch()
    with pytest.raises(VersionError, match="It holds variables/more"):
        Version(place).check_files()


def test_warm_up_requests_that_cannot_be_read(one):
    assert one.warm_up_requests() == []
    (one.path / "assets.extra/tf_serving_warmup_requests").write_bytes(b"junk" * 10)
    with pytest.raises(VersionError, match=r"The warm-up requests cannot be read.*\. Copy or"):
        one.warm_up_requests()


# --- the network


def test_a_frozen_network_holds_no_variable(tmp_path):
    module = tf.Module()
    module.scale = tf.Variable(3.0)

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def core(images):
        return {"logits": images * module.scale, "features": images}

    module.core = core
    tf.saved_model.save(module, str(tmp_path / "1"))
    loaded = tf.saved_model.load(str(tmp_path / "1"))
    variables = [weakref.ref(variable) for variable in loaded.core.concrete_functions[0].variables]
    network = version.freeze(*loaded.core.concrete_functions)
    del loaded
    gc.collect()
    assert [variable() for variable in variables] == [None]
    assert network.outputs == ("features", "logits")
    features, logits = network.function(tf.ones([1, 2]))
    np.testing.assert_array_equal(logits, 3 * features)
    again, decode = Version(tmp_path / "1").functions()
    assert (again.outputs, again.int8, decode) == (network.outputs, None, None)
    (tmp_path / "1" / version.INT8).parent.mkdir()
    (tmp_path / "1" / version.INT8).touch()
    assert Version(tmp_path / "1").functions()[0].int8 == tmp_path / "1" / version.INT8


def valid(size, stride=1):
    """A convolution without padding: as in PyTorch, `(length - size) // stride + 1` remain."""
    weights = tf.ones([size, size, 3, 3])
    return lambda x: tf.nn.conv2d(x, weights, stride, "VALID")


def pooled(size, stride):
    return lambda x: tf.nn.max_pool2d(x, size, stride, "VALID")


#: Layers, the free shape of their images, and the smallest one: by hand.
SMALLEST = {
    "padding": (
        [lambda x: tf.nn.conv2d(x, tf.ones([7, 7, 3, 3]), 2, "SAME")],
        (None, None),
        (1, 1),
    ),
    "a window": ([valid(5)], (None, None), (5, 5)),
    # 1 is left after the last layer, 5 before it, 11 before the pooling
    "windows": ([valid(7, 2), pooled(3, 2), valid(5)], (None, None), (27, 27)),
    "a pooling at the end": ([valid(3), pooled(2, 2)], (None, None), (4, 4)),
    "one free axis": ([valid(5)], (9, None), (9, 5)),
    "a long one": (
        [lambda x: tf.nn.conv2d(x, tf.ones([1, 70, 3, 3]), 1, "VALID")],
        (None, None),
        (1, 70),
    ),
    "a crop": ([lambda x: x[:, 3:, :-2]], (None, None), (4, 3)),
}


@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_images(name, tmp_path):
    layers, sides, smallest = SMALLEST[name]
    shape = [None, *sides, 3]

    @tf.function(input_signature=[tf.TensorSpec(shape)])
    def core(images):
        for layer in layers:
            images = layer(images)
        return {"logits": tf.reduce_mean(images, [1, 2])}

    module = tf.Module()
    module.core = core
    tf.saved_model.save(module, str(tmp_path / "1"))
    frozen, _ = Version(tmp_path / "1").functions()
    assert frozen.smallest(shape) == (1, *smallest, 3)
    assert np.isfinite(frozen.function(tf.ones([1, *smallest, 3]))[0]).all()
