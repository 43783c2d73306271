"""A mapping that nothing changes."""

from collections.abc import Iterator, Mapping
from typing import Any


class ReadOnly(Mapping[str, Any]):
    """A read-only copy of a dictionary. Unlike a `MappingProxyType`, it can be copied and
    pickled, also as a field of a dataclass.
    """

    def __init__(self, items: Mapping[str, Any]):
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)
