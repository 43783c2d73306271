"""The page of an analysis: page.html, filled with the verdict, the chapters and every check."""

import html
import importlib.metadata
import string
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_preact.analysis.audit import Audit, AuditFinding
from keras_preact.analysis.audit.report import shown
from keras_preact.analysis.figures import style

HERE = Path(__file__).parent
#: Name of a picture to its texts. The file explains them.
TEXTS: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    (HERE / "pictures.toml").read_text(encoding="utf-8")
)
#: Check of the audit to the picture that shows what it found.
SHOWN_BY = {check: name for name, row in TEXTS.items() for check in row.get("shows", ())}
#: The picture at the top of a page, if no finding of the audit has another one.
MAIN = "gradient_norms"
#: Status of an audit to what the page says first.
VERDICTS = {
    "PASS": "No check found a mistake",
    "WARN": "This network has weak points",
    "FAIL": "This network has a fault",
}


def render(
    title: str,
    summary: Mapping[str, str],
    audit: Audit | str,
    chapters: Sequence[tuple[str, str, Sequence[Any]]],
    left_out: Mapping[str, str],
) -> str:
    """Return the page: the verdict and the picture that shows it, the chapters, every
    check, and what was analysed.

    Args:
        title: Name of the network.
        summary: What was analysed, and how: name to text.
        audit: The audit, or the reason why there is none.
        chapters: Name, heading and pictures of each chapter. The page links to the files
            that `save` writes to `pictures/`.
        left_out: Heading of each chapter that does not apply, and the reason.
    """
    findings = () if isinstance(audit, str) else audit.findings
    worst = [each for status in ("FAIL", "WARN") for each in findings if each.status == status]
    pictures = {each.name: each for _, _, content in chapters for each in content}
    candidates = [*(SHOWN_BY.get(each.check) for each in worst), MAIN, *pictures]
    main = next((name for name in candidates if name in pictures), None)
    menu, body = [], []
    for name, heading, content in chapters:
        shown = "".join(_figure(each, findings) for each in content if each.name != main)
        menu.append((name, heading))
        at_the_top = f'<a href="#picture-{main}">at the top</a>'
        shown = shown or f'<p class="note">Its picture is {at_the_top}.</p>'
        body.append(f'<h2 id="{name}">{_text(heading)}</h2>\n{shown}')
    menu += [("audit", "Every check"), ("analysed", "What was analysed")]
    template = string.Template((HERE / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=_text(title),
        verdict=_verdict(audit, worst),
        main=_figure(pictures[main], findings) if main else "",
        menu="".join(f'<li><a href="#{name}">{_text(heading)}</a></li>' for name, heading in menu),
        chapters="\n".join(body),
        checks=_checks(findings) if findings else _note(f"Left out: {audit}."),
        analysed="".join(
            f'<tr><th scope="row">{_text(name)}</th><td>{_text(value)}</td></tr>\n'
            for name, value in summary.items()
        ),
        left_out="".join(_note(f"{heading}: {reason}.") for heading, reason in left_out.items()),
        version=importlib.metadata.version("keras-preact"),
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _note(text: str) -> str:
    return f'<p class="note">{_text(text)}</p>\n'


def _verdict(audit: Audit | str, worst: Sequence[AuditFinding]) -> str:
    if isinstance(audit, str):
        status, verdict = "", f"There is no verdict: {audit.removesuffix('.')}."
    else:
        status, verdict = audit.worst, f"{VERDICTS[audit.worst]}: {audit.counts}."
    items = "\n".join(
        f'<li><strong class="{each.status}">{_text(each.check)}</strong>: {_text(each.detail)} '
        f"What to do: {_text(each.advice)}</li>"
        for each in worst
        if not each.explained_by
    )
    return (
        f'<section class="verdict {status}"><p><strong class="{status}">{_text(verdict)}</strong>'
        f"</p>{items and f'<ul>{items}</ul>'}</section>"
    )


def _figure(picture: Any, findings: Sequence[AuditFinding]) -> str:
    texts = TEXTS[picture.name]
    how = texts["how"] + "".join(
        f" The audit, within one shape: {each.detail}"
        for each in findings
        if each.check == texts.get("compares")
    )
    width, height = (round(100 * inches) for inches in picture.figure.get_size_inches())
    file = f"pictures/{picture.name}"
    return (
        f'<figure id="picture-{picture.name}"><a href="{file}.png"><picture>'
        f'<source srcset="{file}-dark.svg" media="(prefers-color-scheme: dark)">'
        f'<img src="{file}.svg" width="{width}" height="{height}" '
        f'alt="{_text(picture.alt or texts["alt"])}"></picture></a>'
        f"<figcaption><strong>{_text(picture.found)}</strong> {_text(how)}</figcaption></figure>\n"
    )


def _checks(findings: Sequence[AuditFinding]) -> str:
    rows = []
    for each in findings:
        words = [each.detail]
        if each.status != "PASS":
            where = f" ({', '.join(each.locations[:3])})" if each.locations else ""
            words = [each.detail + where, each.meaning, f"What to do: {each.advice}"]
        rows.append(
            f'<tr><td class="status {each.status}">{each.status}</td>'
            f'<th scope="row">{_text(each.check)}</th>'
            f"<td>{shown(each.figure, each.unit)}<br>"
            f'<span class="note">{_text(each.unit)}</span></td>'
            f"<td>{'<br>'.join(map(_text, words))}<br>"
            f'<span class="note">{_text(each.source)}</span></td></tr>\n'
        )
    names = ("Status", "Check", "Figure", "Found")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return f'<table class="findings"><thead><tr>{head}</tr></thead>\n{"".join(rows)}</table>'


def save(folder: Path, pictures: Iterable[Any]) -> None:
    """Write each picture to `folder`: NAME.svg for light and NAME-dark.svg for dark
    pages, and NAME.png on white.
    """
    for picture in pictures:
        svg = style.svg(picture.figure)
        (folder / f"{picture.name}.svg").write_text(svg, encoding="utf-8")
        (folder / f"{picture.name}-dark.svg").write_text(style.darkened(svg), encoding="utf-8")
        picture.figure.savefig(folder / f"{picture.name}.png", dpi=150)
