"""The order of layers as text, and as HTML for notebooks."""

import html
from collections.abc import Mapping, Sequence

#: F, h and f of a unit to the names of their layers, in order.
Paths = Mapping[str, Sequence[str]]

_BOX = "border:1px solid gray;border-radius:4px;padding:1px 5px;white-space:nowrap"


def text(paths: Paths) -> str:
    """Return a line for each path."""
    return "\n".join(f"{path}: {', '.join(words) or 'identity'}" for path, words in paths.items())


def diagram(title: str, paths: Paths) -> str:
    """Return a unit as HTML: its equation, and a line of boxes for each path."""
    lines = [
        f"<tr><th style='text-align:left'>{path}</th><td style='text-align:left'>"
        + (" &rarr; ".join(f"<span style='{_BOX}'>{html.escape(word)}</span>" for word in words))
        + ("" if words else "identity")
        + "</td></tr>"
        for path, words in paths.items()
    ]
    return (
        f"<p><b>{html.escape(title)}</b>: "
        "<i>x</i><sub>l+1</sub> = f(h(<i>x</i><sub>l</sub>) + F(<i>x</i><sub>l</sub>))</p>"
        f"<table>{''.join(lines)}</table>"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as HTML."""
    cells = [
        "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        for tag, row in (("th", header), *(("td", row) for row in rows))
    ]
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
