"""Makes docstrings readable as Markdown: examples become blocks of code, labels such as
`Source:` become bold, and arguments that share a description get it each. Figures are
shown below the functions that draw them.
"""

import re
import textwrap
from pathlib import Path

import griffe

#: Labels of paragraphs. Google's style has sections such as `Args:` besides them, which
#: griffe reads; a label with indented lines below it would be an admonition.
LABELS = ("Source", "Input", "Output", "Input and output", "Shapes", "Layers", "Attributes")
LABELLED = re.compile(rf"^({'|'.join(LABELS)}): (.+(?:\n.*\S.*)*)", flags=re.M)
EXAMPLE = re.compile(rf"(?:^>>> .*\n?(?:^(?!\s*$|(?:{'|'.join(LABELS)}):).*\n?)*\n?)+", flags=re.M)
INDENTED = re.compile(r"^Example:\n((?: {4}.*\n?)+)", flags=re.M)
FLAGS = re.compile(r" +# doctest: \+\w+")
#: Several arguments with one description. griffe needs a description for each.
SHARED = re.compile(r"^(    )(\*{0,2}\w+(?:, \*{0,2}\w+)+): (.*(?:\n {5,}.*)*)", flags=re.M)

DRAWING = "keras_preact.analysis.figures."
FIGURES = Path(__file__).parents[1] / "figures"


def fenced(docstring: str) -> str:
    """Return a docstring with its examples fenced."""
    docstring = INDENTED.sub(lambda match: f"Example:\n\n{textwrap.dedent(match[1])}", docstring)
    docstring = EXAMPLE.sub(
        lambda match: f"```python\n{FLAGS.sub('', match[0]).rstrip()}\n```\n\n", docstring
    )
    return docstring.replace("Example:\n\n```", "**Example:**\n\n```")


def labelled(docstring: str) -> str:
    """Return a docstring with bold labels, each with its whole paragraph after it."""

    def paragraph(match: re.Match) -> str:
        return f"**{match[1]}:** {' '.join(match[2].split())}"

    return LABELLED.sub(paragraph, docstring)


def one_each(docstring: str) -> str:
    """Return a docstring in which `a, b: text` is split into `a: text` and `b: text`."""

    def entries(match: re.Match) -> str:
        return "\n".join(f"{match[1]}{name}: {match[3]}" for name in match[2].split(", "))

    return SHARED.sub(entries, docstring)


def readable(docstring: str) -> str:
    """Return a docstring as the reference shows it."""
    return labelled(fenced(one_each(docstring)))


class Docstrings(griffe.Extension):
    """Changes every docstring as soon as it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs) -> None:
        if not obj.docstring:
            return
        obj.docstring.value = readable(obj.docstring.value)
        picture = FIGURES / f"{obj.name}.svg"
        if obj.path.startswith(DRAWING) and picture.exists():
            light, dark = (f"{obj.name}{kind}.svg#only-" for kind in ("", "-dark"))
            obj.docstring.value += (
                f"\n\n![{obj.name}](../figures/{light}light)![{obj.name}](../figures/{dark}dark)"
            )
