"""Write TensorFlow Serving's configuration files for a directory of models, into it.

    python -m keras_preact.export.tf_serving saved_models

Then, where TensorFlow Serving sees that directory as /models:

    tensorflow_model_server --port=8500 --rest_api_port=8501
    --model_config_file=/models/models.config \\
      --model_config_file_poll_wait_seconds=60 --enable_batching
      --batching_parameters_file=/models/batching.config \\
      --monitoring_config_file=/models/monitoring.config

Run it again for new models, and for versions that were exported with other batch sizes.
"""

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from keras_preact.export._serving_config import write_config


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files and print their paths; end with status 2 and a sentence if they
    cannot be written.
    """
    assert __doc__
    parser = argparse.ArgumentParser(
        prog="python -m keras_preact.export.tf_serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directory", help="the folder of models: DIRECTORY/NAME/VERSION/saved_model.pb"
    )
    defaults = {
        name: value.default for name, value in inspect.signature(write_config).parameters.items()
    }
    options: dict[str, tuple[Callable[[str], Any], str, str]] = {
        "base_path": (str, "PATH", "where the server sees the folder of models"),
        "versions": (
            number_or_all,
            "N",
            "how many versions of each model are served, the highest ones; or all",
        ),
        "batch_timeout_micros": (
            int,
            "N",
            "microseconds that an image waits for others when a thread is free",
        ),
        "max_enqueued_batches": (
            int,
            "N",
            "batches that wait, for each model; what comes then ends in an error",
        ),
        "num_batch_threads": (int, "N", "batches that are computed at once, all models together"),
    }
    for name, (kind, metavar, text) in options.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=kind, metavar=metavar, default=defaults[name], help=f"{text} (%(default)s)"
        )
    try:
        paths = write_config(**vars(parser.parse_args(arguments)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(*paths, sep="\n")


def number_or_all(text: str) -> int | None:
    """Return the number that a text is, None for `all`."""
    return None if text == "all" else int(text)


if __name__ == "__main__":
    main()
