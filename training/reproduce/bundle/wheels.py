"""The wheels of a bundle: Keras, tyro and what they need, for another Python and
platform than this one's.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...cli import UserError

WANTED = ("keras", "tyro")
#: What the machine has, in versions that fit its drivers.
PRESENT = ("numpy", "jax", "jaxlib", "ml_dtypes", "pillow")
#: The versions that the tests run with, in a checkout.
CONSTRAINTS = Path(__file__).parents[3] / "constraints/tested.txt"


def wheels(python: str, platform: str, folder: Path | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield name and contents of each wheel, in the order of their names.

    Args:
        python: Version, such as 3.12.
        platform: Tag, such as manylinux_2_28_x86_64.
        folder: With the wheels; None: pip downloads them.

    Raises:
        UserError: where pip fails, or there is no such folder.
    """
    if folder is not None:
        if not folder.is_dir():
            raise UserError(f"--wheels must be a folder. Received: {folder}")
        yield from _read(folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        _download(python, platform, Path(temporary))
        yield from _read(Path(temporary))


def _read(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.glob("*.whl")):
        if path.name.partition("-")[0].lower() not in PRESENT:
            yield path.name, path.read_bytes()


def _download(python: str, platform: str, folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary=:all:",
        "--python-version",
        python,
    ]
    for tag in _platforms(platform):
        command += ["--platform", tag]
    if CONSTRAINTS.is_file():
        command += ["--constraint", str(CONSTRAINTS)]
    done = subprocess.run(
        [*command, "--dest", str(folder), *WANTED], capture_output=True, text=True
    )
    if done.returncode:
        told = [
            line for line in done.stderr.splitlines() if line.startswith("ERROR")
        ] or done.stderr.splitlines()[-1:]
        raise UserError(
            f"pip cannot download the wheels for Python {python} on {platform}: {' '.join(told)} "
            "Where they have been downloaded to a folder: --wheels FOLDER"
        )


def _platforms(platform: str) -> list[str]:
    """Return the tags of all wheels that run on a platform; older versions of pip take
    no more than what they are told.
    """
    if not (found := re.fullmatch(r"manylinux_2_(\d+)_(\w+)", platform)):
        return [platform]
    older = [f"manylinux_2_{minor}_{found[2]}" for minor in range(int(found[1]), 4, -1)]
    return [*older, f"manylinux2014_{found[2]}"]
