"""Train a network by a recipe, or by the options of a run: `keras-preact train`. Resume a
run.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import tyro

from .. import cli, disk, functions, recipes
from ..config import Config, from_json
from ..directory import runs
from ..errors import UserError, check_positive, command
from ..recipes import RECIPES
from ..run import started
from ..run.checks import check_given

#: Beginning of the help text. Braces in names of models list alternatives.
DESCRIPTION = """Train a network by a recipe. Every field of a recipe is an option.
The run is written to runs/RECIPE-DATE-TIME, or to --output.
Interrupted runs resume exactly: keras-preact resume RUN.
In place of RECIPE, --config RUN takes all options from the config.json of a run, and
MODULE:RECIPE calls your own function, which returns a Config.
Set KERAS_BACKEND to tensorflow (default), jax or torch.

Models for --model.name:
  digits_resnet{8,20,10001}_preact
  digits_vanilla10000
  cifar_resnet{20,32,44,56,110,164,1001,1202}_{preact,original}
  cifar_resnet{110,164}_{bn_after_addition,bn_only_preact,relu_before_addition,relu_only_preact}
  cifar_wide_resnet{16_8,28_10,40_4}
  cifar_fast_resnet8
  imagenet_resnet{18,34,50,101,152,200}_{preact,original}
  imagenet_resnext{50_32x4d,101_32x8d}_preact

Recipes:"""

#: Option that is not a field: it stretches the whole schedule of the recipe.
EPOCHS = "--epochs"
#: Options that say the same in another way.
LENGTHS = ("--schedule.length", "--schedule.unit")
EPOCHS_ABOUT = "Stretch the whole schedule to this number of epochs."
#: End of the help text of a recipe, before its options; `{model}` says how it gets its network.
FIRST = """With --epochs N, the whole schedule is stretched to N epochs.

