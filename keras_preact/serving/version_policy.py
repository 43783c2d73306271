"""Read which versions of a model are served, and under which labels. The file
`version_policy.json` in the model's folder has the words of TensorFlow Serving's model
configuration.

    {"model_version_policy": {"specific": {"versions": [3, 5]}},
     "version_labels": {"stable": 3, "canary": 5}}
"""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import pydantic
from pydantic import Field

from keras_preact.export.version import HIGHEST

FILE = "version_policy.json"

_Version = Annotated[int, Field(ge=0, le=HIGHEST)]


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


class Policy(_Strict):
    """A version policy. Without a choice, the server's setting counts."""

    model_version_policy: _Choice = _Choice()
    version_labels: dict[str, _Version] = {}

    def select(self, versions: Collection[int], highest: int | None) -> tuple[set[int], int]:
        """Return the versions that may be served, and how many of the highest to serve.
        Some of them may not exist.

        Args:
            versions: Existing versions.
            highest: Number to serve if the policy has no choice. None: all.

        Raises:
            OSError: if the policy chooses in two ways.
        """
        choice = self.model_version_policy
        if len(choice.model_fields_set) > 1:
            received = ", ".join(sorted(choice.model_fields_set))
            raise OSError(f"{FILE} must hold one of latest, specific and all. Received: {received}")
        wanted = set(choice.specific.versions if choice.specific else versions)
        if choice.latest:
            highest = choice.latest.num_versions
        elif choice.model_fields_set:
            highest = None
        return wanted, len(wanted) if highest is None else highest


def read(file: Path) -> Policy:
    """Return the policy in a file, or the default if there is none.

    Raises:
        OSError: if the file cannot be read, or holds no policy.
    """
    try:
        return Policy.model_validate_json(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return Policy()
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"])) or "the whole"
        raise OSError(f"{FILE}: {location}: {first['msg']}") from None
