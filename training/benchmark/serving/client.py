"""Sends one and the same request over connections that are kept, as fast as they are
answered: `python client.py JOB`.

JOB is JSON, the result one line of JSON on stdout. With `{"answer": n}` it is a server
instead, which reads a request and answers with n bytes: what the client reaches against
it is the most that it can measure. It needs Python's own library alone, and nothing of
it is imported that takes time, because it shares the cores with the server.
"""

import asyncio
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence

HOST = "127.0.0.1"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least of `values` that at least this share of them does not exceed
    (the nearest rank).
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summarize(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50 and p99 in milliseconds."""
    return {"p50_ms": 1e3 * percentile(seconds, 0.5), "p99_ms": 1e3 * percentile(seconds, 0.99)}


class Messages:
    """Cuts what arrives on a connection into HTTP messages; of those only the head is
    kept.
    """

    def __init__(self):
        self._head = b""
        self._left = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the head of every message that is complete now."""
        while data:
            if not self._left:
                start = len(self._head)
                self._head += data
                end = self._head.find(b"\r\n\r\n", max(0, start - 3)) + 4
                if end < 4:
                    return
                data = self._head[end:]
                self._head = self._head[:end]
                self._left = content_length(self._head)
            taken = min(self._left, len(data))
            self._left -= taken
            data = data[taken:]
            if not self._left:
                head, self._head = self._head, b""
                yield head


def content_length(head: bytes) -> int:
    """Return the length of the body behind a head.

    Raises:
        ValueError: if it does not say; chunks are not read here.
    """
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    raise ValueError(f"The message has no Content-Length. Received: {head!r}")


class Connection(asyncio.Protocol):
    """Sends the request again whenever it was answered, until `load` wants no more."""

    def __init__(self, load: "Load"):
        self._load = load
        self._messages = Messages()

    def connection_made(self, transport) -> None:
        self._transport = transport

    def send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        for head in self._messages.feed(data):
            now = time.perf_counter()
            self._load.answered(head, now - self._sent)
            if self._load.wants_more(now):
                self.send()
            else:
                self._load.rest()

    def connection_lost(self, error) -> None:
        self._load.lost(error)


class Load:
    """Connections that send `request`, in phases: each begins with all of them and ends
    when all are answered.
    """

    def __init__(self, request: bytes):
        self.request = request
        self.connections: list[Connection] = []
        self.seconds: list[float] = []
        self.refused: list[str] = []

    async def connect(self, port: int, number: int) -> None:
        loop = asyncio.get_running_loop()
        self.connections = [
            (await loop.create_connection(lambda: Connection(self), HOST, port))[1]
            for _ in range(number)
        ]

    async def phase(self, until: float, requests: float) -> float:
        """Send until a time of `time.perf_counter`, or this many requests. Returns the
        seconds to the last answer.
        """
        self.seconds, self.refused = [], []
        self._until, self._requests = until, requests
        self._busy, self._sent = 0, 0
        self._over = asyncio.get_running_loop().create_future()
        start = time.perf_counter()
        for connection in self.connections:
            if self._sent < requests:
                self._busy += 1
                self._sent += 1
                connection.send()
        await self._over
        return time.perf_counter() - start

    def answered(self, head: bytes, seconds: float) -> None:
        status = head.split(b"\r\n", 1)[0].decode("latin-1")
        if " 200 " in f"{status} ":
            self.seconds.append(seconds)
        else:
            self.refused.append(status)

    def wants_more(self, now: float) -> bool:
        if now >= self._until or self._sent >= self._requests:
            return False
        self._sent += 1
        return True

    def rest(self) -> None:
        self._busy -= 1
        if not self._busy:
            self._over.set_result(None)

    def lost(self, error) -> None:
        if not self._over.done():
            self._over.set_exception(error or ConnectionError("The server closed a connection."))


async def measure(
    port: int, request: bytes, concurrency: int, seconds: float, requests: float = math.inf
) -> dict:
    """Return requests in a second, their latencies, and the share of a core that this
    process itself took.

    Args:
        port: Of a server on this machine.
        request: Its head and body.
        concurrency: Connections, each with one request at a time.
        seconds: After these no request is sent any more; what was sent is waited for.
        requests: At most.

    Raises:
        ConnectionError: if the server closes a connection.
        ValueError: if nothing was answered with 200.
    """
    load = Load(request)
    await load.connect(port, concurrency)
    await load.phase(math.inf, concurrency)  # one each: not measured
    before = _cpu_seconds()
    elapsed = await load.phase(time.perf_counter() + seconds, requests)
    cpu = _cpu_seconds() - before
    if not load.seconds:
        raise ValueError(f"No request was answered with 200. Received: {load.refused[0]}")
    return {
        "requests_per_second": len(load.seconds) / elapsed,
        **summarize(load.seconds),
        "requests": len(load.seconds),
        "refused": len(load.refused),
        "client_cpu_share": cpu / elapsed,
    }


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Answerer(asyncio.Protocol):
    """Answers every request with the same bytes."""

    def __init__(self, answer: bytes):
        self._answer = answer
        self._messages = Messages()

    def connection_made(self, transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for _ in self._messages.feed(data):
            self._transport.write(self._answer)


async def answer(size: int, listening: Callable[[int], None]) -> None:
    """Serve on a free port, which `listening` is told, until the task is cancelled."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: {size}\r\n\r\n"
    whole = head.encode() + b"x" * size
    server = await asyncio.get_running_loop().create_server(lambda: Answerer(whole), HOST, 0)
    listening(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def main() -> None:
    job = json.loads(sys.argv[1])
    if "answer" in job:
        asyncio.run(answer(job["answer"], lambda port: print(port, flush=True)))
        return
    with open(job.pop("request"), "rb") as file:
        request = file.read()
    print(json.dumps(asyncio.run(measure(request=request, **job))))


if __name__ == "__main__":
    main()
