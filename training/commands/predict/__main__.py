"""Classify image files with an exported model: `keras-preact predict`.

Needs TensorFlow and NumPy, no Keras. The model decodes the files itself, as in a
server.
"""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from ... import cli, disk
from ...cli.terminal import duration, printable
from ...errors import UserError, check_positive, command
from ...imports import networks_left_out
from . import answers
from .answers import Answer
from .conversions import Conversions
from .exported import Decoded, Exported, Refused, open_exported
from .named import Named, find

#: Files that are read and decoded at the same time. Each may hold a large image in memory.
THREADS = min(4, os.cpu_count() or 1)
#: Number of files from which on the command says at once what it does.
MANY = 100
#: Seconds between two lines about the progress.
PAUSE = 10


def predict(
    model: Annotated[Path, tyro.conf.Positional],
    images: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="IMAGE ...", help_behavior_hint="(one or more)"),
    ],
    /,
    top: int = 3,
    version: int | None = None,
    batch_size: Annotated[int, tyro.conf.arg(aliases=["--batch"])] = 32,
    output: Path | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Classify image files with an exported model, with TensorFlow alone.

    Images of another size, or with other channels, are converted. A warning says so,
    unless the model was trained on images of any size. A file that cannot be classified
    is one line on stderr; the others are classified, and the exit status is 1.

    Args:
        model: Directory of an exported model, saved_models/NAME.
        images: PNG, JPEG or WebP files, folders of them, or patterns in quotes, such as
            'photos/**/*.jpg'. A folder means the images in it at any depth, without
            hidden ones. Each file is classified once.
        top: Number of classes per image.
        version: Version of the model. If not given: the highest.
        batch_size: Images per step. More need more memory.
        output: File for the predictions, in place of a table on stdout: .csv or .json. It
            is written completely or not at all.
        as_json: Print the predictions as a JSON array on stdout, and nothing else there.
    """
    if not images:
        raise UserError(
            f"Name an exported model, then images: {command('predict', 'MODEL', 'IMAGE')}. "
            f"Received: {model}"
        )
    check_positive(top=top, batch_size=batch_size)
    if output is not None and output.suffix not in (".csv", ".json"):
        raise UserError(f"--output must end in .csv or .json. Received: {output}")
    files, others = find(images)
    pace = Pace(len(files))
    opened = open_exported(model, version)
    if others:
        _say(f"warning: The folders also hold files that are no images: {others}.")
    if opened.is_int8:
        _say(
            "warning: These are the answers of the network in float32. Those in 8 bits come from "
            f"{command('serve', model.parent, '--engine', 'openvino')}."
        )
    bad = 0
    with contextlib.ExitStack() as stack:
        writers = list(_writers(stack, output, as_json, opened.classes, top))
        for some in classified(opened, files, top, batch_size):
            for answer in some:
                if answer.error:
                    bad += 1
                    _say(f"error: Cannot classify {answer.file}: {answer.error.rstrip('.')}.")
            for write in writers:
                write(some)
            pace.add(len(some))
    if output is not None:
        done = f"{output}: {len(files) - bad:,} of {len(files):,} files were classified."
        print(f"Wrote {printable(done)}", file=sys.stderr if as_json else sys.stdout)
    if bad:
        _say(f"error: {bad:,} of {len(files):,} files could not be classified.")
        sys.exit(1)


def _writers(
    stack: contextlib.ExitStack,
    output: Path | None,
    as_json: bool,
    classes: Sequence[str],
    top: int,
) -> Iterator[answers.Write]:
    """Open what the predictions are written to, until the end of the stack."""
    disk.make_place(output, "--output")
    if output is not None:
        with networks_left_out():
            temporary = stack.enter_context(disk.replacing(output))
        # a name that is not UTF-8 has characters that no encoding has
        stream = stack.enter_context(
            temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="")
        )
        if output.suffix == ".csv":
            yield stack.enter_context(answers.as_csv(stream, min(top, len(classes))))
        else:
            yield stack.enter_context(answers.as_json(stream))
    if as_json:
        yield stack.enter_context(answers.as_json(sys.stdout))
    elif output is None:
        yield stack.enter_context(answers.as_table(sys.stdout, max(map(len, classes))))


def classified(
    model: Exported, files: Sequence[Named], top: int, batch_size: int
) -> Iterator[list[Answer]]:
    """Yield the answers for files, a batch at a time, in order. Warn in the end about
    images that were converted.

    Raises:
        UserError: for probabilities that are not finite.
    """
    conversions: Conversions | None = None
    with futures.ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, len(files), batch_size):
            some = files[start : start + batch_size]
            read = list(pool.map(functools.partial(_decoded, model), some))
            sound = [each for each in read if isinstance(each, Decoded)]
            scores = iter(model.classify(sound) if sound else ())
            ready: list[Answer] = []
            for (path, _), each in zip(some, read, strict=True):
                if isinstance(each, str):
                    ready.append(Answer(path, error=each))
                    continue
                if conversions is None:
                    conversions = Conversions(each.pixels.shape[1:], model.crops)
                conversions.add(path, each.header)
                probabilities = next(scores)
                if not np.isfinite(probabilities).all():
                    yield ready
                    raise UserError(
                        f"The probabilities for {path} are not finite: the weights in "
                        f"{model.path} are damaged."
                    )
                best = np.argsort(-probabilities, kind="stable")[:top]
                # further digits depend on the batch size
                shares = [(model.classes[i], round(float(probabilities[i]), 6)) for i in best]
                ready.append(Answer(path, shares))
            yield ready
    for sentence in conversions.sentences() if conversions else ():
        _say(f"warning: {sentence}")


def _decoded(model: Exported, named: Named) -> Decoded | str:
    """Return an image, or why there is none."""
    if named.problem:
        return named.problem
    try:
        return model.decode(named.path)
    except Refused as refused:
        return str(refused)


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


class Pace:
    """Says on stderr how far the work is: at once if there are many files, then every
    `PAUSE` seconds.

    Args:
        total: Number of files.
        clock: Returns seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic):
        self._total, self._clock, self._done = total, clock, 0
        self._said = clock()
        self._first: tuple[int, float] | None = None  # files and time after the first batch
        if total >= MANY:
            _say(f"Classifying {total:,} files.")

    def add(self, files: int) -> None:
        now = self._clock()
        self._done += files
        first, began = self._first = self._first or (self._done, now)
        if now - self._said < PAUSE or self._done == self._total:
            return
        self._said = now
        words = f"{self._done:,} of {self._total:,} files"
        if self._done > first:
            rate = (self._done - first) / (now - began)
            left = duration((self._total - self._done) / rate)
            words += f", {rate:,.0f} per second, {left} left"
        _say(words)


def main(argv: Sequence[str]) -> None:
    cli.main("predict", predict, argv)
