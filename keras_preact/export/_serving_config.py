"""`kp.export.write_serving_config`: the files that TensorFlow Serving reads besides the
models.
"""

import json
from pathlib import Path

from keras_preact import _checks
from keras_preact.export import _directory, _warmup

#: Where the server gives its numbers to Prometheus.
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

    - `models.config`: every model, with the versions that are served. A server that it
      is told to read again (`--model_config_file_poll_wait_seconds`) takes up new
      models; new versions it finds by itself.
    - `batching.config`: how images of different requests are computed together. There
      is one file for all models: the allowed batch sizes are all that a model's card
      names, and the largest of them is `max_batch_size`. A smaller one would keep
      versions from loading, whose warm-up requests it would refuse. Requests with more
      images end in an error.
    - `monitoring.config`: numbers for Prometheus, at `/monitoring/prometheus/metrics`.

    The same models and arguments give the same files. Each file is replaced as a whole.

    Args:
        directory: The folder of models, such as `saved_models`:
            `DIRECTORY/NAME/VERSION/saved_model.pb`.
        base_path: Where the server sees this folder: a path, or the address of a bucket
            such as `gs://bucket/models`.
        versions: How many versions of each model are served, the highest ones. None:
            all.
        batch_timeout_micros: Microseconds that an image waits for others when a thread
            is free. While none is, images gather anyway.
        max_enqueued_batches: Batches that wait, for each model; what comes then ends in
            an error.
        num_batch_threads: Batches that are computed at once, all models together.

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
    return _replace(
        directory,
        {
            "batching.config": "".join(
                [f"{name} {{ value: {value} }}\n" for name, value in batching.items()]
                + [f"allowed_batch_sizes: {size}\n" for size in sizes]
            ),
            "monitoring.config": f'prometheus_config {{ enable: true path: "{METRICS_PATH}" }}\n',
            # the last one, which a running server watches
            "models.config": "model_config_list {\n"
            + "".join(_model(name, f"{base_path.rstrip('/')}/{name}", versions) for name in models)
            + "}\n",
        },
    )


def _models(directory: Path, versions: int | None) -> dict[str, list[Path]]:
    """Return the versions that are served of each model in `directory`, by name, in
    order.
    """
    models = {}
    for folder in sorted(
        directory.iterdir() if directory.is_dir() else (), key=lambda path: path.name
    ):
        if folder.name.startswith(".") or not folder.is_dir():
            continue  # such as a version that is being built
        paths = [folder / str(number) for number in _directory.versions(folder)]
        paths = [path for path in paths if (path / "saved_model.pb").is_file()]
        if paths:
            models[folder.name] = paths if versions is None else paths[-versions:]
    if not models:
        hint = ""
        if _directory.versions(directory):
            hint = f" It looks like one model; its folder of models would be {directory.resolve().parent}."
        raise ValueError(
            "There must be a model, NAME/VERSION/saved_model.pb, in `directory`; kp.export.save "
            f"writes them.{hint} Received: {directory}"
        )
    return models


def _batch_sizes(version: Path) -> list[int]:
    card = version / _directory.OWN_CARD
    if not card.exists():
        return list(_warmup.BATCH_SIZES)
    try:
        sizes = json.loads(card.read_text(encoding="utf-8")).get("batch_sizes") or list(
            _warmup.BATCH_SIZES
        )
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


def _replace(directory: Path, texts: dict[str, str]) -> list[Path]:
    """Write files of these names and texts into `directory`, each of which appears
    whole.
    """
    with _directory.workshop(directory) as temporary:
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="ascii")
            _directory.sync_entry(temporary / name)
        paths = [(temporary / name).replace(directory / name) for name in texts]
        _directory.sync_entry(directory)
    return paths
