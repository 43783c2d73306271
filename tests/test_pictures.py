"""The pictures of the documentation: the front picture shows the results files, dark
pages get their own colours.
"""

import importlib.util
import json
import re
import types
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

import keras_preact as kp
from keras_preact.analysis import figures
from keras_preact.analysis.figures import style
from tests import layout

ROOT = Path(__file__).parents[1]
LIGHT, DARK = (ROOT / f"docs/pictures/front-{kind}.svg" for kind in ("light", "dark"))


@pytest.fixture(scope="module")
def hook():
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("docs_pictures", ROOT / "docs/hooks/pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def front(hook):
    figure = hook.front()
    return figure, style.svg(figure)


class TestFront:
    def test_committed_files_are_what_the_command_draws(self, front):
        import matplotlib

        pinned = re.search(
            r"^matplotlib==(\S+)$", (ROOT / "constraints/tested.txt").read_text(), re.M
        )[1]
        if matplotlib.__version__ != pinned:
            pytest.skip(
                f"another matplotlib draws another file: this is {matplotlib.__version__}, the "
                f"files are of {pinned}"
            )
        _, svg = front
        assert LIGHT.read_text() == svg, "run python docs/hooks/pictures.py"
        assert DARK.read_text() == style.darkened(svg)

    @pytest.mark.parametrize("path", [LIGHT, DARK], ids=["light", "dark"])
    def test_files_are_small_and_dated_by_nothing(self, path):
        assert path.stat().st_size < 200_000
        assert ET.fromstring(path.read_text()).tag == "{http://www.w3.org/2000/svg}svg"
        assert "dc:date" not in path.read_text()

    def test_curves_are_medians_of_the_runs(self, front):
        figure, _ = front
        *_, axes = figure.axes
        assert len(axes.lines) == 2
        for line, name in zip(axes.lines, ("original", "full_preactivation"), strict=True):
            files = sorted((ROOT / f"results/digits/resnet110-{name}").glob("seed-*.json"))
            runs = [json.loads(path.read_text()) for path in files]
            errors = np.array([run["curves"]["test_error"] for run in runs])
            assert len(errors) >= 5
            np.testing.assert_array_equal(line.get_xdata(), runs[0]["curves"]["iteration"])
            np.testing.assert_allclose(line.get_ydata(), np.median(errors, axis=0))
            final = np.median([run["final"]["test_error"] for run in runs])
            [label] = [text for text in axes.texts if text.get_text().endswith(f"\n{final:.1f} %")]
            assert label.get_color() == style.text_colour(line.get_color())
            band = axes.collections[axes.lines.index(line)].get_paths()[0].vertices
            assert {round(y, 6) for y in band[:, 1]} == {
                round(y, 6) for y in [*errors.min(0), *errors.max(0)]
            }
        assert f"median and range of {len(runs)} seeds" in axes.get_title(loc="left")

    def test_units_are_the_rows_of_the_table(self, front):
        figure, _ = front
        panels = figure.axes[:-1]
        assert len(panels) == len(kp.ARRANGEMENTS)
        for axes, name in zip(panels, kp.ARRANGEMENTS, strict=True):
            boxes = figures.diagram(name).boxes
            drawn = [
                text.get_text()
                for text in axes.texts
                if re.fullmatch(r"BN|ReLU|3x3 conv", text.get_text())
            ]
            assert drawn == [box.text for box in boxes]

    def test_nothing_is_cut_and_no_text_overlaps(self, front):
        figure, _ = front
        assert len(layout.shown_texts(figure)) > 50
        layout.check(figure)


class TestDark:
    def luminance(self, colour: str) -> float:
        """WCAG 2.2: relative luminance."""
        channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(
            channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4
        )
        return float(linear @ [0.2126, 0.7152, 0.0722])

    def contrast(self, one: str, other: str) -> float:
        low, high = sorted(map(self.luminance, (one, other)))
        return (high + 0.05) / (low + 0.05)

    @pytest.mark.parametrize(
        "page", ["#1E2129", "#0D1117", "#17191B"], ids=["material", "GitHub", "analysis"]
    )
    def test_colours_are_legible(self, page):
        for hue in style.HUES:
            assert self.contrast(hue.text, "#FFFFFF") >= 4.5, hue
            assert self.contrast(hue.dark, page) >= 4.5, hue
        assert self.contrast(style.GREY, "#FFFFFF") >= 4.5
        assert self.contrast(style.DARK[style.GREY], page) >= 4.5
        for inside in (style.BLUE, style.ORANGE, style.GREEN, style.PINK, style.PALE):
            assert self.contrast(style.INK, inside) >= 7
            assert self.contrast(style.DARK[style.INK], style.DARK[inside]) >= 7

    def test_every_colour_of_a_figure_has_a_counterpart(self, front):
        """No black is left to be drawn by default, which no table could turn: text and
        lines name their colours.
        """
        _, svg = front
        light = {colour.upper() for colour in re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svg)}
        assert light <= {colour.upper() for colour in style.DARK}
        dark = {
            colour.upper()
            for colour in re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", style.darkened(svg))
        }
        assert dark == {style.DARK[colour].upper() for colour in light}
        styles = {
            element.get("id"): element
            for element in ET.fromstring(svg).iter()
            if element.get("id", "").startswith("text_")
        }
        assert len(styles) > 50
        for element in styles.values():
            assert any("fill: #" in child.get("style", "") for child in element.iter())

    def test_colours_alone_change(self):
        text = '<path d="M 1 2" style="fill: #%s; stroke: #123456"/><use xlink:href="#abcdef0123"/>'
        assert style.darkened(text % "0072b2") == text % "4aa8e8"


@pytest.mark.parametrize(
    ("page", "markdown", "want"),
    [
        (
            "idea.md",
            "![A b](figures/x.svg)",
            "![A b](figures/x.svg#only-light)![A b](figures/x-dark.svg#only-dark)",
        ),
        (
            "howto/a.md",
            "| ![A](../pictures/f-light.svg) |",
            "| ![A](../pictures/f-light.svg#only-light)![A](../pictures/f-dark.svg#only-dark) |",
        ),
        ("idea.md", "![A](figures/y.svg)", "![A](figures/y.svg)"),
        (
            "idea.md",
            "![A](figures/x.png) [A](figures/x.svg)",
            "![A](figures/x.png) [A](figures/x.svg)",
        ),
    ],
    ids=["drawn", "front", "no counterpart", "no picture"],
)
def test_pages_show_both(hook, page, markdown, want):
    there = {
        "figures/x.svg",
        "figures/x-dark.svg",
        "pictures/f-light.svg",
        "pictures/f-dark.svg",
        "figures/y.svg",
    }
    files = types.SimpleNamespace(get_file_from_path=lambda path: path if path in there else None)
    of = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=page))
    assert hook.on_page_markdown(markdown, of, None, files) == want
