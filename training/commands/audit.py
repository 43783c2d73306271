"""Audit a network: `keras-preact audit`."""

import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from .. import cli
from ..cli.programs import answering
from ..config import DataDir, DataName
from ..errors import checking, command


def audit(
    target: Annotated[str, tyro.conf.Positional],
    /,
    images: int = 32,
    data: DataName = None,
    data_dir: DataDir = None,
    checkpoint: Literal["final", "best", "last"] = "final",
    seed: int = 0,
    trust: bool = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    verbose: bool = False,
) -> None:
    """Check a Keras model for misplaced activations and other mistakes that keep
    residual networks from training.

    Prints for each mistake what to do and what was found. The exit status is 1 if a check
    fails. The model may be functional, sequential or subclassed.
    In Python: kp.analysis.audit(model, images, labels=labels).

    Args:
        target: A .keras file of any Keras model with shortcuts, a run directory or a
            registered model, which gets new weights.
        images: Images in the batch.
        data: Data set (see `keras-preact train`). If not given: the run's own; digits
            if the input shape fits (8 x 8 x 1), else random images.
        data_dir: Directory of the data set.
        checkpoint: Network of the run: at its end, at its best epoch or at its last
            checkpoint.
        seed: Seed of new weights and random images.
        trust: Run the code that config.json of the run names: the function that loads the
            data, and your own parts of the network.
        as_json: Print all findings as JSON on stdout, and nothing else there.
        verbose: Also print the evidence: the number of each check, the places, why they
            matter and the sources.
    """
    from .analyze.specimen import chosen_data, open_specimen

    source = chosen_data(images, seed, data, data_dir)
    with answering(as_json) as answer:
        with checking():
            again = "" if trust else command("audit", target, "--trust")
            specimen = open_specimen(target, checkpoint, source, images, seed, again)
            report = specimen.audit()
        text = f"{report.text(evidence=verbose)}\n\nMeasured on {specimen.data}."
        if not verbose:
            text += " Evidence: --verbose."
        answer(text, report.to_dict() | {"measured_on": specimen.data})
    if report.worst == "FAIL":
        sys.exit(1)


def main(argv: Sequence[str]) -> None:
    cli.main("audit", audit, argv)
