"""The page of an analysis: one HTML file beside its pictures, without scripts and
without anything from the network.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from keras_preact.analysis.figures import style

from .texts import MAIN, SHOWN_BY, WITHIN_SHAPES

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
.verdict {
  padding: .1rem 1rem; border-left: .4rem solid currentColor; border-radius: 0 6px 6px 0;
  background: var(--panel);
}
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
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: left; }
th, td { vertical-align: top; }
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


def render(
    title: str,
    summary: Mapping[str, str],
    audit: Any,
    chapters: Iterable[tuple[str, str, Sequence[Any]]],
    version: str,
    left_out: Mapping[str, Sequence[str]] = MappingProxyType({}),
    note: str = "",
) -> str:
    """Return the page: the verdict and the picture that shows it, the chapters, every
    check, and what was analysed.

    Args:
        title: Name of the network.
        summary: What was analysed, and how: name to text.
        audit: A `kp.analysis.Audit`, or the reason why there is none.
        chapters: Name, heading and pictures. The files of a picture are those that
            `save` writes to `pictures/`.
        version: Version of this package.
        left_out: Reason to the headings of the chapters that do not apply.
        note: What to know about all pictures.
    """
    chapters = list(chapters)
    first = main_picture(audit, [picture for _, _, content in chapters for picture in content])
    above = _picture(first, audit) if first else ""
    sections = {
        name: (heading, _chapter(content, first, audit)) for name, heading, content in chapters
    }
    rows = "".join(
        f"<tr><th scope=row>{_text(name)}</th><td>{_text(value)}</td></tr>"
        for name, value in summary.items()
    )
    analysed = f"<table>{rows}</table>\n{_notes(map(skipped, left_out, left_out.values()))}"
    sections |= {
        "audit": ("Every check", _audit(audit)),
        "analysed": ("What was analysed", analysed),
    }
    menu = "".join(
        f'<li><a href="#{name}">{_text(heading)}</a></li>'
        for name, (heading, _) in sections.items()
    )
    body = "\n".join(
        f'<h2 id="{name}">{_text(heading)}</h2>{content}'
        for name, (heading, content) in sections.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_text(title)}: analysis</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{_text(title)}</h1>
{_verdict(audit)}
{above}{_notes([note] if note else [])}<nav aria-label=Chapters><ul>{menu}</ul></nav>
{body}<p class=note>keras-preact {_text(version)}. Every number:
<a href="analysis.json">analysis.json</a>. The audit as text: <a href="audit.txt">audit.txt</a>.</p>
</body>
</html>
"""


def _notes(texts: Iterable[str]) -> str:
    return "".join(f"<p class=note>{_text(text)}</p>\n" for text in texts)


def skipped(reason: str, headings: Sequence[str]) -> str:
    """Return why chapters are left out, and which: `Left out by --quick: Jacobian,
    Mean-field theory.`
    """
    return f"{reason[:1].upper()}{reason[1:]}: {', '.join(headings)}."


def main_picture(audit: Any, pictures: Sequence[Any]) -> Any:
    """Return the picture that shows the worst finding of an audit, else that of the
    gradients; None without pictures.
    """
    by_name = {picture.name: picture for picture in pictures}
    names = (
        [] if isinstance(audit, str) else [SHOWN_BY.get(each.check) for each in _worst_first(audit)]
    )
    return next(
        (by_name[name] for name in (*names, MAIN) if name in by_name),
        pictures[0] if pictures else None,
    )


def _worst_first(audit: Any) -> list[Any]:
    """Return the findings that did not pass, failures before warnings."""
    return [each for status in ("FAIL", "WARN") for each in audit.findings if each.status == status]


def _verdict(audit: Any) -> str:
    if isinstance(audit, str):
        status, verdict, counts, items = "", "There is no verdict.", _text(audit), ""
    else:
        worst = _worst_first(audit)
        status = worst[0].status if worst else "PASS"
        items = "\n".join(
            f"<li><strong class={each.status}>{_text(each.check)}</strong>: {_text(each.detail)} "
            f"What to do: {_text(each.advice)}</li>"
            for each in worst
        )
        items = f"\n<ul>{items}</ul>" if items else ""
        verdict, counts = VERDICTS[status], f"{audit.counts[:1].upper()}{audit.counts[1:]}."
    strong = f'<strong class="{status}">{verdict}</strong>'
    return f'<section class="verdict {status}"><p>{strong} {counts}</p>{items}</section>'


def _text(value: object) -> str:
    return html.escape(str(value))


def _chapter(content: Sequence[Any], first: Any, audit: Any) -> str:
    others = [picture for picture in content if picture is not first]
    if not others:
        return f'<p class=note>Its picture is <a href="#{first.name}">at the top</a>.</p>\n'
    return "".join(_picture(picture, audit) for picture in others)


def _picture(picture, audit: Any) -> str:
    width, height = (round(100 * inches) for inches in picture.figure.get_size_inches())
    file = f"pictures/{picture.name}"
    how = f"{picture.how}{_within_shapes(picture, audit)}"
    return (
        f'<figure id="{picture.name}"><a href="{file}.png"><picture>'
        f'<source srcset="{file}-dark.svg" media="(prefers-color-scheme: dark)">'
        f'<img src="{file}.svg" width="{width}" height="{height}" alt="{_text(picture.shown)}">'
        f"</picture></a><figcaption><strong>{_text(picture.found)}</strong> {_text(how)}"
        "</figcaption></figure>\n"
    )


def _within_shapes(picture, audit: Any) -> str:
    """Return what the audit found when it compared the norms of a picture within one
    shape.
    """
    check = WITHIN_SHAPES.get(picture.name)
    found = () if isinstance(audit, str) else audit.findings
    return "".join(
        f" The audit, within one shape: {each.detail}" for each in found if each.check == check
    )


def _audit(audit) -> str:
    if isinstance(audit, str):
        return f"<p class=note>Left out: {_text(audit)}.</p>"
    rows = "".join(
        f'<tr><td class="status {each.status}">{each.status}</td>'
        f"<th scope=row>{_text(each.check)}</th>"
        f"<td>{each.figure:.3g}<br><span class=note>{_text(each.unit)}</span></td>"
        f"<td>{'<br>'.join(map(_text, _words(each)))}<br>"
        f"<span class=note>{_text(each.source)}</span></td></tr>"
        for each in audit.findings
    )
    names = ("Status", "Check", "Figure", "Found")
    head = "".join(f"<th scope=col>{name}</th>" for name in names)
    return f"<table class=findings><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _words(finding) -> list[str]:
    if finding.status == "PASS":
        return [finding.detail]
    where = f" ({', '.join(finding.locations[:3])})" if finding.locations else ""
    return [finding.detail + where, finding.meaning, f"What to do: {finding.advice}"]


def save(folder: Path, pictures: Iterable[Any]) -> None:
    """Write each picture to `folder`: NAME.svg for light and NAME-dark.svg for dark
    pages, and NAME.png on white.
    """
    for picture in pictures:
        svg = style.svg(picture.figure)
        (folder / f"{picture.name}.svg").write_text(svg, encoding="utf-8")
        (folder / f"{picture.name}-dark.svg").write_text(style.darkened(svg), encoding="utf-8")
        picture.figure.savefig(folder / f"{picture.name}.png", dpi=150)
