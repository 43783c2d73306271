"""Makes docstrings readable as Markdown: examples become blocks of code, labels such as
`Source:` become bold, and arguments that share a description get it each. Figures are
shown below the functions that draw them. "See `name`" is a link, and a class has the bases
that the reference shows.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
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

#: A name that a text sends its reader to.
SEE = re.compile(r"\b([Ss]ee )`([\w.]+)`")
#: Packages with public names from several modules.
PLACES = ("analysis.", "analysis.figures.", "models.", "transfer.", "weights.", "export.")

DRAWING = "keras_preact.analysis.figures."
FIGURES = Path(__file__).parents[1] / "figures"
#: The modules of the reference.
REFERENCE = {
    name
    for page in (Path(__file__).parents[1] / "reference").glob("*.md")
    for name in re.findall(r"^::: (\S+)", page.read_text(), flags=re.M)
}


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


def known_bases(of: griffe.Class) -> list:
    """Return the bases of a class, with those of bases that the reference does not show in
    place of them.
    """
    known = []
    for base in of.bases:
        try:
            found = of.modules_collection[getattr(base, "canonical_path", base)]
        except KeyError:  # of another package
            found = None
        is_private = found and (found.name.startswith("_") or found.parent.path not in REFERENCE)
        known += known_bases(found) if is_private else [base]
    return list({str(base): base for base in known}.values())


def everything(part: griffe.Object) -> Iterator[griffe.Object]:
    """Yield an object and all that are inside it."""
    yield part
    for each in part.members.values():
        if not each.is_alias:
            yield from everything(each)


def targets(of: Iterable[griffe.Object]) -> dict[str, str]:
    """Return the names of what the reference shows, as docstrings write them, with the
    path of each. A name that several have has no target.
    """
    found: dict[str, list[str]] = {}
    for each in of:
        is_shown = each.docstring and not each.name.startswith("_")
        if is_shown and each.module.path in REFERENCE and not each.is_module:
            name = each.path.removeprefix(f"{each.module.path}.")
            full = [f"kp.{place}{name}" for place in ("", *PLACES)]
            for written in {name, *full, each.path.replace("keras_preact", "kp", 1)}:
                found.setdefault(written, []).append(each.path)
    return {name: paths[0] for name, paths in found.items() if len(paths) == 1}


def linked(docstring: str, names: Mapping[str, str]) -> str:
    """Return a docstring whose "See `name`" leads there."""

    def link(match: re.Match) -> str:
        name = match[2]
        return f"{match[1]}[`{name}`][{names[name]}]" if name in names else match[0]

    return SEE.sub(link, docstring)


class Docstrings(griffe.Extension):
    """Changes every docstring as soon as it is read. When all are, it adds links and changes
    the bases of classes.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        every = list(everything(pkg))
        names = targets(every)
        for each in every:
            if each.is_class:
                each.bases = known_bases(each)
            if each.docstring:
                each.docstring.value = linked(each.docstring.value, names)

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
