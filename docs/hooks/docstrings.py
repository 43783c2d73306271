"""Puts the examples of docstrings into code blocks. Markdown would read them as
quotations.
"""

import re
import textwrap

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$|Source:).*\n?)*\n?)+", flags=re.M)
INDENTED = re.compile(r"^Example:\n((?: {4}.*\n?)+)", flags=re.M)
FLAGS = re.compile(r" +# doctest: \+\w+")
#: Several arguments that share a description. griffe needs a description for each.
SHARED = re.compile(r"^(    )(\*{0,2}\w+(?:, \*{0,2}\w+)+): ", flags=re.M)


def fenced(docstring: str) -> str:
    """Return a docstring with its examples fenced."""
    docstring = INDENTED.sub(lambda match: f"Example:\n\n{textwrap.dedent(match[1])}", docstring)
    docstring = EXAMPLE.sub(
        lambda match: f"```python\n{FLAGS.sub('', match[0]).rstrip()}\n```\n\n", docstring
    )
    return docstring.replace("Example:\n\n```", "**Example**\n\n```")


def one_each(docstring: str) -> str:
    """Return a docstring in which `a, b: text` is split: ``b: See `a`.``, `a: text`."""

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
