"""Every example in a docstring runs on the backend at hand, and everything public has a
docstring.
"""

import doctest
import importlib
import inspect
import pkgutil

import keras
import pytest

import keras_preact

#: Modules that import a backend, which need not be installed where another one is used.
OF_BACKENDS = {
    f"keras_preact.distribution.on_{name}": name for name in ("jax", "tensorflow", "torch")
}
MODULES = sorted(
    name
    for name in [
        "keras_preact",
        *(module.name for module in pkgutil.walk_packages(keras_preact.__path__, "keras_preact.")),
    ]
    if OF_BACKENDS.get(name) in (None, keras.backend.backend())
)
PUBLIC = [name for name in MODULES if not any(part.startswith("_") for part in name.split("."))]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(importlib.import_module(name), optionflags=flags).failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_module_says_what_it_is(name):
    assert importlib.import_module(name).__doc__


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_docstrings(name):
    module = importlib.import_module(name)
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    own = [value for value in public.values() if getattr(value, "__module__", None) == name]
    objects = [value for value in own if inspect.isclass(value) or inspect.isfunction(value)]
    # TypedDict and dataclass write a docstring of their own where there is none
    bare = [
        value.__name__
        for value in objects
        if not value.__doc__ or value.__doc__.startswith(f"{value.__name__}(")
    ]
    assert not bare


def test_there_are_examples():
    """The finder finds: the layer that the package is about has an example."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    assert any(test.examples for test in finder.find(keras_preact.ResidualUnit, "ResidualUnit"))
