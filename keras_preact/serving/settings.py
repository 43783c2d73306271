"""The settings of a server, one for each option of the command."""

import contextlib
import dataclasses
import importlib.util
import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import Field

MIB = 2**20
TOKEN_VARIABLE = "KERAS_PREACT_TOKEN"

T = TypeVar("T")

#: An origin as browsers send it: in lower case, without a path.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:]+\]|[^/\[\]:@?#\s]+)(:\d+)?")

# Larger ones overflow in timers and in the HTTP server.
_Count = Annotated[int, Field(gt=0, le=10**12)]
_Seconds = Annotated[float, Field(gt=0, le=10**9)]


def option(default: Any, description: str) -> Any:
    """Return a field with the help text of its option."""
    return Field(default, description=description)


#: Unknown names are errors. pydantic's errors do not repeat values: one may be the token.
STRICT = pydantic.ConfigDict(extra="forbid", hide_input_in_errors=True)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Settings:
    """The settings of a server. All but `directory` have defaults that fit a small
    machine. Strings are converted to the types of the fields.

    Raises:
        ValueError: for a value that cannot work.

    Example:
        >>> Settings("saved_models", max_queue="64").max_queue
        64
    """

    directory: Path = Field(description="Folder of models: DIRECTORY/NAME/VERSION/saved_model.pb.")
    host: str = option("127.0.0.1", "Address to listen on. 0.0.0.0 accepts other machines.")
    port: Annotated[int, Field(ge=0, le=65535)] = option(
        8501, "Port to listen on. 0 takes a free one and prints it."
    )
    engine: Literal["tensorflow", "openvino"] = option(
        "tensorflow", "Runtime that computes the networks."
    )
    versions: _Count | None = option(
        1, "Number of versions of each model to serve, the highest ones, or all."
    )
    poll_seconds: _Seconds = option(1.0, "Seconds between two checks for new versions.")
    threads: Annotated[int, Field(gt=0, le=1024)] | None = option(
        None, "Threads per computation, and as many to decode images. (default: one per core)"
    )
    max_batch_size: _Count | None = option(
        None, "Largest batch. (default: the largest that the model was exported for)"
    )
    batching: bool = option(True, "Compute images of several requests in one batch.")
    max_queue: _Count = option(256, "Limit on images in progress, per version of a model.")
    max_body_bytes: _Count = option(32 * MIB, "Largest request body, in bytes.")
    max_pending_bytes: _Count = option(256 * MIB, "Limit on request bodies in memory, in bytes.")
    max_requests: _Count = option(256, "Limit on requests at the same time.")
    deadline_seconds: _Seconds = option(
        30.0, "Seconds from the last byte of a request until it is answered with 503."
    )
    body_seconds: _Seconds = option(15.0, "Seconds that a client may take to send a body.")
    header_seconds: _Seconds = option(
        10.0, "Seconds that a client may take to send headers, and that a connection may be idle."
    )
    hang_seconds: _Seconds = option(
        120.0, "Seconds for one batch. If it takes longer, the server reports that it is not live."
    )
    drain_seconds: _Seconds = option(
        30.0, "Seconds that running requests have to finish when the server stops."
    )
    allowed_hosts: str | None = option(
        None,
        "Host names that requests may use, separated by commas, or * for any. (default: local "
        "names if --host is local, else any)",
    )
    allowed_origins: str | None = option(
        None,
        "Origins of web pages that may use this server from a browser, such as "
        "https://shop.example, separated by commas, or * for any. (default: only its own page)",
    )
    access_log: Literal["requests", "all", "none"] = option(
        "requests", "What to log. all: probes and scrapes too."
    )
    open_metrics: bool = option(False, "Answer /metrics without a token, under every host name.")
    #: Clients send it as `Authorization: Bearer TOKEN`. `None`: everybody may use the server.
    token: Annotated[str, Field(pattern="^[!-~]+$")] | None = dataclasses.field(
        default=None, repr=False
    )

    @pydantic.field_validator(
        "directory", "host", "allowed_hosts", "allowed_origins", mode="before"
    )
    @classmethod
    def _is_not_empty(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        # an empty address means every address, and an empty path this folder
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"`{info.field_name}` must not be empty. Received: {value!r}")
        return value

    @pydantic.field_validator("versions", mode="before")
    @classmethod
    def _all(cls, value: Any) -> Any:
        return None if value == "all" else value

    def hosts(self) -> frozenset[str] | None:
        """Return the host names that requests may use, in lower case. None: any.

        By default a local server accepts only local names. Otherwise a web page could
        reach it under a name of its own (DNS rebinding).
        """
        if self.allowed_hosts is not None:
            names = frozenset(word.strip("[]") for word in _words(self.allowed_hosts))
            return None if "*" in names else names
        local = {"localhost", "127.0.0.1", "::1"}
        if self.host in local or self.host.startswith("127."):
            return frozenset(local | {self.host})
        return None

    def origins(self) -> list[str]:
        """Return the origins of web pages that may use the server from a browser; `["*"]`
        for all.
        """
        return _words(self.allowed_origins or "")

    @pydantic.field_validator("allowed_hosts", "allowed_origins")
    @classmethod
    def _can_be_sent(cls, value: str | None, info: pydantic.ValidationInfo) -> str | None:
        if value is None:
            return None
        is_sent, called = _SENT[str(info.field_name)]
        for word in _words(value) or [value]:
            if word != "*" and not is_sent(word):
                raise ValueError(f"`{info.field_name}` must be {called}, or *. Received: {word!r}")
        return value

    @pydantic.field_validator("engine")
    @classmethod
    def _installed(cls, value: str) -> str:
        if value == "openvino" and importlib.util.find_spec("openvino") is None:
            raise ValueError(
                "The engine 'openvino' needs OpenVINO: pip install 'keras-preact[openvino]'"
            )
        return value

    @pydantic.model_validator(mode="after")
    def _check_bytes(self):
        if self.max_pending_bytes < self.max_body_bytes:
            raise ValueError(
                f"`max_pending_bytes` must be at least max_body_bytes={self.max_body_bytes}. "
                f"Received: max_pending_bytes={self.max_pending_bytes}"
            )
        return self


