"""Replaces torchvision for timm, which imports it but does not use it in its networks. CI
does not install torchvision, because its wheel fails beside another build of torch.
"""

import enum
import importlib.machinery
import sys
import types

_MODULES = (
    "torchvision",
    "torchvision.datasets",
    "torchvision.ops",
    "torchvision.ops.misc",
    "torchvision.transforms",
    "torchvision.transforms.functional",
)


class _Unusable(types.ModuleType):
    """A module that has every name. Its attributes are modules or empty classes."""

    #: timm makes a table from its members.
    InterpolationMode = enum.StrEnum(
        "InterpolationMode", "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS"
    )

    def __init__(self, name: str):
        super().__init__(name)
        self.__path__: list[str] = []
        # `importlib.util.find_spec` looks for it
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or type(name, (), {})


def import_torchvision_or_stub() -> None:
    """Import torchvision. If that fails, put unusable modules in its place."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        sys.modules.update({name: _Unusable(name) for name in _MODULES})
