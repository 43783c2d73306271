"""The pictures of the documentation: the front picture shows the results files, dark
pages get their own colours.
"""

import ast
import importlib.util
import json
import re
import types
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

import keras_preact as kp
from keras_preact.analysis import figures
from keras_preact.analysis.figures import style
from tests import layout

ROOT = Path(__file__).parents[1]
LIGHT, DARK = ((ROOT / f"docs/pictures/front-{kind}.svg").read_text() for kind in ("light", "dark"))


@pytest.fixture(scope="module")
def hook():
    spec = importlib.util.spec_from_file_location("docs_pictures", ROOT / "docs/hooks/pictures.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs/hooks")
        spec.loader.exec_module(module)
    return module


def test_front_picture(hook):
    """Its curves are the medians of the runs, its units are the rows of the table, and
    the committed files have the same texts.
    """
    figure = hook.front()
    *panels, axes = figure.axes
    for line, name in zip(axes.lines, ("original", "full_preactivation"), strict=True):
        files = (ROOT / f"results/digits/resnet110-{name}").glob("seed-*.json")
        runs = [json.loads(path.read_text()) for path in files]
        errors = np.array([run["curves"]["test_error"] for run in runs])
        np.testing.assert_array_equal(line.get_xdata(), runs[0]["curves"]["iteration"])
        np.testing.assert_allclose(line.get_ydata(), np.median(errors, axis=0))
        final = np.median([run["final"]["test_error"] for run in runs])
        assert [text for text in axes.texts if text.get_text().endswith(f"\n{final:.1f} %")]
    for panel, name in zip(panels, kp.ARRANGEMENTS, strict=True):
        texts = [text.get_text() for text in panel.texts]
        drawn = [text for text in texts if text in ("BN", "ReLU", "3x3 conv")]
        parts = figures.diagram(name)
        assert drawn == [box.text for box in (*parts.branch, *parts.after_addition)]
    layout.check(figure)
    texts = [re.findall("<!-- (.+?) -->", svg) for svg in (LIGHT, style.svg(figure))]
    assert texts[0] == texts[1], "run make pages"
    assert style.darkened(LIGHT) == DARK


def test_figures_of_the_pages(hook):
    """The committed diagrams have the texts of the tables, the curves of broken runs those of
    their file, the gallery shows its figures.
    """
    drawn = dict(hook.diagrams()) | dict(hook.diagnosis.figures())
    for name, figure in drawn.items():
        text = (ROOT / f"docs/figures/{name}.svg").read_text()
        assert style.BACKGROUND in text
        texts = [re.findall("<!-- (.+?) -->", svg) for svg in (text, style.svg(figure))]
        assert texts[0] == texts[1], f"{name}: run make pages"
    page = (ROOT / "docs/gallery.md").read_text()
    blocks = hook.BLOCK.findall(page)
    of_gallery = [name for code in blocks if (name := hook.drawn_by(ast.parse(code)))]
    assert re.findall(r"```\n\n!\[(\w+)\]\(figures/\1\.svg\)", page) == of_gallery
    committed = {path.stem for path in (ROOT / "docs/figures").glob("*")}
    assert committed == {*drawn, *of_gallery}


def test_every_colour_has_a_counterpart_in_the_dark():
    light = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", LIGHT))
    assert light <= {colour.lower() for colour in style.DARK}
    text = '<path d="M 1 2" style="fill: #%s; stroke: #123456"/><use xlink:href="#abcdef0123"/>'
    assert style.darkened(text % "0072b2") == text % "4aa8e8"


def test_ordered_colours_are_seen_on_both_pages():
    """With the contrast of WCAG for graphics; the last of them has the largest."""

    def luminance(colour):
        values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(values > 0.04045, ((values + 0.055) / 1.055) ** 2.4, values / 12.92)
        return linear @ (0.2126, 0.7152, 0.0722)

    for count in (2, 5, 7):
        light = [to_hex(style.ordered(i, count)) for i in range(count)]
        dark = style.darkened(" ".join(light)).split()
        on_white = [1.05 / (luminance(each) + 0.05) for each in light]
        on_dark = [(luminance(each) + 0.05) / (luminance("#1e2129") + 0.05) for each in dark]
        for contrasts in (on_white, on_dark):
            assert contrasts == sorted(contrasts)
        assert min(on_dark) > 2.5
        assert min(on_white) > 1.4


@pytest.mark.parametrize(
    ("page", "markdown", "want"),
    [
        ("idea.md", "![A b](x.svg)", "![A b](x.svg#only-light)![A b](x-dark.svg#only-dark)"),
        (
            "howto/a.md",
            "| ![A](../pictures/f-light.svg) |",
            "| ![A](../pictures/f-light.svg#only-light)![A](../pictures/f-dark.svg#only-dark) |",
        ),
        ("idea.md", "![A](y.svg) ![A](x.png) [A](x.svg)", None),
    ],
)
def test_pages_show_both(hook, page, markdown, want):
    there = {"x.svg", "x-dark.svg", "pictures/f-light.svg", "pictures/f-dark.svg", "y.svg"}
    files = types.SimpleNamespace(get_file_from_path=lambda path: path if path in there else None)
    of = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=page))
    assert hook.on_page_markdown(markdown, of, None, files) == (want or markdown)
