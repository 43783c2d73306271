"""`import keras_preact`: what comes with it, what comes later, and that saved networks load behind it."""

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

FOLDER = Path(kp.__file__).parent
INIT = ast.parse((FOLDER / "__init__.py").read_text())
#: Modules with registered classes that wait until they are asked for: their classes need a package that is optional.
OPTIONAL = {"keras_preact.hub"}


def fresh(code: str, *arguments: object):
    """Run code in a new process on this backend; return what its last line prints, as JSON."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=FOLDER.parent)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_brings_no_backend_that_keras_does_not():
    added = fresh(
        "import json, sys, keras; before = set(sys.modules); import keras_preact; "
        "added = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(json.dumps(sorted(added - set(sys.stdlib_module_names))))"
    )
    assert added == ["keras_preact"]


def test_modules_that_come_later_are_not_there_at_first():
    later = {name: f"keras_preact.{name}" for name in kp._LATER if name.islower()}
    code = (
        "import json, sys, keras_preact as kp; before = set(sys.modules)\n"
        "found = {name: getattr(kp, name).__name__ for name in sys.argv[1:]}\n"
        "print(json.dumps([sorted(before), found]))"
    )
    needless = {"hub"}  # needs keras_hub
    asked = [name for name in later if name not in needless]
    before, found = fresh(code, *asked)
    assert not {module for module in before if module in later.values()}
    assert found == {name: later[name] for name in asked}


def test_every_registered_class_comes_with_the_package():
    modules = set()
    for path in FOLDER.rglob("*.py"):
        decorators = [
            ast.unparse(decorator)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
            for decorator in node.decorator_list
        ]
        if any("register_keras_serializable" in decorator for decorator in decorators):
            modules.add(".".join(path.relative_to(FOLDER.parent).with_suffix("").parts).removesuffix(".__init__"))
    assert "keras_preact.units" in modules
    loaded = fresh("import json, sys, keras_preact; print(json.dumps(sorted(sys.modules)))")
    assert modules - OPTIONAL <= set(loaded)


NETWORKS = {
    "images": lambda: kp.create_model("digits_resnet8_preact", width_factor=0.25),
    "stacked": lambda: kp.create_model("digits_resnet8_preact", width_factor=0.25, stacked=True),
    "gated": lambda: kp.create_model("digits_resnet8_preact", width_factor=0.25, shortcut="exclusive_gating"),
    "original": lambda: kp.create_model("digits_resnet8_preact", width_factor=0.25, arrangement="original"),
    "vanilla": lambda: kp.models.vanilla_cnn(4, filters=4, input_shape=(8, 8, 1), classes=3),
    "dense": lambda: kp.create_model("dense_resnet6"),
    "transformer": lambda: kp.models.pre_ln_transformer(2, width=8, num_heads=2, input_shape=(8, 8, 3)),
    "unit": lambda: keras.Sequential([keras.Input((8, 8, 4)), kp.ResidualUnit(4)]),
    "stack": lambda: keras.Sequential([keras.Input((8, 8, 4)), kp.UnitStack(kp.ResidualUnit(4), 3)]),
    "optimizer": lambda: compiled(kp.create_model("dense_resnet6")),
}


def compiled(model):
    model.compile(optimizer=kp.optimizers.CoupledSGD(0.1), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_saved_networks_load_behind_the_import_alone(tmp_path):
    """A process that imports the package and asks it for nothing loads a file of every kind, with the same outputs."""
    for name, build in NETWORKS.items():
        model = build()
        x = np.random.default_rng(0).normal(size=(2, *model.input_shape[1:])).astype("float32")
        model.save(tmp_path / f"{name}.keras")
        np.savez(tmp_path / f"{name}.npz", x=x, y=keras.ops.convert_to_numpy(model(x)))
    code = (
        "import json, sys, keras_preact, keras, numpy as np\nfrom pathlib import Path\nfar = {}\n"
        "for path in Path(sys.argv[1]).glob('*.keras'):\n"
        "    model, saved = keras.saving.load_model(path), np.load(path.with_suffix('.npz'))\n"
        "    y = keras.ops.convert_to_numpy(model(saved['x']))\n"
        "    far[path.stem] = [type(model).__module__, float(np.abs(y - saved['y']).max())]\n"
        "print(json.dumps(far))"
    )
    far = fresh(code, tmp_path)
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