The options that people use first: --output DIR, --epochs N, --seed N or --seeds N, --batch N,
--lr RATE, {model}, --data.dir FOLDER, --precision auto (the faster one),
--distribution data_parallel (several GPUs), --dry-run."""
#: Short forms of options. An error names the form that was typed.
SHORT = {
    "--lr": "--optimizer.learning-rate",
    "--batch": "--batch-size",
    "--precision": "--model.precision",
}


def train(config: Config, recipe: str) -> Path | None:
    """Train as configured and return the run directory, None with `dry_run`.

    Raises:
        UserError: for a configuration that does not fit; nothing is written then.
    """
    with started(config, recipe) as run:
        from ..run import phases
        from ..run.callbacks import Diverged

        if config.dry_run:
            phases.rehearse(run)
            return None
        try:
            return phases.train(run)
        except Diverged as diverged:
            raise UserError(diverged.explanation) from diverged


@dataclasses.dataclass(frozen=True)
class Options(Config):
    """The options of `train RECIPE`: those of a run, and how many runs."""

    seeds: int | None = None
    """Number of runs, one after the other, with the seeds --seed, --seed + 1, ... Each has its
    directory in --output. The same command resumes them. At the end it prints the table of
    `keras-preact compare`."""


@dataclasses.dataclass(frozen=True)
class OfRun:
    """The option that --config RUN adds."""

    trust: bool = False
    """Run the code that the file names: functions and your own parts of the network. Give it only
    for a file that you trust."""


@dataclasses.dataclass(frozen=True)
class OptionsOfRun(OfRun, Options):
    """The options of `train --config RUN`."""


class Command(NamedTuple):
    """A command that takes a recipe, or the options of a run, and trains.

    Args:
        name: Its name.
        description: Beginning of its help text.
        kind: Class of its options, a subclass of `Config`.
        kind_of_run: The same with those of `OfRun`.
        about: Paragraphs of the help text of a recipe.
        act: Does the work, with the configuration of a run, the recipe's name, all options,
            and the arguments.
    """

    name: str
    description: str
    kind: type[Config]
    kind_of_run: type[Config]
    about: Sequence[str]
    act: Callable[[Config, str, Any, Sequence[str]], None]


def main(argv: Sequence[str]) -> None:
    """Parse the arguments and train."""
    words, verbose = cli.split_verbose(argv)
    first, equals, value = words[0].partition("=") if words else ("", "", "")
    if first == "--resume" and not equals:
        cli.main("resume", resume, [word for word in argv if word != first])
    elif first == "--resume":
        cli.guard(lambda: _refuse_value(value), verbose)
    else:
        act = Command("train", DESCRIPTION, Options, OptionsOfRun, [], _train)
        start(act, argv)


def start(act: Command, argv: Sequence[str]) -> None:
    """Parse the arguments of a command after its name, and do what they say."""
    words, verbose = cli.split_verbose(argv)
    first, equals, value = words[0].partition("=") if words else ("", "", "")
    if first == "--config":
        file, *others = [value, *words[1:]] if equals else [*words[1:], ""]
        cli.guard(lambda: _start_again(act, file, [word for word in others if word]), verbose)
    elif functions.is_own(first):
        cli.guard(lambda: _start(act, words[0], words[1:]), verbose)
    else:
        lines = {name: _about(recipe)[0] for name, recipe in RECIPES.items()}
        begin = functools.partial(_start, act)
        cli.choose(act.name, act.description, lines, begin, argv, word="RECIPE")


def resume(run: Annotated[Path, tyro.conf.Positional], /, trust: bool = False) -> None:
    """Resume an interrupted run with its own options. It ends as it would have without the
    interruption.

    To start or resume a run with the same line, add --output RUN --resume to
    `keras-preact train RECIPE`.

    Args:
        run: The run directory.
        trust: Run the code that its config.json names. Give it only for a run that you
            trust.
    """
    path = run / "config.json"
    if not path.is_file() and (several := runs.several(run)):
        raise UserError(
            f"{run} holds several runs. Give the command that began them again, with "
            f"--output {run}; or resume one of them: {runs.resuming(several[0])}"
        )
    described = runs.read_config(run)
    config = runs.config_of(path, described)
    functions.trust(config.functions, path, command("resume", run, "--trust"), trust)
    train(dataclasses.replace(config, output=run, resume=True), _recipe_in(described))


def _start(act: Command, recipe: str, argv: Sequence[str]) -> None:
    """Train by a recipe."""
    function = recipes.find(recipe)
    about = [*_about(function), *act.about]
    own = function()
    with _as_typed(argv):
        check_given(own, Config())
        config, options = _configured(f"{act.name} {recipe}", act.kind, own, about, argv)
        act.act(config, recipe, options, [recipe, *argv])


def _start_again(act: Command, file: str, argv: Sequence[str]) -> None:
    """Train by the options of a run."""
    if not file or file.startswith("-"):
        raise UserError(
            f"--config takes a run directory or its config.json. Received: {file or 'nothing'}"
        )
    path = Path(file)
    if not path.exists():
        raise UserError(
            f"{path} does not exist. --config takes a run directory or its config.json."
        )
    described = runs.read_config(path) if path.is_dir() else runs.read_description(path)
    path = path / "config.json" if path.is_dir() else path
    own = dataclasses.replace(
        runs.config_of(path, described), output=None, resume=False, dry_run=False
    )
    about = [
        f"The options of {path}. Those that you give replace them; the value None leaves a choice "
        "to the model.",
        *act.about,
    ]
    name = f"{act.name} --config {file}"
    with _as_typed(argv):
        config, options = _configured(name, act.kind_of_run, own, about, argv)
    given = {word.partition("=")[2] or word for word in argv}
    named = [name for name in config.functions if name in own.functions and name not in given]
    again = command(act.name, "--config", file, *argv, "--trust")
    functions.trust(named, path, again, options.trust)
    with _as_typed(argv):
        act.act(config, _recipe_in(described), options, ["--config", file, *argv])


def _train(config: Config, recipe: str, options: Options, words: Sequence[str]) -> None:
    """Train a run, or one for each of several seeds; `words` are the arguments."""
    seeds = options.seeds
    if seeds is None:
        train(config, recipe)
    elif config.dry_run:
        check_positive(seeds=seeds)
        train(config, recipe)
        print(f"Each of the {seeds} runs is like this one.")
    else:
        from .seeds import train_seeds

        train_seeds(config, recipe, seeds, words)


@contextlib.contextmanager
def _as_typed(argv: Sequence[str]) -> Iterator[None]:
    """Let errors name options in the form in which they were typed."""
    typed = {word.partition("=")[0] for word in argv}
    try:
        yield
    except UserError as error:
        message = str(error)
        for short, name in SHORT.items():
            if short in typed:
                message = re.sub(rf"{re.escape(name)}(?![\w-])", short, message)
        if message == str(error):
            raise
        raise UserError(message) from error


def _recipe_in(described: Mapping[str, Any]) -> str:
    """Return the name of the recipe in the content of a config.json."""
    return str(described.get("recipe", "run"))


def _configured(
    name: str, kind: type[Config], default: Config, about: Sequence[str], argv: Sequence[str]
) -> tuple[Config, Any]:
    """Return the configuration that arguments ask for, and all options."""
    default, words = _stretched(default, argv)
    _check_resume(words)
    is_new = default.model.name and default.model.weights is None
    model = "--model.name NAME" if is_new else "--model.weights RUN, --model.freeze stage2"
    options = cli.parse(
        name,
        kind,
        words,
        "\n\n".join([*about, FIRST.format(model=model)]),
        default=kind(**vars(default)),
    )
    fields = [field.name for field in dataclasses.fields(Config)]
    config = Config(**{field: getattr(options, field) for field in fields})
    check_given(config, default)
    return config, options


def _about(recipe: Callable[[], Config]) -> list[str]:
    """Return the paragraphs of a recipe's docstring. The first one must be one line."""
    return (inspect.getdoc(recipe) or "").split("\n\n")


