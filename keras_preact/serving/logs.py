"""The server's log: one JSON object a line, on stderr."""

import datetime
import json
import logging
import os
import queue
import threading
import time

import orjson

# What every record has; the rest is what the call passed as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}


PAUSE_SECONDS = 0.01


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
        try:
            return orjson.dumps(line, default=str).decode()
        except TypeError:  # a lone surrogate of a file's name, an integer of many bits
            return json.dumps(line, default=str)


class Log(logging.Handler):
    """Writes records as JSON lines in a thread of its own: who logs never waits for who
    reads the log. Lines beyond `capacity` that wait are dropped, and counted.

    Args:
        descriptor: File descriptor to write to.
        capacity: Most lines that wait.
    """

    def __init__(self, descriptor: int = 2, capacity: int = 10_000):
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.dropped = 0
        self._descriptor = descriptor
        self._capacity = capacity
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._taken: list[str] = []  # those that the thread writes
        # os.write and a daemon: a thread that hangs in it holds no lock, and not the process
        self._writer = threading.Thread(target=self._write, name="log", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() + len(self._taken) < self._capacity:
            self._lines.put(self.format(record) + "\n")
        else:
            self.dropped += 1

    def stop(self, seconds: float) -> None:
        """Wait until the lines are written, at most so long."""
        self._lines.put(None)
        self._writer.join(seconds)

    def _write(self) -> None:
        told = 0
        while (line := self._lines.get()) is not None:
            self._taken.append(line)
            # Others follow soon in a busy server: to wake for each takes 40 us a request.
            time.sleep(PAUSE_SECONDS)
            while not self._lines.empty() and (line := self._lines.get()) is not None:
                self._taken.append(line)
            data = "".join(self._taken).encode()
            if self.dropped > told:
                told = self.dropped
                note = {"level": "warning", "message": "log lines were dropped", "dropped": told}
                data = json.dumps(note).encode() + b"\n" + data
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:  # nobody can read it any more
                self.dropped += len(self._taken)
            self._taken.clear()
            if line is None:
                return


def configure() -> Log:
    """Send all logging of this process to stderr as JSON lines."""
    handler = Log()
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(
        logging.WARNING
    )  # what it says besides, the request lines and the command say
    return handler
