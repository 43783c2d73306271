"""The reference of all options, docs/reference/train.md and docs/reference/commands.md.

It is made from the parsers that read the command line. A command builds its parser as for
`--help`; this module catches what it gives to tyro and asks tyro for the same as an
`argparse` parser (`serve` has one already). The groups, names, forms of values and texts
are those of `--help`, and nothing depends on the width of a terminal. Only the default is
taken from the end of a text, where `training.cli.values` has written it.
"""

import argparse
import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import tyro

from training.benchmark import __main__ as benchmark
from training.cli import table
from training.cli.console import COMMANDS
from training.cli.console import main as start
from training.cli.terminal import markdown
from training.commands import sweep, train
from training.config import Config
from training.config import options as options_of
from training.recipes import RECIPES
from training.reproduce import __main__ as reproduce

#: What ends the text of an option: its default, or that it must be given.
END = re.compile(r"(?: \(default: ([^()]*)\)| \((required|one or more)\))?\s*$")
#: Names of options in a text, outside of code, with a value that is no word of the sentence.
NAME = re.compile(r"(?<![\w`-])--[a-z][\w.-]*\w(?: (?:[A-Z]+|\d+(?:\.\d+)?|\w+_\w+)\b)?")


class Option(NamedTuple):
    """A row of a table of options: its names, the form of its value, its default and its
    meaning.
    """

    names: tuple[str, ...]
    values: str
    default: str
    about: str

    def cells(self) -> list[str]:
        names = ", ".join(f"`{name}`" for name in self.names)
        values = f"<br>{self.values}" if self.values else ""
        return [f"{names}{values}", self.default, self.about]


class Parser(NamedTuple):
    """The paragraphs of a help text, and the options in their groups."""

    about: Sequence[str]
    groups: Mapping[str, Sequence[Option]]

    @property
    def options(self) -> list[Option]:
        return [option for group in self.groups.values() for option in group]


#: Option of train that is not a field of its configuration.
STRETCH = Option((train.EPOCHS,), "`NUMBER`", "the recipe's", train.EPOCHS_ABOUT)


class _Caught(BaseException):
    """Raised in place of reading the command line, with the arguments of `tyro.cli`."""


def parser_of(*words: str, kind: Any = None, default: Any = None) -> Parser:
    """Return the parser of a command, such as `parser_of("train", "digits")`, with another
    class of options or other defaults if they are given.
    """
    if words == ("serve",):
        from keras_preact.serving.__main__ import parser

        found = parser()
        return Parser(_paragraphs(found.description or ""), _groups(found))

    def caught(kind: Any, **options: Any) -> None:
        raise _Caught(kind, options)

    try:
        with mock.patch.object(tyro, "cli", caught):
            start([*words])
    except _Caught as got:
        (own, options) = got.args
    del options["args"]
    if default is not None:
        options["default"] = default
    with warnings.catch_warnings():
        # tyro has no other public way to a parser. If it removes this one, the test of the page
        # fails, and no command does.
        warnings.simplefilter("ignore")
        found = tyro.extras.get_parser(kind or own, **options)
    # the first paragraph has the examples, the last one is about --verbose
    return Parser(_paragraphs(options["description"])[1:-1], _groups(found))


def _paragraphs(text: str) -> list[str]:
    return [" ".join(each.split()) for each in text.split("\n\n")]


def _groups(parser: argparse.ArgumentParser) -> dict[str, list[Option]]:
    """Return the options of a parser, those before the others that need no name."""
    found: dict[str, list[Option]] = {}
    for group in parser._action_groups:
        title = "options" if group.title == "positional arguments" else str(group.title)
        for action in group._group_actions:
            if "--help" not in action.option_strings:
                found.setdefault(title, []).append(_option(action))
    return found


def _option(action: argparse.Action) -> Option:
    metavar = action.metavar or ""
    metavar = " ".join(metavar) if isinstance(metavar, tuple) else metavar
    text = " ".join((action.help or "").split())
    default, must = END.search(text).groups()  # type: ignore[union-attr]
    names = tuple(action.option_strings) or (metavar,)
    values = _values(metavar) if action.option_strings else ""
    if default and not (" " in default and metavar in ("NUMBER", "TEXT", "PATH")):  # no sentence
        default = f"`{default}`"
    default = must or default or ("required" if action.required else "")
    return Option(names, values, default, END.sub("", text))


def _values(metavar: str) -> str:
    """Return the form of a value as Markdown: `{a,b}` is a choice, `[X ...]` any number."""
    many = metavar.startswith("[")
    each = metavar.removeprefix("[").removesuffix(" ...]") if many else metavar
    if each.startswith("{"):
        *words, last = (f"`{word}`" for word in each.strip("{}").split(","))
        return f"{', '.join(words)} {'and' if many else 'or'} {last}{', any of them' * many}"
    return f"`{each} ...`" if many else each and f"`{each}`"


