"""Prepares the HTML of a page for narrow windows: words of code are kept whole, and
the cells of tables get the heading of their column. extra.css shows it on a telephone,
where each row is a block.
"""

import re

CODE = re.compile(r"(?<!<pre>)<code>([^<]*)</code>")
#: A word that a browser would break after a hyphen: `--data.flip`. A longer one has to break.
WORD = re.compile(r"(?<!\S)(?=\S*-)\S{2,28}(?!\S)")
TABLE = re.compile(r"<table>.*?</table>", flags=re.S)
HEADING = re.compile(r"<th\b[^>]*>(.*?)</th>", flags=re.S)
ROW = re.compile(r"<tr>.*?</tr>", flags=re.S)
#: Tables with fewer columns fit.
COLUMNS = 3


def whole_words(content: str) -> str:
    """Return HTML in which the words of inline code do not break at hyphens."""

    def code(match: re.Match) -> str:
        words = WORD.sub(lambda word: f'<span class="word">{word[0]}</span>', match[1])
        return f"<code>{words}</code>"

    return CODE.sub(code, content)


def with_headings(content: str) -> str:
    """Return HTML in which the cells of tables have their column's heading, after the
    first column.
    """

    def table(match: re.Match) -> str:
        headings = [re.sub(r"<.*?>", "", each) for each in HEADING.findall(match[0])]
        if len(headings) < COLUMNS:
            return match[0]

        def row(match: re.Match) -> str:
            start, *cells = match[0].split("<td")
            for i, heading in enumerate(headings[: len(cells)]):
                if i and heading:
                    cells[i] = f' data-heading="{heading}"{cells[i]}'
            return "<td".join([start, *cells])

        return ROW.sub(row, match[0]).replace("<table>", "<table data-columns>", 1)

    return TABLE.sub(table, content)


def on_page_content(content, page, config, files):
    return whole_words(with_headings(content))
