"""Commands of `keras-preact reproduce` that do not train: their options. What they need
is imported when they run.
"""

from pathlib import Path
from typing import Annotated

import tyro

from .results import RESULTS, WORK


def report(output: Path = RESULTS) -> None:
    """Write results/README.md: every published number beside ours, with pictures.

    Args:
        output: Folder of finished runs.
    """
    from . import report

    report.report(output)


def next_(
    minutes: float | None = None,
    output: Path = RESULTS,
    work: Path = WORK,
    device: str | None = None,
) -> None:
    """Print the missing run that is worth most, and its command.

    Args:
        minutes: Minutes of the device that are available. If not given: no limit.
        output: Folder of finished runs.
        work: Folder of unfinished runs.
        device: Name of the accelerator, as in the results. If not given: that of this
            machine.
    """
    from . import queue

    queue.next_(minutes, output, work, device)


def plan(output: Path = RESULTS, work: Path = WORK) -> None:
    """Write results/QUEUE.md: all missing runs, in order.

    Args:
        output: Folder of finished runs.
        work: Folder of unfinished runs.
    """
    from . import queue

    queue.plan(output, work)


def bundle(
    output: Annotated[Path, tyro.conf.Positional],
    datasets: tuple[str, ...] = ("cifar10",),
    data_dir: Path | None = None,
    python: str = "3.12",
    platform: str = "manylinux_2_28_x86_64",
    piece_mib: int = 55,
    wheels: Path | None = None,
) -> None:
    """Write code, wheels and images for a machine without network, which needs Python
    with JAX, NumPy and Pillow.

    There, with all pieces in one folder: python FOLDER/run_bundle.py table2
    --device-minutes 9

    Args:
        output: New folder.
        datasets: Data sets: cifar10, cifar100. Digits are always included.
        data_dir: Data directory of TensorFlow Datasets, or a folder with the archives
            of an earlier bundle.
        python: Version of Python on the machine.
        platform: Tag of the wheels that run on the machine.
        piece_mib: Largest size of a piece in MiB.
        wheels: Folder with the wheels. If not given: download them with pip.
    """
    from . import bundle

    bundle.bundle(output, datasets, data_dir, python, platform, piece_mib, wheels)


def pack_state(
    run_folder: Annotated[Path, tyro.conf.Positional],
    output: Annotated[Path, tyro.conf.Positional],
    piece_mib: int = 16,
) -> None:
    """Write a folder of unfinished runs in pieces that can be copied one by one.

    Args:
        run_folder: Folder of the runs, such as runs/reproduce. Nothing may write to it
            meanwhile.
        output: New folder for the pieces.
        piece_mib: Largest size of a piece in MiB.
    """
    from . import bundle

    bundle.pack_state(run_folder, output, piece_mib)


def unpack_state(
    pieces: Annotated[Path, tyro.conf.Positional], run_folder: Annotated[Path, tyro.conf.Positional]
) -> None:
    """Put the pieces of pack-state together: all of them or nothing.

    Args:
        pieces: Folder with all pieces and state.json.
        run_folder: New or empty folder for the runs.
    """
    from . import bundle

    bundle.unpack_state(pieces, run_folder)
