"""Objects of users in configurations: functions, initialisers and layers that a file can
name, and others that only copies in this process can use.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import keras

from keras_preact import _checks


@dataclasses.dataclass
class Hidden:
    """Hides a value from Keras' tracking, which would count its variables as the owner's."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Specification:
    """The base class of frozen dataclasses that a configuration can hold. Their fields are
    options: numbers of NumPy become Python's.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _checks.plain(getattr(self, field.name))
            if isinstance(field.default, bool):
                _checks.flag(value, field.name)
            object.__setattr__(self, field.name, value)

    def get_config(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**config)


def from_table(value: Any, kind: type, table: Mapping[str, Any], what: str) -> Any:
    """Return the row of a table with this name, an instance of `kind`. A row that is a
    class is made without arguments. `value` may also be an instance itself, or its config.

    Raises:
        ValueError: for an unknown name; the message holds the nearest ones.
    """
    if isinstance(value, dict):  # from a serialised config
        value = keras.saving.deserialize_keras_object(value)
    if isinstance(value, kind):
        return value
    row = _checks.lookup(table, value, what)
    return row() if isinstance(row, type) else row


def name_or_config(value: Any, table: Mapping[str, Any]) -> Any:
    """Return the name of an object if it is in a table, else what `in_config` returns."""
    return next((name for name, row in table.items() if row == value), None) or in_config(value)


def in_config(value: Any) -> Any:
    """Return what a configuration holds of an object: its serialised form, or the object
    itself if Keras could not find its class or function again, as for a lambda.

    Copies in this process then share the object, and `save` says what a file needs.
    """
    is_function = isinstance(value, FunctionType)
    # an activation of Keras is a name
    serialize = keras.activations.serialize if is_function else keras.saving.serialize_keras_object
    try:
        with _without_warnings():
            config = serialize(value)
    except TypeError:  # an object without `get_config`
        return value
    if isinstance(config, dict):
        config.pop("build_config", None)  # the owner builds it
    return config if _can_be_found(config) else value


def _can_be_found(config: Any) -> bool:
    """Whether Keras finds all classes and functions that a serialised object names."""
    if isinstance(config, list | tuple):
        return all(map(_can_be_found, config))
    if not isinstance(config, dict):
        return True
    if config.keys() == {"value"}:  # the code of a lambda
        return False
    if "registered_name" in config:
        of_keras = str(config["module"]).partition(".")[0] == "keras"
        name = config["registered_name"] or config["class_name"]
        name = config["config"] if config["class_name"] == "function" else name
        if not of_keras and keras.saving.get_registered_object(name) is None:
            return False
    return all(map(_can_be_found, config.values()))


def arguments_of(layer: keras.Layer) -> dict[str, Any]:
    """Return the arguments of a copy of a layer in this process: its configuration, with
    the functions and initialisers themselves that Keras could not find again.
    """

    def own(key: str, value: Any) -> Any:
        kept = vars(layer).get(key)
        is_function = callable(kept) and not isinstance(kept, keras.Layer)
        return kept if is_function and not _can_be_found(value) else value

    with _without_warnings():
        return {key: own(key, value) for key, value in layer.get_config().items()}


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress Keras' warning that lambdas are unsafe in files."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*includes a `lambda`", UserWarning)
        yield
