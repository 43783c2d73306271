"""The server's log on stderr: one JSON object per line, or plain lines on a terminal."""

import contextlib
import datetime
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable

# Attributes of every record; a call passes all others as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class JsonFormatter(logging.Formatter):
    """Writes a record's time, level, message and its `extra` values as a JSON object on
    one line.
    """

    def format(self, record: logging.LogRecord) -> str:
        written = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(
            timespec="milliseconds"
        )
        line = {"time": written, "level": record.levelname.lower(), "message": record.getMessage()}
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Writes a record as a line for people: the time, the level of a warning or an error,
    the message, and for a request what was asked and how it was answered.
    """

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        text = level + record.getMessage()
        values = vars(record)
        if "method" in values:
            text = "{method} {path}: {status}, {ms:.1f} ms".format_map(values)
            # a path may hold the codes that move a terminal's cursor or change its colours
            text = _CONTROL.sub(lambda code: f"\\x{ord(code[0]):02x}", text)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {text}"


class Log(logging.Handler):
    """Writes records in a thread of its own, so that the server never waits for the reader
    of the log. If `capacity` lines wait, new ones are dropped.

    Args:
        formatter: Writes a record as text.
        descriptor: File descriptor to write to.
        capacity: Largest number of waiting lines.
        dropped: Called for each line that is dropped.
    """

    def __init__(
        self,
        formatter: logging.Formatter,
        descriptor: int = 2,
        capacity: int = 10_000,
        dropped: Callable[[], None] = lambda: None,
    ):
        super().__init__()
        self.setFormatter(formatter)
        self._dropped = dropped
        self._descriptor = descriptor
        self._lines: queue.Queue[str] = queue.Queue(capacity)
        # os.write in a daemon thread: if it hangs, it holds no lock and the process can end
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self._dropped()

    def finish(self, seconds: float) -> None:
        """Wait until the lines are written, for at most `seconds`."""
        end = time.monotonic() + seconds
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)

    def _write(self) -> None:
        while True:
            lines = [self._lines.get()]
            # In a busy server others follow soon. Waking for each takes 40 us per request.
            time.sleep(0.01)
            with contextlib.suppress(queue.Empty):
                while len(lines) < 1000:
                    lines.append(self._lines.get_nowait())
            data = "".join(lines).encode(errors="backslashreplace")  # names may be no text
            with contextlib.suppress(OSError):  # nobody can read the log any more
                while data:
                    data = data[os.write(self._descriptor, data) :]
            for _ in lines:
                self._lines.task_done()


def configure(dropped: Callable[[], None]) -> Log:
    """Send all logging of this process to stderr: for people on a terminal, else as JSON."""
    handler = Log(TextFormatter() if os.isatty(2) else JsonFormatter(), dropped=dropped)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    return handler
