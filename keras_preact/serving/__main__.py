"""The server's command: `keras-preact serve saved_models --port 8501`."""

import argparse
import asyncio
import dataclasses
import difflib
import gc
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from keras_preact.serving.engines import ENGINES
from keras_preact.serving.settings import Settings

if TYPE_CHECKING:
    from starlette.applications import Starlette

PROGRAM = "keras-preact serve"
TOKEN_VARIABLE = "KERAS_PREACT_TOKEN"
# What closing the models and Python itself may take, over the time to drain.
END_SECONDS = 10.0


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the description as it is written."""


def parser(examples: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the command's options: one for each of the settings."""
    description = "Serve exported models over HTTP: TensorFlow Serving's REST API, the Open Inference Protocol, and a page at /."
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} DIRECTORY [OPTIONS]",
        description="\n".join(
            [
                *(["Examples:", *(f"  {line}" for line in examples), ""] if examples else []),
                description,
            ]
        ),
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "directory",
        metavar="DIRECTORY",
        type=Path,
        help="folder of models: DIRECTORY/NAME/VERSION/saved_model.pb",
    )
    listen = parser.add_argument_group("address")
    listen.add_argument(
        "--host",
        default=Settings.host,
        metavar="ADDRESS",
        help="address to listen on; 0.0.0.0 accepts other machines",
    )
    listen.add_argument(
        "--port",
        type=int,
        default=Settings.port,
        metavar="N",
        help="port to listen on; 0 takes a free one and prints it",
    )
    listen.add_argument(
        "--token-file",
        type=Path,
        metavar="PATH",
        default=argparse.SUPPRESS,
        help=f"file with the token that clients must send (or set the environment variable {TOKEN_VARIABLE})",
    )
    models = parser.add_argument_group("models")
    models.add_argument(
        "--engine",
        choices=sorted(ENGINES),
        default=Settings.engine,
        help="runtime that computes the networks",
    )
    models.add_argument(
        "--versions",
        type=_count_or_all,
        default=Settings.versions,
        metavar="N",
        help="serve each model's N highest versions, or all",
    )
    models.add_argument(
        "--poll-seconds",
        type=float,
        default=Settings.poll_seconds,
        metavar="S",
        help="seconds between two looks for new versions",
    )
    models.add_argument(
        "--threads",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="threads of a computation (default: one per core)",
    )
    batches = parser.add_argument_group("batches")
    batches.add_argument(
        "--max-batch-size",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="largest batch (default: the largest that the model was exported for)",
    )
    batches.add_argument(
        "--batch-wait-ms",
        type=float,
        default=Settings.batch_wait_ms,
        metavar="MS",
        help="how long an image waits for others, in milliseconds",
    )
    batches.add_argument(
        "--batching",
        action=argparse.BooleanOptionalAction,
        default=Settings.batching,
        help="compute images of several requests in one batch",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-queue",
        type=int,
        default=Settings.max_queue,
        metavar="N",
        help="images that may wait, per model",
    )
    limits.add_argument(
        "--max-body-bytes",
        type=int,
        default=Settings.max_body_bytes,
        metavar="N",
        help="largest request body",
    )
    limits.add_argument(
        "--max-pending-bytes",
        type=int,
        default=Settings.max_pending_bytes,
        metavar="N",
        help="request bodies held in memory, in bytes",
    )
    limits.add_argument(
        "--max-requests",
        type=int,
        default=Settings.max_requests,
        metavar="N",
        help="requests at the same time",
    )
    seconds = {
        "deadline": "seconds until a request is answered with 503",
        "body": "seconds that a client may take to send a body",
        "header": "seconds that a client may take to send headers, and that a connection may be idle",
        "drain": "seconds that running requests have to finish when the server stops",
    }
    for name, what in seconds.items():
        default = getattr(Settings, f"{name}_seconds")
        limits.add_argument(
            f"--{name}-seconds", type=float, default=default, metavar="S", help=what
        )
    return parser


def settings(arguments: Sequence[str] | None = None, examples: Sequence[str] = ()) -> Settings:
    """Return the settings from command-line arguments; a mistake ends the process with
    status 2 and one line.
    """
    found, unknown = parser(examples).parse_known_args(arguments)
    if unknown:
        options = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Settings)]
        options[options.index("--token")] = (
            "--token-file"  # a token on the command line could be read by others
        )
        near = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
        _fail(
            f"unknown option {unknown[0]}.{f' Did you mean {near[0]}?' if near else ''} {PROGRAM} "
            "--help lists the options."
        )
    given = vars(found)
    token_file = given.pop("token_file", None)
    try:
        if token_file is not None:
            given["token"] = token_file.read_text(encoding="utf-8").strip()
        elif TOKEN_VARIABLE in os.environ:
            given["token"] = os.environ[TOKEN_VARIABLE].strip()
        told = Settings(**given)
        if not told.directory.is_dir():
            raise ValueError(f"`directory` must be a folder of models. Received: {told.directory}")
    except (OSError, UnicodeError, ValueError) as error:
        _fail(str(error))
    return told


def main(arguments: Sequence[str] | None = None, examples: Sequence[str] = ()) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        arguments: Command line. Default: that of this process.
        examples: Lines for the help text.
    """
    told = settings(arguments, examples)
    try:
        import prometheus_client

        from keras_preact.serving import app, logs
        from keras_preact.serving.server import bind
    except ModuleNotFoundError as error:
        _fail(
            f"serving needs {(error.name or '').partition('.')[0]}: pip install "
            "'keras-preact[serving]'"
        )
    try:
        bound = bind(told.host, told.port)
    except OSError as error:
        _fail(f"cannot listen on {told.host} port {told.port}: {error.strerror or error}")
    logs.configure()
    prometheus_client.disable_created_metrics()  # they double the series, and nothing reads them
    address, port = bound.getsockname()[:2]
    if told.token is None and not ipaddress.ip_address(address).is_loopback:
        print(
            f"Warning: no token is set: everybody who can reach {address} can use this server. "
            "Set one with --token-file.",
            file=sys.stderr,
            flush=True,
        )
    asyncio.run(
        _serve(
            app.create_app(told),
            told,
            bound,
            f"http://{f'[{address}]' if ':' in address else address}:{port}",
        )
    )


async def _serve(app: "Starlette", told: Settings, bound: socket.socket, address: str) -> None:
    from keras_preact.serving.server import Server

    repository = app.state.repository

    def ready() -> None:
        # models and libraries stay: the collector need not look at them again and again
        gc.freeze()
        models = []
        for name in repository.names():
            versions = [
                str(one.version) for one in repository.status(name) if one.state == "AVAILABLE"
            ]
            models.append(f"{name} {'+'.join(versions) or '(not available)'}")
        print(f"Serving at {address}: {', '.join(models) or 'no models yet'}", flush=True)

    def stopping() -> None:
        # A computation that hangs in a thread would keep the process for ever.
        end = threading.Timer(told.drain_seconds + END_SECONDS, os._exit, [1])
        end.daemon = True
        end.start()

    await Server(app, told, ready, stopping).serve(sockets=[bound])


def _count_or_all(text: str) -> int | None:
    return None if text == "all" else int(text)


def _fail(message: str) -> NoReturn:
    print(f"{PROGRAM}: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
