"""Analyse a network: `keras-preact analyze`."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ... import backends, cli, disk
from ...config import DataDir, DataName
from ...directory import runs
from ...errors import checking, command


def analyze(
    target: Annotated[str, tyro.conf.Positional],
    /,
    output: Annotated[Path | None, tyro.conf.arg(aliases=["--out"])] = None,
    images: int = 32,
    data: DataName = None,
    data_dir: DataDir = None,
    checkpoint: Literal["final", "best", "last"] = "final",
    quick: bool = False,
    seed: int = 0,
    trust: bool = False,
) -> None:
    """Show how signals and gradients travel through a network, on one page (index.html)
    with pictures, numbers and the audit.

    Args:
        target: A run directory, a .keras file, or a registered model, which gets new
            weights.
        output: New folder for the results. If not given: analysis-NAME, or analysis/ in
            the run directory.
        images: Images in the batch.
        data: Data set (see `keras-preact train`). If not given: the run's data set. A
            network without a run gets digits if the input shape fits (8 x 8 x 1), else
            random images.
        data_dir: Directory of the data set.
        checkpoint: Network of the run: at its end, at its best epoch or at its last
            checkpoint.
        quick: Leave out slow parts: comparison with other variants, Eq. 4 and 5,
            lesions, Jacobian. A network that was not built with keras_preact always
            gets fewer chapters.
        seed: Seed of new weights and random images.
        trust: Run the code that config.json of the run names: the function that loads the
            data, and your own parts of the network.
    """
    import keras

    from keras_preact import atomic

    from . import specimen as opened

    source = opened.chosen_data(images, seed, data, data_dir)
    if output is None:
        is_run = (Path(target) / "config.json").is_file()
        output = Path(target) / "analysis" if is_run else Path(f"analysis-{Path(target).stem}")
    folder = runs.new_directory(output, "")
    with checking():
        again = "" if trust else command("analyze", target, "--trust")
        specimen = opened.open_specimen(target, checkpoint, source, images, seed, again)
    print(f"Analysing {specimen.name} ({keras.backend.backend()}) on {specimen.data}.", flush=True)
    disk.make(folder.parent, "--output")
    with atomic.workshop(folder.parent, f".{folder.name}-") as temporary:
        whole = temporary / folder.name
        pictures = _write(specimen, whole, quick)
        whole.replace(folder)
    print(
        f"Wrote {folder / 'index.html'} with {pictures} pictures. Numbers: "
        f"{folder / 'analysis.json'}"
    )


def _write(specimen, folder: Path, quick: bool) -> int:
    """Write everything to `folder`; return the number of pictures."""
    from . import page
    from .chapters import CHAPTERS

    (folder / "pictures").mkdir(parents=True)
    try:
        audit = specimen.audit()
        print(f"  audit: {audit.worst}: {audit.counts}", flush=True)
    except ValueError as error:
        audit = str(error)
        print(f"  audit: {audit}", flush=True)
    written = []
    left_out = {}
    summary = _summary(specimen)
    numbers = {
        "network": specimen.name,
        **summary,
        "audit": audit if isinstance(audit, str) else audit.to_dict(),
    }
    for heading, chapter in CHAPTERS.items():
        name, start = chapter.__name__, time.perf_counter()
        try:
            pictures = list(chapter(specimen, quick))
        except ValueError as error:
            left_out[heading] = str(error).rstrip(".")
            numbers[name] = {"left_out": str(error)}
            print(f"  {name}: {error}", flush=True)
            continue
        page.save(folder / "pictures", pictures)
        written.append((name, heading, pictures))
        numbers[name] = {
            key: value for picture in pictures for key, value in picture.numbers.items()
        }
        seconds = time.perf_counter() - start
        plural = "s" * (len(pictures) > 1)
        print(f"  {name}: {len(pictures)} picture{plural}, {seconds:.1f} s", flush=True)
    disk.write_json(folder / "analysis.json", disk.plain(numbers), indent=1)
    evidence = audit if isinstance(audit, str) else audit.text(evidence=True)
    (folder / "audit.txt").write_text(f"{evidence}\n", encoding="utf-8")
    text = page.render(specimen.name, summary, audit, written, left_out)
    (folder / "index.html").write_text(text, encoding="utf-8")
    return sum(len(content) for _, _, content in written)


def _summary(specimen) -> dict[str, str]:
    """Describe what was analysed and how: name to text."""
    import keras

    model = specimen.model
    name = specimen.name if specimen.is_foreign else f"{type(model).__name__} {model.name}"
    return {
        "Network": f"{name}, input {model.input_shape[1:]}, {model.count_params():,} parameters",
        "Units": str(len(getattr(model, "units", ())) or "found in the graph"),
        "Weights": specimen.weights,
        "Images": specimen.data,
        "Loss": "cross-entropy, mean over the batch",
        "Statistics of normalisation": (
            "of the batch, as in training, since the network is untrained"
            if specimen.training
            else "moving averages, as at inference; the audit uses batch statistics"
        ),
        "Software": f"Keras {keras.__version__}, {keras.backend.backend()}, {backends.device()}",
    }


def main(argv: Sequence[str] | None = None) -> None:
    cli.main("analyze", analyze, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    main()
