"""Compiled steps that stay on disk, so that the next run of the same network on the same
machine does not compile them again.
"""

import contextlib
import hashlib
import os
import time
from pathlib import Path

from .. import backends, disk
from ..errors import UserError

#: Values of --compile-cache that are no folder.
AUTO, OFF = "auto", "off"
#: Environment variable of JAX's folder. One that a person has set stays.
JAX_FOLDER = "JAX_COMPILATION_CACHE_DIR"
#: Days after which a file that nobody has read is deleted.
KEPT_DAYS = 30


def use(choice: str) -> None:
    """Set the environment variables by which JAX, TensorFlow and PyTorch keep what they
    compile. The backend reads them when it is imported, so this must come first.

    By default only JAX gets a folder. PyTorch has one of its own. TensorFlow does not
    start with a damaged file in it, so it gets only a folder that a person names.

    Args:
        choice: Value of `--compile-cache`.

    Raises:
        UserError: for a folder that cannot be made or written.
    """
    if choice == OFF:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        return
    if choice == AUTO:
        # a home directory may be absent or read-only: then every run compiles
        with contextlib.suppress(UserError, RuntimeError):
            if JAX_FOLDER not in os.environ:
                os.environ[JAX_FOLDER] = str(_made(_default()))
        return
    folder = str(_made(Path(choice).expanduser()))
    os.environ[JAX_FOLDER] = folder
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    flags = os.environ.get("TF_XLA_FLAGS", "")
    os.environ["TF_XLA_FLAGS"] = f"{flags} --tf_xla_persistent_cache_directory={folder}".strip()


def _default() -> Path:
    """Return the folder of this package in the user's cache folder."""
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "keras-preact" / "compiled"


def _made(folder: Path) -> Path:
    """Return the part of a folder that belongs to machines like this one. Old files in it
    are deleted.

    Raises:
        UserError: for a folder that cannot be made or written.
    """
    # XLA's code for a CPU may use instructions that another one lacks, and its keys do not say
    # so: machines may share a folder
    machine = hashlib.sha256(backends.instructions().encode()).hexdigest()[:12]
    own = folder.absolute() / f"cpu-{machine}"
    disk.make(own)
    oldest = time.time() - KEPT_DAYS * 24 * 3600
    for path in own.iterdir():
        with contextlib.suppress(OSError):  # another run has just deleted it, or it is not ours
            status = path.stat()
            if path.is_file() and max(status.st_atime, status.st_mtime) < oldest:
                path.unlink()
    return own
