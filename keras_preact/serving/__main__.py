"""The command: `python -m keras_preact.serving saved_models --port 8501`."""

import argparse
import asyncio
import gc
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

try:
    import prometheus_client

    from keras_preact.serving import logs
    from keras_preact.serving.app import create_app
    from keras_preact.serving.engines import ENGINES
    from keras_preact.serving.server import Server, bind
    from keras_preact.serving.settings import Settings
except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    print(f"Serving needs {package}: pip install 'keras-preact[serving]'", file=sys.stderr)
    raise SystemExit(2) from None

PROGRAM = "python -m keras_preact.serving"
TOKEN_VARIABLE = "KERAS_PREACT_TOKEN"
# What closing the models and Python itself may take, over the time to drain.
END_SECONDS = 10.0


def parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Return the command's options: one for each of the settings."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Serve exported models over HTTP: TensorFlow Serving's REST API, Open Inference Protocol, a page at /.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=Path, help="the folder of models: DIRECTORY/NAME/VERSION/saved_model.pb")
    listen = parser.add_argument_group("where it listens")
    listen.add_argument("--host", default=Settings.host, help="the address; 0.0.0.0 for every machine that can reach this one")
    listen.add_argument("--port", type=int, default=Settings.port, help="the port; 0 takes a free one and prints it")
    listen.add_argument(
        "--token-file",
        type=Path,
        metavar="PATH",
        default=argparse.SUPPRESS,
        help=f"a file with the token that clients must send; the environment variable {TOKEN_VARIABLE} may hold it instead",
    )
    models = parser.add_argument_group("models")
    models.add_argument("--engine", choices=sorted(ENGINES), default=Settings.engine, help="what computes the networks")
    models.add_argument(
        "--versions",
        type=_count_or_all,
        default=Settings.versions,
        metavar="N",
        help="serve each model's N highest versions, or all",
    )
    models.add_argument(
        "--poll-seconds", type=float, default=Settings.poll_seconds, metavar="S", help="how often to look for new versions"
    )
    models.add_argument(
        "--threads",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="threads of a computation (default: one for each core)",
    )
    batches = parser.add_argument_group("batches")
    batches.add_argument(
        "--max-batch-size",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="most images computed at once (default: the most that the model was exported for)",
    )
    batches.add_argument(
        "--batch-wait-ms", type=float, default=Settings.batch_wait_ms, metavar="MS", help="how long an image waits for others"
    )
    batches.add_argument(
        "--batching",
        action=argparse.BooleanOptionalAction,
        default=Settings.batching,
        help="compute images of different requests together",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-queue", type=int, default=Settings.max_queue, metavar="N", help="most images that wait, a model"
    )
    limits.add_argument(
        "--max-body-bytes", type=int, default=Settings.max_body_bytes, metavar="N", help="largest body of a request"
    )
    limits.add_argument(
        "--max-pending-bytes", type=int, default=Settings.max_pending_bytes, metavar="N", help="most bytes of bodies at once"
    )
    limits.add_argument("--max-requests", type=int, default=Settings.max_requests, metavar="N", help="most requests at once")
    seconds = {
        "deadline": "how long an answer may take",
        "body": "how long a client may take to send a body",
        "header": "how long a client may take to send the headers, and a connection may lie idle",
        "drain": "how long requests in progress may take when the server is told to stop",
    }
    for name, what in seconds.items():
        default = getattr(Settings, f"{name}_seconds")
        limits.add_argument(f"--{name}-seconds", type=float, default=default, metavar="S", help=what)
    return parser


def settings(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> Settings:
    """Return the settings that command-line arguments ask for; what is wrong ends the process with status 2 and one line."""
    options = parser(program)
    given = vars(options.parse_args(arguments))
    token_file = given.pop("token_file", None)
    try:
        if token_file is not None:
            given["token"] = token_file.read_text(encoding="utf-8").strip()
        elif TOKEN_VARIABLE in os.environ:
            given["token"] = os.environ[TOKEN_VARIABLE].strip()
        found = Settings(**given)
        if not found.directory.is_dir():
            raise ValueError(f"`directory` must be a folder of models. Received: {found.directory}")
    except (OSError, UnicodeError, ValueError) as error:
        _fail(str(error), program)
    return found


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        arguments: The command line; by default that of this process.
        program: Its name in messages: how a person starts it.
    """
    told = settings(arguments, program)
    try:
        bound = bind(told.host, told.port)
    except OSError as error:
        _fail(f"cannot listen on {told.host} port {told.port}: {error.strerror or error}", program)
    logs.configure()
    prometheus_client.disable_created_metrics()  # they double the series, and nothing reads them
    address, port = bound.getsockname()[:2]
    if told.token is None and not ipaddress.ip_address(address).is_loopback:
        print(f"Warning: no token is set; whoever reaches {address} can use this server.", file=sys.stderr, flush=True)
    asyncio.run(_serve(told, bound, f"http://{f'[{address}]' if ':' in address else address}:{port}"))


async def _serve(told: Settings, bound: socket.socket, address: str) -> None:
    app = create_app(told)
    repository = app.state.repository

    def ready() -> None:
        gc.freeze()  # models and libraries stay: the collector need not look at them again and again
        models = []
        for name in repository.names():
            versions = [str(one.version) for one in repository.status(name) if one.state == "AVAILABLE"]
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


def _fail(message: str, program: str):
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
