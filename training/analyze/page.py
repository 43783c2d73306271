"""The page of an analysis: one HTML file beside its pictures, without scripts and without anything from the network."""

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_preact.analysis.figures import _style

from .texts import MAIN, SHOWN_BY

STYLE = """
:root {
  --ink: #1c1c1c; --soft: #5c5c5c; --paper: #ffffff; --line: #d8d8d8; --panel: #f4f5f6;
  --pass: #0a6b45; --warn: #8a5200; --fail: #a8281c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #ececec; --soft: #a8a8a8; --paper: #17191b; --line: #3a3d40; --panel: #22262a;
    --pass: #5fd6a2; --warn: #f0b35a; --fail: #ff8a7a;
  }
}
body {
  margin: 0 auto; padding: 1rem; max-width: 56rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.6rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
.verdict { padding: .1rem 1rem; border-left: .4rem solid currentColor; background: var(--panel); border-radius: 0 6px 6px 0; }
.verdict > * { color: var(--ink); }
.verdict p strong { font-size: 1.15rem; }
.verdict ul { padding-left: 1.2rem; }
.verdict li { margin: .5rem 0; }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; list-style: none; }
a { color: inherit; }
figure { margin: 1.5rem 0; }
figcaption, .note { color: var(--soft); }
figcaption strong { color: var(--ink); font-weight: 600; }
img { display: block; max-width: 100%; height: auto; margin-bottom: .5rem; }
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


#: Status of an audit to what the page says first.
VERDICTS = {
    "PASS": "The network passes the audit.",
    "WARN": "The network passes the audit with warnings.",
    "FAIL": "The network fails the audit.",
}


def render(title: str, summary: Mapping[str, str], audit: Any, chapters: Iterable[tuple[str, str, Any]], version: str) -> str:
    """Return the page: the verdict and the picture that shows it, the chapters, every check, and what was analysed.

    Args:
        title: Name of the network.
        summary: What was analysed, and how: name to text.
        audit: A `kp.analysis.Audit`, or the reason why there is none.
        chapters: Name, heading, and the pictures, or the reason why there are none. The files of a picture are those that
            `save` writes to `pictures/`.
        version: Version of this package.
    """
    chapters = list(chapters)
    pictures = [picture for _, _, content in chapters if not isinstance(content, str) for picture in content]
    first = main_picture(audit, pictures)
    links = [*((name, heading) for name, heading, _ in chapters), ("audit", "Every check"), ("analysed", "What was analysed")]
    menu = "".join(f'<li><a href="#{name}">{_text(heading)}</a></li>' for name, heading in links)
    rows = "".join(f"<tr><th scope=row>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in summary.items())
    body = "".join(f'<h2 id="{name}">{_text(heading)}</h2>{_chapter(content, first)}' for name, heading, content in chapters)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(title)}: analysis</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{_text(title)}</h1>\n{_verdict(audit)}\n{_picture(first) if first else ''}"
        f"<nav aria-label=Chapters><ul>{menu}</ul></nav>\n{body}\n"
        f'<h2 id="audit">Every check</h2>{_audit(audit)}\n'
        f'<h2 id="analysed">What was analysed</h2><table>{rows}</table>\n'
        f'<p class=note>keras-preact {_text(version)}. Every number: <a href="analysis.json">analysis.json</a>. '
        'The audit as text: <a href="audit.txt">audit.txt</a>.</p>\n</body>\n</html>\n'
    )


def main_picture(audit: Any, pictures: Sequence[Any]) -> Any:
    """Return the picture that shows the worst finding of an audit, else that of the gradients; None without pictures."""
    by_name = {picture.name: picture for picture in pictures}
    names = [] if isinstance(audit, str) else [SHOWN_BY.get(each.check) for each in _worst_first(audit)]
    return next((by_name[name] for name in (*names, MAIN) if name in by_name), pictures[0] if pictures else None)


def _worst_first(audit: Any) -> list[Any]:
    """Return the findings that did not pass, failures before warnings."""
    return [each for status in ("FAIL", "WARN") for each in audit.findings if each.status == status]


def _verdict(audit: Any) -> str:
    if isinstance(audit, str):
        return f"<section class=verdict><p><strong>There is no verdict.</strong> {_text(audit)}</p></section>"
    worst = _worst_first(audit)
    status = worst[0].status if worst else "PASS"
    checks = [_text(each.check) for each in audit.findings]
    counts = f"All {len(checks)} checks hold, from {checks[0]} to {checks[-1]}."
    if worst:
        counts = f"{len(checks) - len(worst)} of {len(checks)} checks hold."
    items = "\n".join(
        f"<li><strong class={each.status}>{_text(each.check)}</strong>: {_text(each.detail)} "
        f"What to do: {_text(each.advice)}</li>"
        for each in worst
    )
    reasons = f"\n<ul>{items}</ul>" if items else ""
    return (
        f'<section class="verdict {status}"><p><strong class={status}>{VERDICTS[status]}</strong> {counts}</p>'
        f"{reasons}</section>"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _chapter(content: Sequence[Any] | str, first: Any) -> str:
    if isinstance(content, str):
        return f"<p class=note>Left out: {_text(content)}.</p>\n"
    above = f'<p class=note>See <a href="#{first.name}">the picture at the top</a>.</p>\n'
    return "".join(above if picture is first else _picture(picture) for picture in content)


def _picture(picture) -> str:
    width, height = (round(100 * inches) for inches in picture.figure.get_size_inches())
    file = f"pictures/{picture.name}"
    return (
        f'<figure id="{picture.name}"><a href="{file}.png"><picture>'
        f'<source srcset="{file}-dark.svg" media="(prefers-color-scheme: dark)">'
        f'<img src="{file}.svg" width="{width}" height="{height}" alt="{_text(picture.shown)}"></picture></a>'
        f"<figcaption><strong>{_text(picture.found)}</strong> {_text(picture.how)}</figcaption></figure>\n"
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
    """Write each picture to `folder`: NAME.svg for light and NAME-dark.svg for dark pages, and NAME.png on white."""
    for picture in pictures:
        svg = _style.svg(picture.figure)
        (folder / f"{picture.name}.svg").write_text(svg, encoding="utf-8")
        (folder / f"{picture.name}-dark.svg").write_text(_style.darkened(svg), encoding="utf-8")
        picture.figure.savefig(folder / f"{picture.name}.png", dpi=150)
