"""The unit explorer, docs/explorer: its numbers are those of the library, its Python runs, and
it works in a browser.
"""

import importlib
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

import keras_preact as kp
from tests import browser

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/explorer/index.html"
PAIRS = list(itertools.product(kp.ARRANGEMENTS, kp.SHORTCUTS))
#: Every arrangement, and every shortcut, at least once.
SOME = [pair for i, pair in enumerate(PAIRS) if i % len(kp.SHORTCUTS) % 6 == i // len(kp.SHORTCUTS)]


@pytest.fixture(scope="module")
def hooks():
    """The modules that write measured.js and choices.js."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs/hooks")
        yield importlib.import_module("explorer"), importlib.import_module("explorer_choices")


@pytest.fixture(scope="module")
def measured(hooks):
    return hooks[0].read()


@pytest.fixture(scope="module")
def content(hooks):
    """What choices.js must hold."""
    return hooks[1].choices()


def test_the_script_of_choices_is_current(hooks, content):
    """Diagrams, errors, sentences and colours, for every choice."""
    explorer, choices = hooks
    found = explorer.read(choices.FILE)
    assert found == json.loads(json.dumps(content)), "run make pages"
    assert set(choices.H) == set(kp.SHORTCUTS) - {"none"}
    assert set(choices.F) == set(kp.ARRANGEMENTS)


def test_every_choice_is_measured_or_says_why_not(hooks, measured, content):
    explorer, _ = hooks
    keys = [explorer.key(*cell) for cell in explorer.cells()]
    assert len(keys) == len(PAIRS) * len(explorer.DEPTHS)
    assert set(measured) <= set(keys)
    # of the deepest networks, some are missing: they take minutes each
    small = {explorer.key(*cell) for cell in explorer.cells() if cell[-1] < 1000}
    assert small <= set(measured)
    for key in keys:
        words = content["sentences"][content["said"][key]]
        is_known = key in measured or "/none/" in key
        assert words.startswith("Not computed") != is_known
    files = PAGE.parent.glob("*")
    assert sum(path.stat().st_size for path in files) < 350_000


def test_lines_are_what_the_theory_says(hooks, measured):
    explorer, _ = hooks
    for depth in explorer.DEPTHS:
        points, starts = explorer.points(depth), explorer.starts(depth)
        ends = [*(start - 1 for start in starts[1:]), explorer.units(depth)]
        left = [next(end for end in ends if end >= unit) - unit for unit in points]
        halved = measured[explorer.key("original", "constant_scaling", depth)]
        expected = [float(f"{0.5**n:.3g}") for n in left]
        np.testing.assert_allclose(halved["forward"], expected, rtol=0.01)
        clean = measured[explorer.key("full_preactivation", "identity", depth)]
        assert clean["path"] == clean["forward"] == 1
        assert "backward" not in clean
        assert len(clean["gradient"]) == len(points)
    assert "forward" not in measured["original/conv1x1/20"]  # it mixes channels


def recompute(explorer, measured, cell):
    found = explorer.measure(*cell)
    stored = measured[explorer.key(*cell)]
    assert found.keys() == stored.keys()
    for name, values in found.items():
        np.testing.assert_allclose(
            np.array(values, "float"), np.array(stored[name], "float"), rtol=0.03, atol=1e-9
        )


def test_a_network_is_measured_again(hooks, measured):
    recompute(hooks[0], measured, ("bn_after_addition", "shortcut_only_gating", 20))


@pytest.mark.soak
@pytest.mark.parametrize("pair", SOME, ids="/".join)
def test_more_networks_are_measured_again(hooks, measured, pair):
    recompute(hooks[0], measured, (*pair, 20))


def test_stages_start_where_the_shape_changes(hooks):
    explorer, _ = hooks
    model = kp.models.resnet_cifar(20, **explorer.NETWORK)
    shapes = [tuple(x.shape) for x in (model.first_input, *model.unit_outputs)]
    changes = [i for i in range(1, len(shapes)) if shapes[i] != shapes[i - 1]]
    assert explorer.starts(20) == [0, *changes]
    assert explorer.units(20) == len(model.units)


def test_refused_choices_have_the_words_of_the_library(hooks):
    assert "6n+2" in hooks[0].measure("original", "identity", 21)["refused"]


def test_the_python_runs(hooks, content):
    """Every unit is built here; bottlenecks and networks are in the soak tests."""
    build_units(hooks[0], content["code"], 110)


@pytest.mark.soak
def test_the_python_of_bottlenecks_runs(hooks, content):
    build_units(hooks[0], content["code"], 1001)


def build_units(explorer, code, depth):
    for arrangement, shortcut in PAIRS:
        lines = code[f"{shortcut}/{depth}"]
        unit = eval(lines["unit"].replace("ARRANGEMENT", arrangement), {"kp": kp})
        channels = unit.channels_out * unit.h.streams
        unit.build((None, 8, 8, channels))
        assert type(unit.h) is kp.SHORTCUTS[shortcut]
        assert unit.arrangement == kp.ARRANGEMENTS[arrangement]
        assert unit.block.name == explorer.DEPTHS[depth]


@pytest.mark.soak
@pytest.mark.parametrize(("arrangement", "shortcut"), SOME)
def test_the_python_of_networks_runs(hooks, content, arrangement, shortcut):
    code = content["code"][f"{shortcut}/20"]["network"]
    model = eval(code.replace("ARRANGEMENT", arrangement), {"kp": kp})
    assert model.output_shape == (None, 10)
    assert len(model.units) == hooks[0].units(20)


@pytest.fixture
def tab():
    """A tab with the page. At the end, there was no error in its console."""
    with browser.opened_tab() as (tab, complaints):
        tab.on("console", lambda said: said.type == "error" and complaints.append(said.text))
        tab.set_viewport_size({"width": 1280, "height": 800})
        tab.goto(PAGE.as_uri())
        yield tab
        assert complaints == []


def fragment(tab) -> str:
    return tab.evaluate("location.hash.slice(1)")


@pytest.mark.soak
@browser.needed
def test_the_keyboard_reaches_every_choice(tab, content):
    names = {name: list(content[f"{name}s"]) for name in ("arrangement", "shortcut", "depth")}
    for i, (name, values) in enumerate(names.items()):
        for _ in range(10):
            if tab.evaluate("document.activeElement.name") == name:
                break
            tab.keyboard.press("Tab")
        reached = set()
        for _ in values:
            tab.keyboard.press("ArrowDown")
            reached.add(fragment(tab).split("/")[i])
        assert reached == set(map(str, values))
    for _ in range(20):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.id") == "copy":
            break
    tab.keyboard.press("Enter")
    assert re.match("Copied|Selected", tab.locator("#copied").text_content())


@pytest.mark.soak
@browser.needed
def test_the_page_shows_every_choice(tab, hooks, content):
    explorer, _ = hooks
    shown = tab.evaluate(
        """keys => keys.map(key => {
            history.replaceState(null, "", "#" + key);
            show();
            const text = id => document.getElementById(id).textContent;
            const boxes = document.querySelectorAll("#diagram svg rect").length;
            return [text("sentence"), text("python"), boxes];
        })""",
        list(content["said"]),
    )
    for (key, number), (words, code, boxes) in zip(content["said"].items(), shown, strict=True):
        arrangement, shortcut, depth = key.split("/")
        assert words == content["sentences"][number]
        for line in content["code"][f"{shortcut}/{depth}"].values():
            assert line.replace("ARRANGEMENT", arrangement) in code
        unit = content["diagrams"][f"{arrangement}/{shortcut}/{explorer.DEPTHS[int(depth)]}"]
        assert boxes == sum(len(path) for path in unit.values() if isinstance(path, list))


@pytest.mark.soak
@browser.needed
@pytest.mark.parametrize(
    "cell",
    [
        ("original", "constant_scaling", 164),
        ("bn_after_addition", "hyper_connections", 20),
        ("full_preactivation", "conv1x1", 110),
    ],
)
def test_the_table_has_the_measured_numbers(tab, hooks, measured, cell):
    explorer, _ = hooks
    key = explorer.key(*cell)
    tab.goto(f"{PAGE.as_uri()}#{key}")
    heads = tab.locator("#numbers th").all_text_contents()
    rows = tab.locator("#numbers tbody tr").all_text_contents()
    assert len(rows) == len(explorer.points(cell[-1]))
    lines = {"h and f, gradient": "path", "this network": "gradient", "h alone": "forward"}
    for name, line in lines.items():
        if name not in heads:
            continue
        cells = f"#numbers tbody td:nth-child({heads.index(name) + 1})"
        values = measured[key][line]
        values = values if isinstance(values, list) else [values] * len(rows)
        shown = [float(text) for text in tab.locator(cells).all_text_contents() if text != "-"]
        assert shown == [value for value in values if value is not None]
    assert "this network" in heads


@pytest.mark.soak
@browser.needed
def test_the_fragment_is_the_choice(tab):
    first = fragment(tab)
    tab.get_by_label("dropout", exact=True).check()
    tab.get_by_label("1,001", exact=True).check()
    assert fragment(tab).endswith("dropout/1001")
    tab.go_back()
    assert fragment(tab).endswith("dropout/110")
    assert tab.get_by_label("110", exact=True).is_checked()
    tab.go_forward()
    assert tab.get_by_label("1,001", exact=True).is_checked()
    tab.goto(f"{PAGE.as_uri()}#full_preactivation/nonsense/56")
    assert tab.get_by_label("full pre-activation", exact=True).is_checked()
    assert tab.get_by_label("identity", exact=True).is_checked()
    assert first == ""


@pytest.mark.soak
@browser.needed
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_nothing_is_wider_than_the_window(tab, content, width, scheme):
    tab.set_viewport_size({"width": width, "height": 844})
    tab.emulate_media(color_scheme=scheme)
    tab.reload()
    ink = tab.evaluate("getComputedStyle(document.body).getPropertyValue('--ink').trim()")
    assert ink == content["colours"]["ink"][scheme == "dark"]
    for key in list(content["said"])[::17]:
        tab.goto(f"{PAGE.as_uri()}#{key}")
        tab.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, key
    tab.get_by_role("button", name={"light": "Dark", "dark": "Light"}[scheme]).click()
    assert tab.evaluate("document.documentElement.dataset.scheme") != scheme
