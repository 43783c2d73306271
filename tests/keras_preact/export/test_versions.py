"""The layout of exported models, and the numbers of their versions."""

import re

import pytest

from keras_preact.export import versions
from tests.keras_preact.export import layouts


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_the_versions_in_a_folder_or_what_is_wrong_with_it(tmp_path, name):
    files, expected, words = layouts.LAYOUTS[name]
    folder = tmp_path / "m"
    layouts.build(folder, files)
    found = versions.layout(folder)
    assert found.versions == {number: folder / entry for number, entry in expected.items()}
    assert list(found.versions) == sorted(expected)
    assert re.search(words, found.problem)
    assert bool(words) == bool(found.problem)
    assert str(tmp_path) not in found.problem
    assert [path.name for path in found.models] == (["a", "b"] if name == "models" else [])


def test_a_version_is_no_model(tmp_path):
    layouts.build(tmp_path / "m", {"01": ""})
    assert "It is itself a version, 01. Use" in versions.layout(tmp_path / "m" / "01").problem


def test_a_folder_of_many_others_is_not_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "MOST", 2)
    layouts.build(tmp_path / "m", {"a": None, "b": None, "v1": ""})
    assert "Found: 'a', 'b', 'v1'. Export" in versions.layout(tmp_path / "m").problem


@pytest.mark.parametrize(
    ("name", "number"),
    [("0", 0), ("007", 7), ("0" * 300 + "7", 7), ("1" * 300, None), ("", None), (" 1", None)],
)
def test_the_number_of_a_name(name, number):
    assert versions.number_of(name) == number
