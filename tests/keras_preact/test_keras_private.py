"""Keras' private names are used in one file, except for overridden methods."""

import ast
import inspect
import textwrap
from pathlib import Path

import keras
import pytest

import keras_preact as kp

ROOT = Path(kp.__file__).parent
#: Classes of Keras that the package calls or derives from.
CLASSES = (
    keras.Layer,
    keras.Model,
    keras.Variable,
    keras.KerasTensor,
    keras.callbacks.CallbackList,
    keras.layers.BatchNormalization,
    keras.layers.Conv2D,
    keras.layers.Dense,
    keras.optimizers.LossScaleOptimizer,
    keras.optimizers.Muon,
    keras.optimizers.SGD,
    keras.random.SeedGenerator,
)
#: Overridden methods, and what they need of their own class, by file.
OVERRIDDEN = {
    "layers/batch_norm.py": {"_moments", "_reduction_axes"},
    "optimizers.py": {
        *("_apply_weight_decay", "_use_weight_decay", "_get_current_learning_rate"),
        *("_learning_rate", "_iterations", "_backend_update_step", "_get_variable_index"),
        *("_update_model_variables_moving_average", "_model_variables_moving_average"),
        *("_muon_update_step", "_should_use_adamw"),
    },
}


def attributes(tree: ast.AST, *, stored: bool) -> set[str]:
    """Return the private attributes that code reads, or those that it assigns."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store) == stored
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
    }


@pytest.fixture(scope="module")
def private() -> set[str]:
    """The private names of Keras' classes."""
    names = set()
    for each in {base for cls in CLASSES for base in cls.__mro__}:
        if each.__module__.startswith("keras"):
            source = ast.parse(textwrap.dedent(inspect.getsource(each)))
            names |= {name for name in vars(each) if name.startswith("_") and name[1] != "_"}
            names |= attributes(source, stored=True)
    assert {"_flatten_layers", "_inbound_nodes", "_kernel", "_autocast"} <= names
    return names


@pytest.mark.parametrize(
    "file", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_private_names_are_in_one_file(file, private):
    place = file.relative_to(ROOT).as_posix()
    if place == "backend/keras_private.py":
        return
    tree = ast.parse(file.read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    own = functions | attributes(tree, stored=True)
    overridden = OVERRIDDEN.get(place, set())
    assert overridden <= own | attributes(tree, stored=False), "remove what is not used any more"
    assert not attributes(tree, stored=False) & private - own - overridden
