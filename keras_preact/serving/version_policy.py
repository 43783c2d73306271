"""Which versions of a model are served, and under which labels: `version_policy.json` in
the model's folder, in the words of TensorFlow Serving's model configuration.

    {"model_version_policy": {"specific": {"versions": [3, 5]}},
     "version_labels": {"stable": 3, "canary": 5}}
"""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, TypeVar

import pydantic
from pydantic import Field

FILE = "version_policy.json"

T = TypeVar("T")

_Version = Annotated[int, Field(ge=0)]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


class _Latest(_Strict):
    num_versions: Annotated[int, Field(gt=0)] = 1


class _Specific(_Strict):
    versions: Annotated[list[_Version], Field(min_length=1)]


class _Choice(_Strict):
    latest: _Latest | None = None
    specific: _Specific | None = None
    all: _Strict | None = None

    @pydantic.model_validator(mode="after")
    def _check_one(self):
        if len(self.model_fields_set) != 1:
            raise ValueError("it must hold one of latest, specific and all")
        return self


class Policy(_Strict):
    """A version policy. Without a choice, that of the server's settings counts."""

    model_version_policy: _Choice | None = None
    version_labels: dict[str, _Version] = {}

    def select(self, versions: dict[int, T], highest: int | None) -> tuple[dict[int, T], int]:
        """Return the versions that may be served, and how many of them, the highest first.

        Args:
            versions: What there is.
            highest: The number without a choice; None: all.
        """
        choice = self.model_version_policy
        if choice and choice.specific:
            versions = {n: one for n, one in versions.items() if n in choice.specific.versions}
            return versions, len(versions)
        if choice:
            highest = choice.latest.num_versions if choice.latest else None
        return versions, len(versions) if highest is None else highest


def read(file: Path, versions: Collection[int]) -> Policy:
    """Return the policy in a file, or the default if there is none.

    Raises:
        OSError: if it cannot be read, is none, or chooses none of these versions.
    """
    try:
        policy = Policy.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return Policy()
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise OSError(f"{place}: {first['msg']}") from None
    if not policy.select(dict.fromkeys(versions), None)[0]:
        raise OSError(f"it chooses none of the versions {sorted(versions)}")
    return policy
