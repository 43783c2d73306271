"""Turns the formulas of the pages into MathML, which browsers draw without a script."""

import html
import re

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.S)
#: Sizes of brackets, which MathML chooses by itself.
SIZES = re.compile(r"\\(?:big|Big|bigg|Bigg)[lr]?(?![a-zA-Z])")


def on_page_content(content, page, config, files):
    def mathml(match: re.Match) -> str:
        display = "block" if match[1] == "div" else "inline"
        formula = convert(SIZES.sub("", html.unescape(match[2])), display=display)
        return f'<div class="formula">{formula}</div>' if match[1] == "div" else formula

    return FORMULA.sub(mathml, content)
