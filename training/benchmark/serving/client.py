"""Sends one request again and again over connections that stay open: `python client.py
JOB`.

JOB is JSON, the result one line of JSON on stdout. With `{"answer": n}` it is a server
instead, which answers every request with n bytes: its rate is the most that the client
can measure. Only the standard library is imported, since the client shares the cores
with the server.
"""

import asyncio
import json
import math
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence

HOST = "127.0.0.1"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of `values` that at least this share of them does not exceed
    (the nearest rank).
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summarize(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50 and p99 in milliseconds."""
    return {"p50_ms": 1e3 * percentile(seconds, 0.5), "p99_ms": 1e3 * percentile(seconds, 0.99)}


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Read an HTTP message, and return its head.

    Raises:
        ConnectionError: if the connection ends first.
        ValueError: if the head does not give the length of the body.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: *(\d+)\r\n", head, re.IGNORECASE)
        if length is None:
            raise ValueError(f"The message has no Content-Length. Received: {head!r}")
        await reader.readexactly(int(length[1]))
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("The server closed a connection.") from error
    return head


async def measure(
    port: int, request: bytes, concurrency: int, seconds: float, requests: float = math.inf
) -> dict:
    """Return requests per second, their latencies, and the share of a core that this
    process took.

    Args:
        port: Port of a server on this machine.
        request: Its head and body.
        concurrency: Connections, each with one request at a time.
        seconds: After this time no further request is sent.
        requests: Largest number of requests.

    Raises:
        ConnectionError: if the server closes a connection.
        ValueError: if no request was answered with 200.
    """
    connections = [await asyncio.open_connection(HOST, port) for _ in range(concurrency)]
    latencies: list[float] = []
    refused: list[str] = []
    left = requests

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = time.perf_counter()
        writer.write(request)
        status = (await read_message(reader)).split(b"\r\n", 1)[0].decode("latin-1")
        if status.split()[1] == "200":
            latencies.append(time.perf_counter() - sent)
        else:
            refused.append(status)

    async def ask_until(end: float, *connection) -> None:
        nonlocal left
        while left > 0 and time.perf_counter() < end:
            left -= 1
            await ask(*connection)

    try:
        await asyncio.gather(*(ask(*connection) for connection in connections))  # not measured
        latencies.clear()
        refused.clear()
        start, cpu = time.perf_counter(), _cpu_seconds()
        await asyncio.gather(*(ask_until(start + seconds, *one) for one in connections))
        elapsed, cpu = time.perf_counter() - start, _cpu_seconds() - cpu
    finally:
        for _, writer in connections:
            writer.close()
        await asyncio.gather(*(one.wait_closed() for _, one in connections), return_exceptions=True)
    if not latencies:
        raise ValueError(f"No request was answered with 200. Received: {refused[0]}")
    return {
        "requests_per_second": len(latencies) / elapsed,
        **summarize(latencies),
        "requests": len(latencies),
        "refused": len(refused),
        "client_cpu_share": cpu / elapsed,
    }


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def answer(size: int, listening: Callable[[int], None]) -> None:
    """Serve on a free port, which `listening` is told, until the task is cancelled."""
    whole = f"HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n".encode() + b"x" * size

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await read_message(reader)
                writer.write(whole)
        except ConnectionError:
            writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
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
