"""`import keras_preact`: the modules it imports, the modules that it imports later, and files
load after it.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

FOLDER = Path(kp.__file__).parent
COMMANDS = FOLDER.parent / "training"
#: Modules that are imported at their first use, except the one that needs keras_hub.
LATER = {name: f"keras_preact.{name}" for name in kp._LATER if name != "hub"}

#: Imports Keras and the package, loads a file, then uses the names that are imported later; writes
#: which modules were imported when.
FRESH = """
import json, sys
from pathlib import Path

import keras

keras_alone = set(sys.modules)
import keras_preact

imported = set(sys.modules)
import numpy as np

folder, *later = sys.argv[1:]
model = keras.saving.load_model(Path(folder, "model.keras"))
np.save(Path(folder, "y.npy"), keras.ops.convert_to_numpy(model(np.ones((1, 8, 8, 1)))))
found = {name: getattr(keras_preact, name).__name__ for name in later}
seen = {"keras": sorted(keras_alone), "imported": sorted(imported), "later": found}
Path(folder, "seen.json").write_text(json.dumps(seen))
"""


def registering_modules():
    """Return the modules that register classes with Keras."""
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            decorators = map(ast.unparse, getattr(node, "decorator_list", ()))
            if any("register_keras_serializable" in each for each in decorators):
                parts = path.relative_to(FOLDER.parent).with_suffix("").parts
                yield ".".join(parts).removesuffix(".__init__")


def imported_names(path):
    """Return the full names that a module imports from the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def test_imports_go_down_and_use_public_names():
    """Nobody in the library imports the commands, or the server but itself. Private names
    of a package stay in it.
    """
    for path in [*FOLDER.rglob("*.py"), *COMMANDS.rglob("*.py")]:
        in_library = path.is_relative_to(FOLDER)
        package = path.relative_to(FOLDER).parts[0] if in_library else ""
        for name in imported_names(path):
            top, *inside = name.split(".")
            assert not (in_library and top == COMMANDS.name), (path, name)
            if top != FOLDER.name or inside[:1] == [package]:
                continue
            assert not (in_library and inside[:1] == ["serving"]), (path, name)
            shared = 1 if in_library else 0  # such as keras_preact._checks
            assert not any(map(is_private, inside[shared:])), (path, name)


@pytest.mark.backend
def test_a_fresh_process(tmp_path):
    model = kp.models.resnet_cifar(20, width_factor=0.25, input_shape=(8, 8, 1), stacked=True)
    harness.compiled(model, kp.optimizers.CoupledSGD(0.1))
    model.save(tmp_path / "model.keras")
    command = [sys.executable, "-c", FRESH, str(tmp_path), *LATER]
    run = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parent, check=False)
    assert run.returncode == 0, run.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    imported = set(seen["imported"])

    # it imports no other backend, and no package that Keras does not import
    added = {name.partition(".")[0] for name in imported - set(seen["keras"])}
    assert added - set(sys.stdlib_module_names) == {"keras_preact"}
    # some modules are not imported before their first use
    assert not {f"keras_preact.{name}" for name in kp._LATER} & imported
    assert seen["later"] == LATER
    # all classes are registered, except those that need an optional package
    modules = set(registering_modules())
    assert "keras_preact.units" in modules
    assert modules - {"keras_preact.hub"} <= imported
    # a file loads after the import alone
    expected = keras.ops.convert_to_numpy(model(np.ones((1, 8, 8, 1))))
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, atol=1e-4)