def _check_resume(options: Sequence[str]) -> None:
    """Check that --resume after a recipe has no value."""
    for word, following in itertools.pairwise([*options, "-"]):
        name, equals, value = word.partition("=")
        if name == "--resume" and (equals or not following.startswith("-")):
            _refuse_value(value if equals else following)


def _refuse_value(run: str) -> NoReturn:
    raise UserError(
        f"To resume a run with its own options: {runs.resuming(Path(run or 'RUN'))}. After a "
        "recipe, --resume takes no value: it resumes the run in --output."
    )


def _stretched(default: Config, argv: Sequence[str]) -> tuple[Config, list[str]]:
    """Return the recipe's configuration with the schedule that `--epochs` asks for, and
    the other options.
    """
    options: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name == EPOCHS:
            epochs = _epochs(value if equals else next(words, ""))
            default = dataclasses.replace(default, schedule=default.schedule.over(epochs))
        elif difflib.get_close_matches(name, [EPOCHS], cutoff=0.9):
            raise UserError(f"Unknown option {name}. Did you mean {EPOCHS}?")
        else:
            options.append(word)
    others = [name for name in LENGTHS if name in {word.partition("=")[0] for word in options}]
    if others and len(options) < len(argv):
        raise UserError(
            f"{EPOCHS} says how long the run is, and so does {' with '.join(others)}. Give one of "
            "them."
        )
    return default, options


def _epochs(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise UserError(f"--epochs takes a positive number. Received: {text!r}")


def _train_one_of_several(recipe: str, config: Config, logs: bool) -> None:
    """Train a run. With `logs`, its messages are written to RUN.log."""
    with contextlib.ExitStack() as stack:
        if logs and config.output is not None:
            disk.make(config.output.parent)
            log = config.output.with_name(f"{config.output.name}.log").open("a", buffering=1)
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(log)))
        train(config, recipe)


if __name__ == "__main__":
    recipe, options, logs = json.loads(sys.argv[1])
    cli.guard(lambda: _train_one_of_several(recipe, from_json(Config, options), logs))
