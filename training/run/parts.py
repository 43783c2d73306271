"""Networks and parts of networks that a person wrote: `--model.name MODULE:FUNCTION`, and
MODULE:OBJECT for arrangement, shortcut and block.
"""

import contextlib
import dataclasses
import inspect
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_preact import shortcuts
from keras_preact.arrangements import Arrangement
from keras_preact.blocks import Block
from keras_preact.classifiers import PROBABILITIES
from keras_preact.compiled import outputs_of
from keras_preact.shortcuts import Shortcut

from .. import config as options
from .. import functions
from ..config import Model
from ..errors import UserError, lookup

#: Class of a part and its names in the library, by option of --model.
PARTS: Mapping[str, tuple[type, Any]] = {
    "arrangement": (Arrangement, options.Arrangement),
    "shortcut": (Shortcut, options.Shortcut),
    "block": (Block, options.Block),
}
#: Arguments of every builder that a run sets, and those with which a registered network would have
#: other outputs than logits of the classes, or another name.
OF_THE_IMAGES = ("classes", "input_shape", "data_format", "mean", "std")
FIXED = (*OF_THE_IMAGES, "include_preprocessing", "include_top", "classifier_activation", "name")


def arguments(model: Model) -> dict[str, Any]:
    """Return the options of --model that are given, as arguments of a builder: objects of
    a person in place of their names.

    Raises:
        UserError: for a part that does not exist or is of another kind, and for an argument
            that a run sets itself.
    """
    fixed = OF_THE_IMAGES if functions.is_own(model.name) else FIXED
    for text in model.options:
        name, _ = options.read_option(text)
        if name in fixed:
            raise UserError(
                f"--model.options cannot set {name}: a run sets it itself, for its images and "
                f"classes. Received: {text}"
            )
    given = model.overrides()
    for option, (kind, names) in PARTS.items():
        value = getattr(model, option)
        if value is None:
            continue
        if functions.is_own(value):
            given[option] = _part(option, value, kind)
        else:
            lookup(dict.fromkeys(typing.get_args(names)), value, f"--model.{option}")
    if model.shortcut_options:
        given["shortcut"] = _with_options(given.get("shortcut"), model.shortcut_options)
    return given


def _with_options(given: str | Shortcut | None, texts: Sequence[str]) -> Shortcut:
    """Return the shortcut with options that are given as NAME=VALUE."""
    if given is None:
        raise UserError(
            f"--model.shortcut-options needs --model.shortcut. Received: {' '.join(texts)}"
        )
    shortcut = shortcuts.get(given)
    own = {field.name for field in dataclasses.fields(shortcut) if field.init}
    changes: dict[str, Any] = {}
    for text in texts:
        name, value = options.read_option(text)
        if name not in own:
            raise UserError(
                f"--model.shortcut-options: {type(shortcut).__name__} has "
                f"{'the options ' + ', '.join(sorted(own)) if own else 'no options'}. Received: "
                f"{text}"
            )
        before = getattr(shortcut, name)
        if isinstance(before, float) and not isinstance(value, int | float):
            raise UserError(f"--model.shortcut-options {name} takes a number. Received: {text}")
        # `none` is a word where the option takes words
        changes[name] = text.partition("=")[2] if isinstance(before, str) else value
    try:
        return dataclasses.replace(shortcut, **changes)
    except (TypeError, ValueError) as error:
        raise UserError(f"--model.shortcut-options {' '.join(texts)}: {error}") from error


def _part(option: str, name: str, kind: type) -> Any:
    part = functions.find_object(name, f"--model.{option}", f"my_parts:my_{option}")
    if isinstance(part, type) and issubclass(part, kind):
        try:
            part = part()
        except TypeError as error:
            raise UserError(
                f"--model.{option} {name} is a class that cannot be made without arguments: name "
                f"an object of it, made in {name.partition(':')[0]}.py. ({error})"
            ) from error
    if not isinstance(part, kind):
        raise UserError(
            f"--model.{option} must name an object or a subclass of {kind.__module__}."
            f"{kind.__name__}. Received: {name!r}, which is {part!r}"
        )
    return part


def builder(name: str) -> Any:
    """Return the function that `--model.name MODULE:FUNCTION` names."""
    return functions.find(name, "model.name", "my_models:build")


def build(name: str, given: Mapping[str, Any]) -> keras.Model:
    """Call a function of a person that builds a network.

    Args:
        name: The function as MODULE:FUNCTION.
        given: The arguments of the library's builders: `classes`, `input_shape`, `mean`,
            `std`, `data_format`, and the options of --model that are given. `dtype` is also
            Keras' dtype policy while the function is called, which need not take it.

    Raises:
        UserError: for a function that does not take these arguments, or returns no
            network for them.
    """
    function, dtype = builder(name), given.get("dtype")
    signature = inspect.signature(function)
    kinds = {each.kind for each in signature.parameters.values()}
    if "dtype" not in signature.parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
        given = {key: value for key, value in given.items() if key != "dtype"}
    try:
        signature.bind(**given)
    except TypeError as error:
        raise UserError(
            f"--model.name {name} is called with the arguments {', '.join(given)}: {error}. Add "
            "them to the function, or **options for those that it hands on."
        ) from error
    with _policy(dtype):
        with functions.users_code(name):
            network = function(**given)
        _check(name, network, given)
        # what a file gives: a Sequential model has other paths of weights there
        loaded = through_file(network, [name])
    loaded.set_weights(network.get_weights())
    return loaded


@contextlib.contextmanager
def _policy(dtype: str | None) -> Iterator[None]:
    """Let layers compute in a dtype policy that are made without one."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype or before)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _check(name: str, network: Any, given: Mapping[str, Any]) -> None:
    """Check that a network takes the images, and returns a logit for each class."""
    if not isinstance(network, keras.Model) or not getattr(network, "inputs", None):
        raise UserError(
            f"--model.name {name} must return a functional Keras model, or a Sequential one that "
            "begins with keras.Input. Wrap a model of another kind: keras.Model(inputs, "
            f"model(inputs)). Received: {network!r}"
        )
    shapes = [tuple(tensor.shape) for tensor in (*network.inputs, *network.outputs)]
    wanted = [(None, *given["input_shape"]), (None, given["classes"])]
    if len(shapes) != 2 or not all(map(_fits, shapes, wanted)):
        raise UserError(
            f"--model.name {name} must return a model with one input of shape {wanted[0]} and one "
            f"output of shape {wanted[1]}. Received: shapes {', '.join(map(str, shapes))}"
        )
    [output] = outputs_of(network, network.inputs)
    if output.activation in PROBABILITIES:
        raise UserError(
            f"--model.name {name} must return logits. Remove the {output.activation} at the end of "
            f"{network.name}."
        )


def _fits(shape: tuple, wanted: tuple) -> bool:
    return len(shape) == len(wanted) and all(
        size in (None, each) for size, each in zip(shape, wanted, strict=True)
    )


def through_file(network: keras.Model, names: Sequence[str]) -> keras.Model:
    """Return the network that a file of this one gives, with other weights, to know before
    the training that it can be loaded.

    Args:
        network: The network.
        names: What it has of a person, as MODULE:OBJECT.

    Raises:
        UserError: if it cannot be saved, or not loaded.
    """
    try:
        return keras.models.model_from_json(network.to_json())
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UserError(
            f"A file of this network with {', '.join(names)} could not be loaded. Register your "
            "classes and functions with keras.saving.register_keras_serializable, and give them "
            f"`get_config` if they have arguments. Keras says: {error}"
        ) from error
