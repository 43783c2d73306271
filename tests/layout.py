"""Checks that the texts of a figure are neither cut off nor overlap."""

import itertools

from matplotlib.text import Text


def shown_texts(figure) -> list[tuple[str, object]]:
    """Return every text that a matplotlib figure shows, with its place in pixels."""
    figure.draw_without_rendering()
    texts = []
    for part in (figure, *figure.subfigs):
        texts += [*part.texts, getattr(part, "_suptitle", None), getattr(part, "_supxlabel", None)]
        texts += [text for legend in part.legends for text in legend.get_texts()]
    for axes in figure.axes:
        if not axes.get_visible():
            continue
        texts += [axes.title, axes._left_title, *axes.texts]
        if axes.get_legend():
            texts += axes.get_legend().get_texts()
        for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            texts += [
                axis.label,
                *(label for tick in ticks for label in (tick.label1, tick.label2)),
            ]
    unique = {
        id(text): text
        for text in texts
        if text is not None and text.get_visible() and text.get_text().strip()
    }
    # without the arrows of annotations
    return [(text.get_text(), Text.get_window_extent(text)) for text in unique.values()]


def check(figure) -> None:
    """Check that no text is cut off at the figure's edge and that no two texts overlap
    by more than a pixel.
    """
    found, page = shown_texts(figure), figure.bbox
    for text, box in found:
        assert page.x0 - 1 <= box.x0 <= box.x1 <= page.x1 + 1, f"{text!r} is cut off at a side"
        assert page.y0 - 1 <= box.y0 <= box.y1 <= page.y1 + 1, f"{text!r} is cut off above or below"
    for (text, box), (other, another) in itertools.combinations(found, 2):
        apart = (
            box.x1 - 1 <= another.x0
            or another.x1 - 1 <= box.x0
            or box.y1 - 1 <= another.y0
            or another.y1 - 1 <= box.y0
        )
        assert apart, f"{text!r} overlaps {other!r}"
