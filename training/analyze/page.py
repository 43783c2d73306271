"""The page of an analysis: one HTML file beside its pictures, without scripts and without anything from the network."""

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

STYLE = """
:root {
  --ink: #1c1c1c; --soft: #5c5c5c; --paper: #ffffff; --line: #d8d8d8;
  --pass: #0a6b45; --warn: #8a5200; --fail: #a8281c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #ececec; --soft: #a8a8a8; --paper: #17191b; --line: #3a3d40;
    --pass: #5fd6a2; --warn: #f0b35a; --fail: #ff8a7a;
  }
}
body {
  margin: 0 auto; padding: 1rem; max-width: 56rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.6rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; list-style: none; }
a { color: inherit; }
figure { margin: 1.5rem 0; }
figcaption, .note { color: var(--soft); }
figcaption strong { color: var(--ink); }
img { display: block; max-width: 100%; height: auto; margin-bottom: .5rem; background: #fff; border-radius: 6px; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th, .findings td:not(:last-child) { overflow-wrap: normal; }
.status { font-weight: 700; white-space: nowrap; }
.PASS { color: var(--pass); }
.WARN { color: var(--warn); }
.FAIL { color: var(--fail); }
@media (max-width: 40rem) {
  .findings thead { display: none; }
  .findings tr { display: block; padding: .4rem 0; border-bottom: 1px solid var(--line); }
  .findings th, .findings td { display: block; padding: 0; border: 0; }
}
"""


def render(title: str, summary: Mapping[str, str], audit: Any, chapters: Iterable[tuple[str, str, Any]], version: str) -> str:
    """Return the page.

    Args:
        title: The network's name.
        summary: What was analysed, and how: names to texts.
        audit: A `kp.analysis.Audit`, or the reason why there is none.
        chapters: Name, heading, and the pictures, or the reason why there are none. A picture's files are
            `pictures/NAME.png` and `.svg`.
        version: Of this package.
    """
    chapters = list(chapters)
    links = [("audit", "Audit"), *((name, heading) for name, heading, _ in chapters)]
    menu = "".join(f'<li><a href="#{name}">{_text(heading)}</a></li>' for name, heading in links)
    rows = "".join(f"<tr><th scope=row>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in summary.items())
    body = "".join(f'<h2 id="{name}">{_text(heading)}</h2>{_chapter(content)}' for name, heading, content in chapters)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(title)}: analysis</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{_text(title)}</h1>\n<nav aria-label=Chapters><ul>{menu}</ul></nav>\n"
        f"<table>{rows}</table>\n"
        f'<h2 id="audit">Audit</h2>{_audit(audit)}\n{body}\n'
        f'<p class=note>keras-preact {_text(version)}. Every number: <a href="analysis.json">analysis.json</a>, '
        'the audit as text: <a href="audit.txt">audit.txt</a>.</p>\n</body>\n</html>\n'
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _chapter(content: Sequence[Any] | str) -> str:
    if isinstance(content, str):
        return f"<p class=note>Left out: {_text(content)}.</p>\n"
    return "".join(map(_picture, content))


def _picture(picture) -> str:
    width, height = (round(100 * inches) for inches in picture.figure.get_size_inches())
    file = f"pictures/{picture.name}"
    return (
        f'<figure id="{picture.name}"><a href="{file}.svg"><img src="{file}.png" width="{width}" height="{height}" '
        f'loading=lazy alt="{_text(picture.shown)}"></a>'
        f"<figcaption>{_text(picture.how)} <strong>{_text(picture.found)}</strong></figcaption></figure>\n"
    )


def _audit(audit) -> str:
    if isinstance(audit, str):
        return f"<p class=note>Left out: {_text(audit)}.</p>"
    rows = []
    for each in audit.findings:
        cells = [f'<td class="status {each.status}">{each.status}</td>', f"<th scope=row>{_text(each.check)}</th>"]
        cells.append(f"<td>{each.figure:.3g}<br><span class=note>{_text(each.unit)}</span></td>")
        words = [_text(each.detail)]
        if each.status != "PASS":
            where = f" ({_text(', '.join(each.locations[:3]))})" if each.locations else ""
            words = [_text(each.detail) + where, _text(each.meaning), f"What to do: {_text(each.advice)}"]
        cells.append(f"<td>{'<br>'.join(words)}<br><span class=note>{_text(each.source)}</span></td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = "<tr><th scope=col>Status</th><th scope=col>Check</th><th scope=col>Figure</th><th scope=col>Found</th></tr>"
    return f"<table class=findings><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def save(folder: Path, pictures: Iterable[Any]) -> None:
    """Write each picture to `folder` as PNG and SVG."""
    for picture in pictures:
        picture.figure.savefig(folder / f"{picture.name}.png", dpi=150)
        picture.figure.savefig(folder / f"{picture.name}.svg")
