"""What decides the numbers of a run, as hashes: two runs whose fingerprints are equal
differ in their seed alone.
"""

import ast
import functools
import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Sources that compute: globs below the two packages. What only reads, writes, watches or draws is
#: not among them.
LIBRARY = (
    *(
        "_[a-z]*.py",
        "arrangements.py",
        "blocks.py",
        "downsampling.py",
        "initializers.py",
        "losses.py",
        "optimizers.py",
    ),
    *(
        "schedules.py",
        "shortcuts.py",
        "squeeze_excitation.py",
        "stacks.py",
        "units.py",
        "models/*.py",
    ),
)
SCRIPTS = (
    *(
        "networks.py",
        "plans.py",
        "data/crops.py",
        "data/order.py",
        "data/statistics.py",
        "data/resident.py",
    ),
    *("reproduce/legs.py", "reproduce/on_device.py", "reproduce/run.py"),
)

#: In a tree without git: the commit that it was made from.
ORIGIN = "bundle.json"

_ROOT = Path(__file__).parents[2]


def _files() -> Iterator[tuple[str, Path]]:
    import keras_preact

    packages = (
        ("keras_preact", Path(keras_preact.__file__).parent, LIBRARY),
        ("training", Path(__file__).parents[1], SCRIPTS),
    )
    for name, folder, globs in packages:
        for path in sorted({path for glob in globs for path in folder.glob(glob)}):
            yield f"{name}/{path.relative_to(folder).as_posix()}", path


def _tree(node: Any) -> str:
    """Write a syntax tree as text that is the same on all versions of Python: what is
    empty is left out.
    """
    if isinstance(node, ast.AST):
        fields = (
            (name, getattr(node, name, None))
            for name in node._fields
            if name not in ("ctx", "kind", "type_comment")
        )
        return f"{type(node).__name__}({','.join(f'{name}={_tree(value)}' for name, value in fields if value not in (None, []))})"
    return f"[{','.join(map(_tree, node))}]" if isinstance(node, list) else repr(node)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and body
            and isinstance(body[0], ast.Expr)
        ):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                node.body = body[1:]
    return tree


@functools.cache
def source() -> str:
    """Return the SHA-256 of the sources that compute; comments, docstrings and layout
    do not count.
    """
    digest = hashlib.sha256()
    for name, path in _files():
        digest.update(
            f"{name}\n{_tree(_without_docstrings(ast.parse(path.read_text(encoding='utf-8'))))}\n".encode()
        )
    return digest.hexdigest()


@functools.cache
def code() -> dict[str, Any]:
    """Return `fingerprint`, that of `source`, the git `commit`, and whether the tree
    was `modified` since.

    The commit is None where neither git nor the file `ORIGIN` knows it.
    """
    return {"fingerprint": source(), **_origin()}


def _origin() -> dict[str, Any]:
    try:
        if (_ROOT / ".git").exists():
            status = _git(
                "status", "--porcelain", "--untracked-files=no", "--", "keras_preact", "training"
            )
            return {"commit": _git("rev-parse", "HEAD"), "modified": bool(status)}
        known = json.loads((_ROOT / ORIGIN).read_text())
        return {"commit": known["commit"], "modified": known["modified"]}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "modified": False}


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()
