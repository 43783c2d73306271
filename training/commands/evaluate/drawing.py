"""The pictures of an evaluation: confusion matrix, reliability and mistakes."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image


def draw_reliability(curves: dict[str, tuple], path: Path) -> None:
    """Draw the accuracy over the confidence: a point per interval, with an area that grows
    with its images. `curves` has the result of `reliability` for each name.
    """
    from keras_preact.analysis.figures import style

    figure = style.new_figure(5.6, 5.2)
    title = "Accuracy by confidence; area: images"
    axes = style.styled(figure.subplots(), title, "Confidence (%)", "Accuracy (%)")
    (line,) = axes.plot([0, 100], [0, 100], "--", color=style.GREY)
    handles = {"calibrated: both are equal": line}
    for i, (name, (confidences, accuracies, counts)) in enumerate(curves.items()):
        areas = 12 + 300 * counts / counts.sum()
        axes.scatter(
            100 * confidences, 100 * accuracies, areas, style.colour(i), zorder=3, clip_on=False
        )
        handles[name] = style.sample({"color": style.colour(i), "marker": "o", "linestyle": ""})
    axes.set(xlim=(0, 100), ylim=(0, 100))
    style.legend(figure, handles)
    figure.savefig(path, format="png", dpi=120)


def draw_confusion(matrix: np.ndarray, classes: list[str], path: Path) -> None:
    """Draw a confusion matrix: a row for each true class, shaded by the share of its
    images.
    """
    from keras_preact.analysis.figures import style

    n = len(classes)
    named = n <= 50  # names of more classes would overlap
    side = min(3.2 + 0.34 * n, 16) if named else 8
    figure = style.new_figure(side + 1.4, side)
    right, images = int(np.trace(matrix)), int(matrix.sum())
    title = f"{right:,} of {images:,} images right ({100 * right / max(images, 1):.1f} %)"
    axes = style.styled(figure.subplots(), title, "Predicted class", "True class")
    axes.grid(False)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    picture = axes.imshow(100 * shares, cmap="Blues", vmin=0, vmax=100)
    style.colour_bar(figure, axes, picture, "Share of the true class (%)")
    if named:
        axes.set_xticks(range(n), classes, rotation=90 if max(map(len, classes)) > 2 else 0)
        axes.set_yticks(range(n), classes)
    if n <= 20:
        for (i, j), count in np.ndenumerate(matrix):
            if count:
                colour = "white" if shares[i, j] > 0.5 else style.INK
                axes.text(
                    j, i, f"{count}", ha="center", va="center", color=colour, fontsize=style.SMALL
                )
    figure.savefig(path, format="png", dpi=120)


def draw_mistakes(pictures: Sequence["Image.Image"], titles: Sequence[str], path: Path) -> None:
    """Draw images in rows, each with its title."""
    from keras_preact.analysis.figures import style

    columns = min(len(pictures), 8)
    rows = -(-len(pictures) // columns)
    figure = style.new_figure(1.8 * max(columns, 2), 2.3 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid:
        axes.set_axis_off()
    for axes, picture, title in zip(grid, pictures, titles, strict=False):
        axes.imshow(picture, cmap="gray", vmin=0, vmax=255)
        # names of classes may be long, and have no spaces
        lines = [textwrap.fill(line, 20) for line in title.split("\n")]
        axes.set_title("\n".join(lines), fontsize=style.SMALL, color=style.INK, parse_math=False)
    figure.savefig(path, format="png", dpi=120)
