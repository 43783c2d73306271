"""Draws the pictures of the documentation: `python docs/hooks/pictures.py`.

It writes the front picture, docs/pictures/front-light.svg and front-dark.svg, from
`kp.ARRANGEMENTS` and the measured runs in results/, and docs/figures: unit diagrams from
the tables, the curves of docs/diagnosis.md from diagnosis.json, the rest by the code of
the gallery. The site shows them in other colours on dark pages. It also writes
docs/explorer/choices.js, the content of the unit explorer.
"""

import ast
import fractions
import os
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[2]))  # so that the command finds training/

import diagnosis
import explorer_choices

import keras_preact as kp
from keras_preact.analysis import figures
from keras_preact.analysis.figures import style
from keras_preact.analysis.figures.diagrams import draw_diagram, in_words
from training import ranks
from training.reproduce import pictures, results

ROOT = Path(__file__).parents[2]
#: Blocks to draw, each with an arrangement.
BLOCKS = dict.fromkeys(("basic", "bottleneck", "dense", "single"), "full_preactivation")
BLOCKS |= dict.fromkeys(("attention", "mlp", "swiglu"), "pre_norm")
#: The page of figures, and its code.
GALLERY = "gallery.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
#: The arrangements in the front picture's plot of errors.
COMPARED = ("original", "full_preactivation")
FRONT = ROOT / "docs/pictures"
FIGURES = ROOT / "docs/figures"
RESULTS = ROOT / "results"


def front():
    """Draw the front picture: the units of `kp.ARRANGEMENTS`, and the test errors of
    ResNet-110 with two of them in training, on the digits.

    Returns:
        A `matplotlib.figure.Figure`, 8 x 5.2 inches.
    """
    trials = results.groups(results.read(RESULTS))
    figure = style.new_figure(8.0, 5.2)
    left, right = figure.subfigures(1, 2, width_ratios=[1.15, 1])
    titles = (
        f"{len(kp.ARRANGEMENTS)} arrangements of the residual unit",
        _verdict({name: trials[_trial(name)] for name in COMPARED}),
    )
    for half, title in zip((left, right), titles, strict=True):
        half.suptitle(title, x=0.03, ha="left", fontsize=style.TITLE, color=style.INK)
    panels = left.subplots(2, 3).flat
    for axes, name in zip(panels, kp.ARRANGEMENTS, strict=True):
        draw_diagram(axes, in_words(name).replace(" ", "\n", 1), figures.diagram(name), 7.2)
        axes.title.set(
            color=style.hue(name).text if name in COMPARED else style.INK,
            fontweight="bold" if name in COMPARED else None,
        )
    _errors(right.subplots(), {name: trials[_trial(name)] for name in COMPARED})
    return figure


def _verdict(trials: dict[str, Sequence[results.Record]]) -> str:
    """Return which of two trials has the lower errors, if the rank test of the report says
    so.
    """
    (one, first), (other, second) = trials.items()
    errors = ([record.error for record in results.largest(each)] for each in (first, second))
    sign = ranks.difference(*errors)
    if not sign:
        return "Test errors: no clear difference"
    return f"Lower test error: {in_words(one if sign < 0 else other)}"


def _trial(arrangement: str) -> str:
    return f"digits/resnet110-{arrangement}"


def _final(records: Sequence[results.Record]) -> float:
    return statistics.median(record.error for record in records)


def _errors(axes, trials: dict[str, Sequence[results.Record]]) -> None:
    """Draw the median and the range of the test errors of trials by iteration, and
    write the final errors at the ends of the curves.
    """
    style.styled(axes, x="Iteration", y="Test error (%)")
    worst = max(trials, key=lambda name: _final(trials[name]))
    for name, records in trials.items():
        hue = style.hue(name)
        iterations, (low, middle, high) = pictures.band(records, "test_error")
        axes.fill_between(iterations, low, high, color=hue.line, alpha=0.2, linewidth=0)
        axes.plot(iterations, middle, color=hue.line, linewidth=2, label=name)
        look = {"ha": "right", "fontsize": style.LABEL, "fontweight": "bold", "color": hue.text}
        above, below = {"xytext": (-2, 24), "va": "bottom"}, {"xytext": (-2, -20), "va": "top"}
        look |= above if name == worst else below
        text = f"{in_words(name)}\n{_final(records):.1f} %"
        axes.annotate(text, (iterations[-1], middle[-1]), textcoords="offset points", **look)
    records = trials[worst]
    network = records[0].config["model"]
    depth = re.search(r"\d+", network["name"]).group()
    text = (
        f"ResNet-{depth}, {fractions.Fraction(network['width_factor'])} of its "
        "channels,\n"
        f"8\u00d78 digits, median and range of {len(records)} seeds"
    )
    axes.set_title(text, loc="left", fontsize=style.SMALL, color=style.GREY)
    axes.set_yscale("log")
    axes.set_xlim(0, iterations[-1])
    axes.set_ylim(1, 100)
    style.plain_numbers(axes.yaxis)


