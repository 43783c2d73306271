"""Writing a bundle: the code of this checkout, wheels and data, in pieces."""

import importlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from ... import runs
from .. import images
from ..pieces import described, limit, new_folder, write_zips
from .wheels import wheels as read_wheels

FORMAT = 1
MANIFEST = "bundle-manifest.json"
RUNNER = "run_bundle.py"
#: Data sets of every bundle: the short trials' are small.
ALWAYS = ("digits",)


def bundle(
    output: Path,
    datasets: Sequence[str] = ("cifar10",),
    data_dir: Path | None = None,
    python: str = "3.12",
    platform: str = "manylinux_2_28_x86_64",
    piece_mib: int = 55,
    wheels: Path | None = None,
) -> None:
    """Write what a machine without network needs to train trials; the arguments are the
    options of the command.
    """
    from .. import fingerprints

    below = limit(piece_mib)
    origin = {key: fingerprints.code()[key] for key in ("commit", "modified")}
    module = __package__.rpartition(".")[0]
    with new_folder(output) as folder:
        members = [("bundle.json", json.dumps(origin).encode()), *_sources(module), *_results()]
        members += [
            (f"wheels/{name}", contents) for name, contents in read_wheels(python, platform, wheels)
        ]
        written = write_zips(members, folder, "code-and-wheels", below)
        for name in dict.fromkeys((*ALWAYS, *datasets)):
            written += _archive(name, data_dir, folder, below)
        shutil.copyfile(Path(__file__).with_name(RUNNER), folder / RUNNER)
        manifest = {
            "format": FORMAT,
            **origin,
            "module": module,
            "python": python,
            "platform": platform,
        }
        runs.write_json(
            folder / MANIFEST,
            manifest | {"pieces": {path.name: described(path) for path in written}},
        )
    for path in (RUNNER, MANIFEST, *(path.name for path in written)):
        print(f"{(output / path).stat().st_size:>12,} bytes  {path}")
    print(
        f"Written: {output}. Copy all of it into one folder; there: python{python} "
        f"FOLDER/{RUNNER} --help"
    )


def _sources(module: str) -> Iterator[tuple[str, bytes]]:
    """Yield the sources of both packages, as name below the folder that holds the
    packages, and contents.
    """
    for name in ("keras_preact", module.partition(".")[0]):
        folder = Path(str(importlib.import_module(name).__file__)).parent
        for path in _source_files(folder):
            yield f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes()


def _source_files(folder: Path) -> list[Path]:
    """Return what git knows or would add, or, where it knows nothing, all that Python
    has not compiled.
    """
    command = [
        "git",
        "-C",
        str(folder),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(
            "\0"
        )
    except (OSError, subprocess.CalledProcessError):
        listed = []
    paths = [folder / name for name in listed if name] or list(folder.rglob("*"))
    return sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts)


def _results() -> Iterator[tuple[str, bytes]]:
    from ..results import RESULTS

    for path in sorted(RESULTS.rglob("*.json")):
        yield f"results/{path.relative_to(RESULTS).as_posix()}", path.read_bytes()


def _archive(name: str, data_dir: Path | None, folder: Path, below: int) -> list[Path]:
    """Write the archive of a data set, or copy it where there is one in pieces that are
    small enough.
    """
    there = images.pieces(name, data_dir) if data_dir else []
    loaded = images.load(name, data_dir)  # which checks the archive
    if there and all(path.stat().st_size < below for path in there):
        return [Path(shutil.copyfile(path, folder / path.name)) for path in there]
    return images.write_archive(loaded, folder, below)
