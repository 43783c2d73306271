"""Write TensorFlow Serving's configuration files for a directory of models, into it.

    python -m keras_preact.export.tf_serving saved_models

Then, where TensorFlow Serving sees that directory as /models:

    tensorflow_model_server --port=8500 --rest_api_port=8501 \\
      --model_config_file=/models/models.config \\
      --model_config_file_poll_wait_seconds=60 --enable_batching \\
      --batching_parameters_file=/models/batching.config \\
      --monitoring_config_file=/models/monitoring.config

Run it again for new models, and for versions with other batch sizes.
"""

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_preact import _checks, atomic
from keras_preact.export import _directory, _warmup

#: Where the server publishes its metrics for Prometheus.
METRICS_PATH = "/monitoring/prometheus/metrics"


def write_config(
    directory: str | Path,
    *,
    base_path: str = "/models",
    versions: int | None = 1,
    batch_timeout_micros: int = 0,
    max_enqueued_batches: int = 10,
    num_batch_threads: int = 4,
) -> list[Path]:
    """Write TensorFlow Serving's configuration for all models of a directory, into the
    directory.

    - `models.config`: every model, with the versions to serve. A server that reads the
      file again (`--model_config_file_poll_wait_seconds`) finds new models; it finds
      new versions by itself.
    - `batching.config`: how images of different requests are computed together. The
      file is for all models: it allows all batch sizes of the models' cards, and the
      largest is `max_batch_size`. With a smaller one the server would refuse a
      version's warm-up requests, and not load it. Larger requests get an error.
    - `monitoring.config`: metrics for Prometheus, at `/monitoring/prometheus/metrics`.

    The same models and arguments give the same files. Each file is replaced as a whole.

    Args:
        directory: The folder of models, such as `saved_models`:
            `DIRECTORY/NAME/VERSION/saved_model.pb`.
        base_path: Where the server sees this folder: a path, or the address of a bucket
            such as `gs://bucket/models`.
        versions: Number of versions of each model to serve, the highest ones. None:
            all.
        batch_timeout_micros: Microseconds that an image waits for others when a thread
            is free. While none is free, images are batched anyway.
        max_enqueued_batches: Number of waiting batches per model. Further requests get
            an error.
        num_batch_threads: Number of batches computed at once, over all models.

    Returns:
        The paths of the three files.

    Raises:
        ValueError: if there is no model in `directory`, or an argument cannot work.

    Example:

    >>> import keras_preact as kp
    >>> kp.export.write_serving_config("saved_models", versions=2)  # doctest: +SKIP
    """
    directory = Path(directory)
    if versions is not None:
        _checks.positive_int(versions, "versions")
    _checks.positive_int(max_enqueued_batches, "max_enqueued_batches")
    _checks.positive_int(num_batch_threads, "num_batch_threads")
    if (
        isinstance(batch_timeout_micros, bool)
        or not isinstance(batch_timeout_micros, int)
        or batch_timeout_micros < 0
    ):
        raise ValueError(
            "`batch_timeout_micros` must be an integer, 0 or more. Received: "
            f"batch_timeout_micros={batch_timeout_micros!r}"
        )
    if not base_path.startswith("/") and "://" not in base_path:
        raise ValueError(
            "`base_path` must be an absolute path such as /models, or an address. Received: "
            f"base_path={base_path!r}"
        )
    models = _models(directory, versions)
    sizes = sorted(
        {size for served in models.values() for version in served for size in _batch_sizes(version)}
    )
    batching = {
        "max_batch_size": sizes[-1],
        "batch_timeout_micros": batch_timeout_micros,
        "max_enqueued_batches": max_enqueued_batches,
        "num_batch_threads": num_batch_threads,
    }
    entries = [_model(name, f"{base_path.rstrip('/')}/{name}", versions) for name in models]
    texts = {
        "batching.config": "".join(
            [f"{name} {{ value: {value} }}\n" for name, value in batching.items()]
            + [f"allowed_batch_sizes: {size}\n" for size in sizes]
        ),
        "monitoring.config": f'prometheus_config {{ enable: true path: "{METRICS_PATH}" }}\n',
        # Last, because a running server watches it.
        "models.config": f"model_config_list {{\n{''.join(entries)}}}\n",
    }
    for name, text in texts.items():
        with atomic.replacing(directory / name) as temporary:
            temporary.write_text(text, encoding="ascii")
    return [directory / name for name in texts]


def _models(directory: Path, versions: int | None) -> dict[str, list[Path]]:
    """Return the versions to serve of each model in `directory`, by name, in order."""
    models = {}
    folders = directory.iterdir() if directory.is_dir() else ()
    for folder in sorted(folders, key=lambda path: path.name):
        if folder.name.startswith(".") or not folder.is_dir():
            continue  # such as a version that is being built
        paths = [folder / str(number) for number in _directory.versions(folder)]
        paths = [path for path in paths if (path / "saved_model.pb").is_file()]
        if paths:
            models[folder.name] = paths if versions is None else paths[-versions:]
    if not models:
        hint = ""
        if _directory.versions(directory):
            parent = directory.resolve().parent
            hint = f" It looks like one model; its folder of models would be {parent}."
        raise ValueError(
            "There must be a model, NAME/VERSION/saved_model.pb, in `directory`; kp.export.save "
            f"writes them.{hint} Received: {directory}"
        )
    return models


def _batch_sizes(version: Path) -> list[int]:
    card, default = version / _directory.OWN_CARD, list(_warmup.BATCH_SIZES)
    if not card.exists():
        return default
    try:
        sizes = json.loads(card.read_text(encoding="utf-8")).get("batch_sizes") or default
        for size in sizes:
            _checks.positive_int(size, "batch_sizes")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{card} is no model card: {error}") from error
    return sizes


def _model(name: str, path: str, versions: int | None) -> str:
    policy = "all {}" if versions is None else f"latest {{ num_versions: {versions} }}"
    return (
        "  config {\n"
        f"    name: {_quoted(name)}\n"
        f"    base_path: {_quoted(path)}\n"
        '    model_platform: "tensorflow"\n'
        f"    model_version_policy {{ {policy} }}\n"
        "  }\n"
    )


def _quoted(text: str) -> str:
    """Return a string of protobuf's text format, printable ASCII."""
    plain = (
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}"
        for byte in text.encode()
    )
    return f'"{"".join(plain)}"'


def number_or_all(text: str) -> int | None:
    """Return the number in a text, None for `all`."""
    return None if text == "all" else int(text)


#: Option of the command to its type, its metavariable and its help.
OPTIONS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "base_path": (str, "PATH", "where the server sees the folder of models"),
    "versions": (number_or_all, "N", "number of versions of each model to serve, or all"),
    "batch_timeout_micros": (int, "N", "microseconds that an image waits for others"),
    "max_enqueued_batches": (int, "N", "number of waiting batches per model"),
    "num_batch_threads": (int, "N", "number of batches computed at once, over all models"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files and print their paths. If that fails, print an error and exit
    with status 2.
    """
    parser = argparse.ArgumentParser(
        prog="python -m keras_preact.export.tf_serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directory", help="the folder of models: DIRECTORY/NAME/VERSION/saved_model.pb"
    )
    parameters = inspect.signature(write_config).parameters
    for name, (kind, metavar, text) in OPTIONS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            metavar=metavar,
            default=parameters[name].default,
            help=f"{text} (%(default)s)",
        )
    try:
        paths = write_config(**vars(parser.parse_args(arguments)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(*paths, sep="\n")


if __name__ == "__main__":
    main()