def _words(text: str) -> list[str]:
    """Return the words between the commas, in lower case."""
    return [word for word in (part.strip().lower() for part in text.split(",")) if word]


def _is_host(word: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(word.strip("[]"))
        return True
    return re.fullmatch(r"[^/\[\]:@?#*,\s]+", word) is not None


#: What clients send, by setting: the check of a word, and its name in an error.
_SENT: Mapping[str, tuple[Callable[[str], object], str]] = {
    "allowed_hosts": (_is_host, "host names without a port, such as models.example"),
    "allowed_origins": (
        _ORIGIN.fullmatch,
        "origins without a path, such as https://shop.example or http://localhost:3000",
    ),
}


def read(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return the settings `kind(**values)`. If `values` have no token, the environment
    variable KERAS_PREACT_TOKEN gives it.

    Raises:
        ValueError: for a value that cannot work, in one line.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if token is not None and "token" not in values:
        if not token.strip():  # a server that should have a token must not run without one
            raise ValueError(f"{TOKEN_VARIABLE} is set, but empty. Set a token, or unset it.")
        values = {"token": token.strip()} | dict(values)
    try:
        return kind(**values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        if "error" in first.get("ctx", {}):  # from a class's own check
            raise ValueError(str(first["ctx"]["error"])) from None
        name = str(first["loc"][0])
        said = re.sub("^Input should be (.*?)(, unable to .*)?$", r" must be \1", first["msg"])
        message = f"`{name}`{said if said != first['msg'] else ': ' + said}."
        if name == "token":  # not repeated
            message = "`token` must be printable ASCII characters without spaces, at least one. "
            message += f"Received: {len(str(values[name]))} characters (not shown)."
        elif name in values:
            message += f" Received: {name}={values[name]!r}"
        raise ValueError(message) from None
