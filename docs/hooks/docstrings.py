"""Puts the examples of docstrings into code blocks, which Markdown would take for
quotations.
"""

import re
import textwrap

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$|Source:).*\n?)*\n?)+", flags=re.M)
INDENTED = re.compile(r"^Example:\n((?: {4}.*\n?)+)", flags=re.M)
FLAGS = re.compile(r" +# doctest: \+\w+")
#: Several arguments that share a description, of which griffe wants one each.
SHARED = re.compile(r"^(    )(\*{0,2}\w+(?:, \*{0,2}\w+)+): ", flags=re.M)


def fenced(docstring: str) -> str:
    """Return a docstring with its examples fenced."""
    docstring = INDENTED.sub(lambda match: f"Example:\n\n{textwrap.dedent(match[1])}", docstring)
    docstring = EXAMPLE.sub(
        lambda match: f"```python\n{FLAGS.sub('', match[0]).rstrip()}\n```\n\n", docstring
    )
    return docstring.replace("Example:\n\n```", "**Example**\n\n```")


def one_each(docstring: str) -> str:
    """Return a docstring in which `a, b: text` of a section is `a: text`, `b: as a`."""

    def entries(match: re.Match) -> str:
        first, *others = match[2].split(", ")
        return (
            "".join(f"{match[1]}{name}: See `{first}`.\n" for name in others)
            + f"{match[1]}{first}: "
        )

    return SHARED.sub(entries, docstring)


class Docstrings(griffe.Extension):
    """Changes every docstring as soon as it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(one_each(obj.docstring.value))
