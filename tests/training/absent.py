"""Processes in which packages are not installed, whatever this environment holds."""

import os
import subprocess
import sys
from pathlib import Path

from tests.training.commands import ROOT

#: What a machine for JAX and torch need not have.
TENSORFLOW = ("tensorflow", "tensorflow_datasets", "sklearn", "matplotlib")

# the finder of Python itself: others, such as that of training, ask it and not each other
_SITE = """
from importlib.machinery import PathFinder

_ABSENT = {packages!r}
_find = PathFinder.find_spec
def _without(name, path=None, target=None):
    return None if name.partition(".")[0] in _ABSENT else _find(name, path, target)

PathFinder.find_spec = staticmethod(_without)
"""


def run_without(
    packages: tuple[str, ...], *arguments: object, cwd: Path, backend: str
) -> subprocess.CompletedProcess:
    """Run `python ARGUMENTS` in the folder `cwd`; to it and to the processes it starts,
    these packages are not installed.
    """
    site = cwd / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE.format(packages=packages))
    environment = os.environ | {
        "KERAS_BACKEND": backend,
        "PYTHONPATH": os.pathsep.join((str(site), str(ROOT))),
    }
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