def _coded(text: str) -> str:
    """Return a text with the names of options as code, and with no other Markdown in it."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [NAME.sub(r"`\g<0>`", re.sub(r"([*<])", r"\\\1", part)) for part in parts[::2]]
    return "".join(parts)


def _table(options: Iterable[Option]) -> str:
    rows = [["option", "default", "meaning"]]
    for option in options:
        names, default, about = option.cells()
        rows.append([names, default, _coded(about)])
    return markdown(rows)


def _examples(name: str) -> str:
    return "\n".join(f"    {line}" for line in table.examples(name))


def _section(
    about: Sequence[str], options: Sequence[Option], base: str = "", of: Sequence[Option] = ()
) -> list[str]:
    """Return the text of a command with its options: all, or how they differ from those `of`
    the command `base`.
    """
    if not base:
        return [*map(_coded, about), _table(options)]
    given = {name for option in options for name in option.names}
    missing = [f"`{option.names[0]}`" for option in of if not given & {*option.names}]
    but = f", without {' and '.join(missing)}" if missing else ""
    own = _table(option for option in options if option not in of)
    link = f"[{base}](#{base.replace(' ', '-')})"
    return [*map(_coded, about), f"The options of {link}{but}, and these:", own]


def _train() -> Iterator[str]:
    parser = parser_of("train", "digits", default=train.Options())
    yield _coded(_paragraphs(train.DESCRIPTION)[0])
    recipes = [options_of(recipe()) for recipe in RECIPES.values()]
    usual = options_of(Config())
    for title, options in parser.groups.items():
        yield f"### Options of train: {'run' if title == 'options' else title.split()[0]}"
        own = [_with_recipes(option, usual, recipes) for option in options]
        yield _table([STRETCH, *own] if title == "options" else own)
    for name, recipe in RECIPES.items():
        yield f"### train {name}"
        yield from map(_coded, _paragraphs(inspect.getdoc(recipe) or ""))
        of_recipe = options_of(recipe())
        changed = {key: value for key, value in of_recipe.items() if value != usual[key]}
        yield f"Its defaults: {', '.join(f'`{_line(*each)}`' for each in changed.items())}."
        yield _examples(f"train {name}")
    yield "### train with the options of a run"
    yield (
        "`keras-preact train --config RUN` takes the options of a run as defaults. The options of "
        "train, and these:"
    )
    of_run = parser_of("train", "digits", kind=train.OptionsOfRun, default=train.OptionsOfRun())
    yield _table(option for option in of_run.options if option not in parser.options)


def _with_recipes(option: Option, usual: Mapping, recipes: Sequence[Mapping]) -> Option:
    """Return an option of train whose default says if recipes have another one."""
    name = option.names[-1].removeprefix("--").replace("no-", "")
    if name not in usual:
        return option
    changed = sum(recipe[name] != usual[name] for recipe in recipes)
    if not changed:
        return option
    default = f"{option.default}, or the recipe's" if option.default else "the recipe's"
    return option._replace(default="the recipe's" if 2 * changed > len(recipes) else default)


def _line(name: str, value: Any) -> str:
    """Return an option with its value as a person types it."""
    if isinstance(value, bool):
        place, _, last = name.rpartition(".")
        return f"--{name}" if value else f"--{place}{'.' * bool(place)}no-{last}"
    return f"--{name} {_words(value)}"


def _words(value: Any) -> str:
    """Return a value as a person types it."""
    if isinstance(value, tuple):
        return " ".join(map(_words, value))
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _sweep() -> Iterator[str]:
    of = parser_of("train", "digits", default=train.Options())
    options = parser_of("sweep", "digits", default=sweep.Options()).options
    about = [*_paragraphs(sweep.DESCRIPTION)[:1], *_paragraphs(sweep.ABOUT)]
    yield from _section(about, options, "train", of.options)


def _reproduce() -> Iterator[str]:
    yield _coded(_paragraphs(reproduce.DESCRIPTION)[0])
    commands = reproduce.COMMANDS.items()
    tables = {name: about for name, (about, what) in commands if not callable(what)}
    yield "### reproduce TABLE"
    yield "The tables:"
    yield "\n".join(f"- `{name}`: {_coded(about)}" for name, about in tables.items())
    yield _table(parser_of("reproduce", next(iter(tables))).options)
    for name in reproduce.COMMANDS:
        if name not in tables:
            parser = parser_of("reproduce", name)
            yield f"### reproduce {name}"
            yield from _section(parser.about, parser.options)


def _benchmark() -> Iterator[str]:
    yield _coded(_paragraphs(benchmark.DESCRIPTION)[0])
    first = next(iter(benchmark.QUESTIONS))
    of = parser_of("benchmark", first).options
    for name in benchmark.COMMANDS:
        parser = parser_of("benchmark", name)
        yield f"### benchmark {name}"
        base = f"benchmark {first}" if name in benchmark.QUESTIONS and name != first else ""
        yield from _section(parser.about, parser.options, base, of)


#: Commands with a page of their own, because they share many options.
TRAINING = ("train", "sweep", "resume")
#: Commands whose first argument is a name, each with a function that returns its text.
NAMED = {"train": _train, "sweep": _sweep, "reproduce": _reproduce, "benchmark": _benchmark}


def command_reference(*names: str) -> str:
    """Return commands with their examples and options: these, or those of no other page."""
    others = [name for name in COMMANDS if name not in TRAINING]
    parts: list[str] = []
    for name in names or others:
        if name in NAMED:
            first, *rest = NAMED[name]()
        else:
            parser = parser_of(name)
            first, *rest = _section(parser.about, parser.options)
        parts += [f"## {name}", first, _examples(name), *rest]
    return "\n\n".join(parts)


def training_reference() -> str:
    """Return the commands that take the options of a run."""
    return command_reference(*TRAINING)
