"""Every example in a docstring runs, and everything public has a docstring."""

import doctest
import importlib
import inspect
import pkgutil

import keras
import pytest

import keras_preact

#: All modules except those that import another backend.
MODULES = [
    "keras_preact",
    *(
        module.name
        for module in pkgutil.walk_packages(keras_preact.__path__, "keras_preact.")
        if ".distribution.on_" not in module.name or module.name.endswith(keras.backend.backend())
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(importlib.import_module(name), optionflags=flags).failed == 0


def test_public_names_have_docstrings():
    examples = 0
    for name in MODULES:
        module = importlib.import_module(name)
        assert module.__doc__, name
        examples += ">>>" in inspect.getsource(module)
        if any(part.startswith("_") for part in name.split(".")):
            continue
        for key, each in vars(module).items():
            own = getattr(each, "__module__", None) == name and not key.startswith("_")
            if own and (inspect.isclass(each) or inspect.isfunction(each)):
                # TypedDict and dataclass write a docstring if the class has none
                own = not (each.__doc__ or "(").startswith((f"{each.__name__}(", "("))
                assert own, (name, key)
    assert examples > 20
