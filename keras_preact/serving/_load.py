"""Reads a version of a model from its folder: its card, whether the files are whole,
the functions of the SavedModel.
"""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_preact.export import _directory
from keras_preact.serving import engines
from keras_preact.serving.tensors import Signature


class LoadError(Exception):
    """A version cannot be served; the message is a sentence without a path."""


def read_card(version: Path) -> dict[str, Any]:
    """Return the card of a version, which `check_files` makes sure of.

    Raises:
        LoadError: if there is none, or it lacks what serving needs.
    """
    try:
        card = json.loads((version / _directory.OWN_CARD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(
            f"It has no {_directory.OWN_CARD.as_posix()}: only what keras_preact.export.save has "
            "written can be served."
        ) from None
    except (OSError, ValueError) as error:
        raise LoadError(
            f"Its {_directory.OWN_CARD.as_posix()} cannot be read ({type(error).__name__})."
        ) from error
    needed = {
        "classes": list,
        "signatures": dict,
        "batch_sizes": list,
        "precision": str,
        "top_k": int,
        "files": dict,
    }
    missing = [
        key
        for key, kind in needed.items()
        if not isinstance(card, dict) or not isinstance(card.get(key), kind)
    ]
    if missing:
        raise LoadError(
            f"Its model card lacks {', '.join(missing)}: export it again with this release of "
            "keras-preact."
        )
    return card


def check_files(version: Path, hashes: dict[str, str]) -> None:
    """Compare the files of a version with the hashes in its card.

    Raises:
        LoadError: if one is missing, another one, damaged, or not in the card. (Hidden
            files are nobody's business.)
    """
    found = {path.relative_to(version).as_posix() for path in version.rglob("*") if path.is_file()}
    found.discard(_directory.OWN_CARD.as_posix())
    for name in sorted(
        {name for name in found if not Path(name).name.startswith(".")} - set(hashes)
    ):
        raise LoadError(f"It holds {name}, which its model card does not know.")
    for name, expected in hashes.items():
        try:
            actual = _directory.sha256(version / name)
        except OSError as error:
            raise LoadError(f"Its {name} cannot be read ({error.strerror}).") from error
        if actual != expected:
            raise LoadError(
                f"Its {name} is damaged: the SHA-256 hash is not the one in the model card."
            )


def read_signatures(card: dict[str, Any]) -> dict[str, Signature]:
    """Return the signatures that a card describes.

    Raises:
        LoadError: if it does not describe them as it should.
    """
    try:
        return {
            name: Signature.from_card(name, described)
            for name, described in card["signatures"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise LoadError(
            "Its model card does not describe the signatures: export it again."
        ) from error


def read_signature_defs(version: Path) -> dict[str, Any]:
    """Return the SignatureDefs of a SavedModel by name, as JSON with the names that
    TensorFlow Serving gives the fields.
    """
    from google.protobuf import json_format
    from tensorflow.core.protobuf import saved_model_pb2

    model = saved_model_pb2.SavedModel.FromString((version / "saved_model.pb").read_bytes())
    return {
        name: json_format.MessageToDict(
            definition, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        for name, definition in model.meta_graphs[0].signature_def.items()
    }


def read_functions(version: Path) -> tuple[engines.Frozen, Callable | None]:
    """Return the network of a SavedModel, its weights in the graph, and its decoder of
    images, None where it has none.

    Raises:
        LoadError: if TensorFlow cannot load it, or it is another kind of SavedModel.
    """
    import tensorflow as tf

    try:
        loaded = tf.saved_model.load(str(version))
    except Exception as error:  # its errors are of many kinds, and all mean the same
        raise LoadError(
            f"TensorFlow {tf.__version__} cannot load its SavedModel ({type(error).__name__})."
        ) from error
    if not hasattr(loaded, "core"):
        raise LoadError(
            "Its SavedModel has no function `core`: export it again with this release of "
            "keras-preact."
        )
    frozen, decode = engines.freeze(loaded.core), getattr(loaded, "decode", None)
    # The variables hold every weight a second time, and they are in reference cycles.
    del loaded
    gc.collect()
    return frozen, decode
