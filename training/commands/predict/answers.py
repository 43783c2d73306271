"""Write the predictions: as a table for people, as CSV or as JSON, one after another."""

import contextlib
import csv
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from ...cli.terminal import printable


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of an image file.

    Args:
        file: The file.
        predictions: The most probable classes and their probabilities.
        error: Why there are no predictions; empty if there are.
    """

    file: str
    predictions: Sequence[tuple[str, float]] = ()
    error: str = ""

    def to_dict(self) -> dict:
        """Return a dict for JSON: the keys are `file` and `predictions`, each with `class`
        and `probability`; or `file` and `error`.
        """
        if self.error:
            return {"file": self.file, "error": self.error}
        predictions = [{"class": name, "probability": p} for name, p in self.predictions]
        return {"file": self.file, "predictions": predictions}


#: Function that writes the answers for some files.
Write = Callable[[Sequence[Answer]], None]


@contextlib.contextmanager
def as_table(stream: TextIO, width: int) -> Iterator[Write]:
    """Yield a function that prints the predictions for people. `width` is the length of the
    longest class name.
    """

    def write(answers: Sequence[Answer]) -> None:
        for answer in answers:
            if not answer.error:
                print(printable(answer.file), file=stream)
                for name, probability in answer.predictions:
                    print(f"  {name:<{width}}  {100 * probability:6.2f} %", file=stream)
        stream.flush()

    yield write


@contextlib.contextmanager
def as_csv(stream: TextIO, top: int) -> Iterator[Write]:
    """Yield a function that writes a row per file: the file, the `top` classes with their
    probabilities, and the error.
    """
    rows = csv.writer(stream, lineterminator="\n")
    pairs = [f"{column}_{i + 1}" for i in range(top) for column in ("class", "probability")]
    rows.writerow(["file", *pairs, "error"])

    def write(answers: Sequence[Answer]) -> None:
        for answer in answers:
            cells = [cell for name, p in answer.predictions for cell in (name, f"{p:.6f}")]
            cells += [""] * (2 * top - len(cells))
            rows.writerow([answer.file, *cells, answer.error])

    yield write


@contextlib.contextmanager
def as_json(stream: TextIO) -> Iterator[Write]:
    """Yield a function that writes the elements of an array, each in a line."""
    before = "[\n"

    def write(answers: Sequence[Answer]) -> None:
        nonlocal before
        for answer in answers:
            stream.write(before + json.dumps(answer.to_dict()))
            before = ",\n"
        stream.flush()

    yield write
    stream.write("[]\n" if before == "[\n" else "\n]\n")