def diagrams() -> Iterator[tuple[str, object]]:
    """Yield names and figures of every arrangement, shortcut and block."""
    yield "arrangements_bottleneck", figures.arrangements_figure("bottleneck")
    for name in kp.ARRANGEMENTS:
        yield f"arrangement_{name}", figures.unit_diagram(name)
    yield "network_original", figures.network_diagram("original")
    for name in kp.SHORTCUTS:
        yield f"shortcut_{name}", figures.diagrams_figure({name: figures.diagram("original", name)})
    drawn = {
        block: figures.diagram(
            row, block=block, normalization="batch" if row in kp.ARRANGEMENTS else "layer"
        )
        for block, row in BLOCKS.items()
    }
    yield "blocks", figures.diagrams_figure(drawn)
    transformer = {
        f"{row}, {block}": figures.diagram(row, block=block, normalization="layer")
        for row in kp.arrangements.TRANSFORMER_ARRANGEMENTS
        for block in ("attention", "mlp")
    }
    yield "transformers", figures.diagrams_figure(transformer)


def gallery() -> Iterator[tuple[str, object]]:
    """Run the code of the gallery from top to bottom. Yield the figure at the end of
    each block, with the name of the function that drew it.
    """
    names: dict[str, object] = {}
    for code in BLOCK.findall((ROOT / "docs" / GALLERY).read_text()):
        tree = ast.parse(code)
        drawn = drawn_by(tree)
        last = tree.body.pop() if drawn else None
        exec(compile(tree, GALLERY, "exec"), names)
        if isinstance(last, ast.Expr):
            yield drawn, eval(compile(ast.Expression(last.value), GALLERY, "eval"), names)


def drawn_by(block: ast.Module) -> str:
    """Return the name of the function of `figures` that a block ends with, or ""."""
    match = re.match(r"figures\.(\w+)\(", ast.unparse(block.body[-1]))
    return match[1] if match else ""


def dark_name(name: str) -> str:
    """Return the file name of a picture for dark pages: `x-dark.svg` for `x.svg` and
    for `x-light.svg`.
    """
    return re.sub(r"(-light)?\.(svg|png)$", r"-dark.\2", name)


def on_files(files, config):
    from mkdocs.structure.files import File

    for path in sorted((*FIGURES.glob("*.svg"), *RESULTS.glob("*.svg"))):
        dark = style.darkened(path.read_text())
        of_page = f"{path.parent.name}/{dark_name(path.name)}"
        files.append(File.generated(config, of_page, content=dark))
    for path in sorted(RESULTS.glob("*.svg")):  # not in the folder of the pages
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Show a picture that has a dark counterpart as two images; the theme hides one."""

    def both(match: re.Match) -> str:
        alt, target = match.groups()
        path = os.path.normpath(os.path.join(os.path.dirname(page.file.src_uri), dark_name(target)))
        if files.get_file_from_path(path) is None:
            return match[0]
        return f"![{alt}]({target}#only-light)![{alt}]({dark_name(target)}#only-dark)"

    return re.sub(r"!\[([^\]]*)\]\(([^)\s#]+\.(?:svg|png))\)", both, markdown)


def main() -> None:
    """Write all pictures."""
    svg = style.svg(front())
    texts = {FRONT / "front-light.svg": svg, FRONT / "front-dark.svg": style.darkened(svg)}
    texts[explorer_choices.FILE] = explorer_choices.text()
    for draw in (diagrams, diagnosis.figures, gallery):
        texts |= {
            FIGURES / f"{name}.svg": style.on_white(style.svg(figure)) for name, figure in draw()
        }
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"Written: {path}, {len(text) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
