"""The server's command: `keras-preact serve saved_models --port 8501`."""

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import io
import ipaddress
import logging
import os
import re
import signal
import sys
import threading
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

try:
    import prometheus_client
    from starlette.applications import Starlette

    from keras_preact.serving import logs, server
    from keras_preact.serving.app import create_app
    from keras_preact.serving.settings import TOKEN_VARIABLE, Settings, read
except ModuleNotFoundError as error:
    raise ImportError(f"Serving needs {error.name}: pip install 'keras-preact[serving]'") from error

logger = logging.getLogger("keras_preact.serving")

PROGRAM = "keras-preact serve"
# Settings without an option of their name. Others could read a token on the command line.
NO_OPTIONS = {"directory", "token"}
# Time to close the models and Python after the time to drain.
END_SECONDS = 10.0


def parser(examples: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the command's options, one for each field of `Settings`. Their values are
    texts; `Settings` converts and checks them.
    """
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} DIRECTORY [OPTIONS]",
        description="Serve exported models over HTTP: TensorFlow Serving's REST API, the Open "
        "Inference Protocol, and a page at /.",
        epilog="\n".join(["examples:", *(f"  {line}" for line in examples)]) if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    fields: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(Settings)}
    kinds = typing.get_type_hints(Settings)
    parser.add_argument("directory", metavar="DIRECTORY", help=fields["directory"].description)
    token = "File with the token that clients must send. Or set the environment variable "
    parser.add_argument("--token-file", type=Path, metavar="PATH", help=f"{token}{TOKEN_VARIABLE}.")
    for name, field in fields.items():
        if name in NO_OPTIONS:
            continue
        flag, kind = f"--{name.replace('_', '-')}", kinds[name]
        if kind is bool:
            help = f"{field.description} (default: {'on' if field.default else 'off'})"
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=help)
        else:
            default = "" if field.default is None else f" (default: {_shown(field.default)})"
            parser.add_argument(flag, metavar=_placeholder(kind), help=field.description + default)
    return parser


def _shown(default: Any) -> str:
    """Return a default as a person types it: 1 for 1.0."""
    return f"{default:.12g}" if isinstance(default, float) else str(default)


def _placeholder(kind: Any) -> str:
    """Return what stands for the values of a type in the help text."""
    kinds = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is typing.Literal:
        return f"{{{','.join(kinds)}}}"
    return "NUMBER" if {int, float} & {*kinds} else "TEXT"


def settings(arguments: Sequence[str] | None = None, examples: Sequence[str] = ()) -> Settings:
    """Return the settings from command-line arguments; a mistake ends the process with
    status 2 and a message.
    """
    options = vars(parser(examples).parse_args(arguments))
    try:
        if "token_file" in options:
            file = options.pop("token_file")
            with _readable(file, "`--token-file` must be a file that can be read"):
                # Other bytes than text are refused below, as a token that no header can hold.
                options["token"] = file.read_text("utf-8", errors="replace").strip()
        result = read(Settings, options)
        with _readable(result.directory, "`directory` must be a folder of models"):
            os.listdir(result.directory)
    except ValueError as error:
        _fail(re.sub("`([a-z_]+)`", _as_option, str(error)))
    return result


def _as_option(found: re.Match) -> str:
    """Return the name of a setting in an error as a person types it."""
    is_option = found[1] in {one.name for one in dataclasses.fields(Settings)} - NO_OPTIONS
    return f"`--{found[1].replace('_', '-')}`" if is_option else found[0]


@contextlib.contextmanager
def _readable(path: Path, message: str) -> Iterator[None]:
    """Turn an OSError into a ValueError with the message, the path and the reason."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{message}. Received: {path} ({error.strerror})") from error


def main(arguments: Sequence[str] | None = None, examples: Sequence[str] = ()) -> None:
    """Serve until SIGTERM or SIGINT, then end the process: with status 0, or 1 if the HTTP
    server fails.

    Args:
        arguments: Command line. Default: the command line of this process.
        examples: Lines for the help text.
    """
    chosen = settings(arguments, examples)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of models may have any characters
        sys.stdout.reconfigure(errors="backslashreplace")
    with contextlib.ExitStack() as stack:
        try:
            address = stack.enter_context(server.reserved(chosen.host, chosen.port))
        except OSError as error:
            _fail(_cannot_listen(chosen, error.strerror or error))
        prometheus_client.disable_created_metrics()  # they double the series; nothing reads them
        app = create_app(chosen)
        log = logs.configure(app.state.metrics.dropped_lines.inc)
        if chosen.token is None and not ipaddress.ip_address(address[0]).is_loopback:
            logger.warning(
                "no token is set: everybody who can reach %s can use this server. Set one with "
                "--token-file.",
                address[0],
            )
        logger.info("loading the models of %s", chosen.directory)
        try:
            asyncio.run(_serve(app, chosen, address, log))
        except server.NotListening as error:
            logger.error(_cannot_listen(chosen, error))
            log.finish(1.0)
            raise SystemExit(2) from error


async def _serve(
    app: Starlette, chosen: Settings, address: tuple[str, int], log: logs.Log
) -> NoReturn:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        stop.set()
        for number in (signal.SIGTERM, signal.SIGINT):  # a second signal ends it at once
            loop.remove_signal_handler(number)
        # A computation that hangs in a thread would keep the process running forever.
        timer = threading.Timer(chosen.drain_seconds + END_SECONDS, os._exit, [1])
        timer.daemon = True
        timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    stopping = loop.create_task(stop.wait())
    stack = contextlib.AsyncExitStack()
    start = loop.create_task(stack.enter_async_context(server.running(app, chosen, address)))
    await asyncio.wait({start, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set() and not start.done():
        _leave(log, 0)  # nobody was served yet, and a load cannot be interrupted
    serving = start.result()
    async with stack:
        # Models and libraries stay: the garbage collector need not check them each time.
        gc.freeze()
        # Requests leave no cycles, and lists of a million values would start it 1,000 times.
        gc.set_threshold(50_000, 20, 100)
        repository = app.state.repository
        models = [
            f"{name} {'+'.join(map(str, repository.available(name))) or '(not available)'}"
            for name in repository.names()
        ]
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        where = f"http://{host}:{address[1]}"
        if not stop.is_set():
            print(f"Serving at {where}: {', '.join(models) or 'no models yet'}", flush=True)
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not stop.is_set():
        logger.error("the HTTP server ended (%s). Start it again.", serving.exception())
    _leave(log, 0 if stop.is_set() else 1)


def _leave(log: logs.Log, status: int) -> NoReturn:
    """End the process now. Python would wait for threads of the HTTP server, for a load,
    and for a computation that hangs.
    """
    log.finish(1.0)
    os._exit(status)


def _cannot_listen(chosen: Settings, reason: object) -> str:
    return f"cannot listen on {chosen.host} port {chosen.port}: {reason}"


def _fail(message: str) -> NoReturn:
    print(f"{PROGRAM}: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
