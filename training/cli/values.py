"""The values of options: how a help text shows them, and how they are read."""

import contextlib
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from ..errors import nearest

T = TypeVar("T")

#: What a help text shows for the values of a type.
PLACEHOLDERS: Mapping[Any, str] = {int: "NUMBER", float: "NUMBER", str: "TEXT", Path: "PATH"}
#: What an error says that a value must be.
CALLED: Mapping[Any, str] = {int: "a whole number", float: "a number"}
#: Defaults that a help text writes in other words, or not at all.
DEFAULTS: Mapping[str, str] = {
    "None": "",
    "": "",
    "''": "",
    "True": "(default: on)",
    "False": "(default: off)",
}


def parse(kind: Callable[..., T], **options: Any) -> T:
    """Return what `tyro.cli` returns, by the rules of this module."""
    return tyro.cli(
        kind if isinstance(kind, type) else _with_plain_help(kind),
        config=(tyro.conf.PositionalMetavarFromFieldName, tyro.conf.DisallowNone),
        registry=_rules(),
        **options,
    )


def _with_plain_help(function: Callable[..., T]) -> Callable[..., T]:
    """Return a function whose help text has the defaults in the words of `DEFAULTS`, and
    descriptions without the line breaks of the code.
    """

    def call(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    hints = typing.get_type_hints(function, include_extras=True)
    call.__doc__ = (inspect.getdoc(function) or "").replace("\n        ", " ")
    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    call.__annotations__ = {name: _with_plain_default(hint) for name, hint in hints.items()}
    return call


def _rules() -> ConstructorRegistry:
    """Return the rules by which tyro treats types, in place of its own."""
    rules = ConstructorRegistry()
    asked: list[Any] = []

    @rules.primitive_rule
    def values(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        try:
            placeholder = _placeholder(info.type)
        except KeyError:  # a switch, or a part of the configuration
            return None
        return PrimitiveConstructorSpec(
            nargs=_count(info.type),
            metavar=placeholder,
            instance_from_str=functools.partial(_read, info.type),
            is_instance=lambda value: True,  # tyro's rule for unions asks, but is not used
            str_from_instance=_words,
        )

    @rules.struct_rule
    def fields(info: StructTypeInfo) -> StructConstructorSpec | None:
        if not dataclasses.is_dataclass(info.type) or info.type in asked:
            return None
        asked.append(info.type)
        spec = ConstructorRegistry.get_struct_spec(info)  # by tyro's rule
        asked.remove(info.type)
        assert isinstance(spec, StructConstructorSpec)
        return dataclasses.replace(spec, fields=tuple(map(_described, spec.fields)))

    return rules


def _described(field: StructFieldSpec) -> StructFieldSpec:
    def text() -> str:
        found = field.helptext() if callable(field.helptext) else field.helptext
        return " ".join((found or "").split())

    return dataclasses.replace(field, type=_with_plain_default(field.type), helptext=text)


def _with_plain_default(hint: Any) -> Any:
    plain = tyro.conf.arg(
        help_behavior_hint=lambda label: DEFAULTS.get(label, f"(default: {label})")
    )
    kind, *others = typing.get_args(hint) if typing.get_origin(hint) is Annotated else [hint]
    return functools.reduce(lambda found, other: Annotated[found, other], [kind, plain, *others])


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _kinds(union: Any) -> list[Any]:
    """Return the types of a union, except for that of None."""
    return [each for each in typing.get_args(union) if each is not types.NoneType]


def _placeholder(hint: Any) -> str:
    """Return what a help text shows for the values of a type.

    Raises:
        KeyError: for a type that has no rule here.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"{{{','.join(arguments)}}}"
    if origin is tuple and arguments[-1] is ...:
        return f"[{_placeholder(arguments[0])} ...]"
    if origin is tuple:
        return " ".join(map(_placeholder, arguments))
    if _is_union(hint):
        each = [_placeholder(kind) for kind in _kinds(hint)]
        return each[0] if len(each) == 1 else f"{{{','.join(one.strip('{}') for one in each)}}}"
    return PLACEHOLDERS[hint]


def _count(hint: Any) -> Any:
    """Return how many words a value has, as `PrimitiveConstructorSpec.nargs`."""
    if _is_union(hint):
        count = _count(_kinds(hint)[0])
        return count if count in (1, "*") else (1, count)  # 1: None
    if typing.get_origin(hint) is not tuple:
        return 1
    return "*" if ... in typing.get_args(hint) else len(typing.get_args(hint))


def _read(hint: Any, words: Sequence[str]) -> Any:
    """Return the value of some words.

    Raises:
        ValueError: for words that are no value of this type.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    received = " ".join(words)
    if not all(word.strip() for word in words):  # an empty path would be this folder
        raise ValueError(f"must not be empty: is a variable not set? Received: {received!r}")
    if _is_union(hint):
        return _read_one_of(hint, words)
    if origin is tuple:
        each = arguments[:1] * len(words) if ... in arguments else arguments
        if len(each) != len(words):
            raise ValueError(f"must be {len(each)} values. Received: {received}")
        return tuple(_read(kind, [word]) for kind, word in zip(each, words, strict=True))
    if origin is Literal:
        if received not in arguments:
            raise ValueError(f"unknown value {received!r}. {nearest(received, arguments)}")
        return received
    with contextlib.suppress(ValueError):
        return hint(received)
    raise ValueError(f"must be {CALLED[hint]}. Received: {received}")


def _read_one_of(union: Any, words: Sequence[str]) -> Any:
    """Return the value of some words, of the first type of a union that they fit."""
    if words == ["None"] and types.NoneType in typing.get_args(union):
        return None
    kinds = _kinds(union)
    if len(kinds) == 1:
        return _read(kinds[0], words)
    for kind in kinds:
        with contextlib.suppress(ValueError):
            return _read(kind, words)
    called = [" or ".join(typing.get_args(kind) or [CALLED[kind]]) for kind in kinds]
    raise ValueError(f"must be {' or '.join(called)}. Received: {' '.join(words)}")


def _words(value: Any) -> list[str]:
    """Return the words of a value, as a person types it."""
    if isinstance(value, tuple):
        return [word for each in value for word in _words(each)]
    return [f"{value:.12g}" if isinstance(value, float) else str(value)]
