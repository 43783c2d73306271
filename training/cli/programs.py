"""The results of a command for other programs: JSON on stdout, and nothing else there."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .. import disk


@contextlib.contextmanager
def answering(as_json: bool) -> Iterator[Callable[[str, Mapping[str, Any]], None]]:
    """Yield a function that prints a result, given as text and as a mapping: the text, or
    with `as_json` the mapping as JSON.

    With `as_json`, everything else that is printed in this block goes to stderr.
    """
    stdout = sys.stdout

    def answer(text: str, value: Mapping[str, Any]) -> None:
        shown = json.dumps(disk.plain(value), indent=2, default=str) if as_json else text
        print(shown, file=stdout)

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield answer
