"""`import keras_preact`: what comes with it, what comes later, and that saved networks
load behind it.
"""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_preact as kp

pytestmark = pytest.mark.backend

FOLDER = Path(kp.__file__).parent
INIT = ast.parse((FOLDER / "__init__.py").read_text())
#: Modules with registered classes that wait until they are asked for: their classes need a package
#: that is optional.
OPTIONAL = {"keras_preact.hub"}


#: Imports Keras and the package, loads every .keras file of a folder, then asks for the names
#: behind it; writes what it sees.
FRESH = """
import json, sys
from pathlib import Path

import keras

keras_alone = set(sys.modules)
import keras_preact

imported = set(sys.modules)
import numpy as np

folder, *later = sys.argv[1:]
far = {}
for path in Path(folder).glob("*.keras"):
    model, saved = keras.saving.load_model(path), np.load(path.with_suffix(".npz"))
    y = keras.ops.convert_to_numpy(model(saved["x"]))
    far[path.stem] = [type(model).__module__, float(np.abs(y - saved["y"]).max())]
found = {name: getattr(keras_preact, name).__name__ for name in later}
seen = {"keras": sorted(keras_alone), "imported": sorted(imported), "far": far, "later": found}
Path(folder, "seen.json").write_text(json.dumps(seen))
"""
#: Modules that come when they are asked for, but the one that needs keras_hub.
LATER = {name: f"keras_preact.{name}" for name in kp._LATER if name.islower() and name != "hub"}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """What a new process on this backend sees that imports the package and is given
    files of networks.
    """
    folder = tmp_path_factory.mktemp("networks")
    for name, build in NETWORKS.items():
        model = build()
        x = np.random.default_rng(0).normal(size=(2, *model.input_shape[1:])).astype("float32")
        model.save(folder / f"{name}.keras")
        np.savez(folder / f"{name}.npz", x=x, y=keras.ops.convert_to_numpy(model(x)))
    command = [sys.executable, "-c", FRESH, str(folder), *LATER]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=FOLDER.parent)
    assert run.returncode == 0, run.stderr
    return json.loads((folder / "seen.json").read_text())


def test_brings_no_backend_that_keras_does_not(fresh):
    added = {name.partition(".")[0] for name in set(fresh["imported"]) - set(fresh["keras"])}
    assert added - set(sys.stdlib_module_names) == {"keras_preact"}


def test_modules_that_come_later_are_not_there_at_first(fresh):
    later = {f"keras_preact.{name}" for name in kp._LATER if name.islower()}
    assert not later & set(fresh["imported"])
    assert fresh["later"] == LATER


def test_every_registered_class_comes_with_the_package(fresh):
    modules = set()
    for path in FOLDER.rglob("*.py"):
        decorators = [
            ast.unparse(decorator)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
            for decorator in node.decorator_list
        ]
        if any("register_keras_serializable" in decorator for decorator in decorators):
            modules.add(
                ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts).removesuffix(
                    ".__init__"
                )
            )
    assert "keras_preact.units" in modules
    assert modules - OPTIONAL <= set(fresh["imported"])


NETWORKS = {
    "images": lambda: kp.create_model("digits_resnet8_preact", width_factor=0.25),
    "stacked": lambda: kp.models.resnet_cifar(
        26, width_factor=0.25, input_shape=(8, 8, 1), stacked=True
    ),
    "vanilla": lambda: kp.models.vanilla_cnn(4, filters=4, input_shape=(8, 8, 1), classes=3),
    "transformer": lambda: kp.models.pre_ln_transformer(
        2, width=8, num_heads=2, input_shape=(8, 8, 3)
    ),
    "stack": lambda: keras.Sequential(
        [keras.Input((8, 8, 4)), kp.UnitStack(kp.ResidualUnit(4), 3)]
    ),
    "optimizer": lambda: compiled(kp.create_model("dense_resnet6")),
}


def compiled(model):
    model.compile(
        optimizer=kp.optimizers.CoupledSGD(0.1),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def test_saved_networks_load_behind_the_import_alone(fresh):
    """A process that imports the package and asks it for nothing loads a file of every
    kind, with the same outputs.
    """
    far = fresh["far"]
    assert set(far) == set(NETWORKS)
    assert all(difference < 1e-4 for _, difference in far.values()), far
    assert far["images"][0] == "keras_preact.models.network"


def test_table_says_what_type_checkers_read():
    [branch] = [node for node in INIT.body if isinstance(node, ast.If)]
    assert ast.unparse(branch.test) == "TYPE_CHECKING"
    read = {
        alias.name: node.module if node.module != "keras_preact" else f"keras_preact.{alias.name}"
        for node in branch.body
        for alias in node.names
    }
    assert read == dict(kp._LATER)


def test_names():
    assert set(kp._LATER) <= set(dir(kp))
    assert callable(kp.recommend)
    assert kp.TrainingHealth is importlib.import_module("keras_preact.health").TrainingHealth
    with pytest.raises(AttributeError, match="module 'keras_preact' has no attribute 'nothing'"):
        _ = kp.nothing
    assert not hasattr(kp, "tensorflow")
