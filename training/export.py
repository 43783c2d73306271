"""Export a run for serving: `python -m training.export RUN --name NAME [--option value ...]`.

Writes saved_models/NAME/VERSION, a TensorFlow SavedModel that needs no Keras, and the model card beside it. See
saved_models/README.md.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

import tyro

from training import cli


def export(
    run: Annotated[Path, tyro.conf.Positional],
    /,
    name: str,
    output: Path = Path("saved_models"),
    version: int | None = None,
    checkpoint: Literal["final", "best", "last"] = "final",
) -> None:
    """Export the network of a training run.

    Args:
        run: The run directory.
        name: Of the model; the folder in `output`.
        output: Where exported models are.
        version: A number that is not taken; by default one more than the highest.
        checkpoint: Which of the run's models.
    """
    if name != Path(name).name or name.startswith("."):
        raise cli.UserError(
            f"--name must be the name of a folder, such as digits. Received: {name!r}. For its place: --output"
        )

    import keras_preact as kp
    from training import networks, runs

    config = runs.read_config(run)
    model, path = networks.open_run(run, checkpoint)
    try:
        exported = kp.export.save(
            model,
            output / name,
            classes=config["classes"],
            preprocessing=config["preprocessing"],
            run={"directory": run.resolve().name, "checkpoint": checkpoint} | _without_places(config),
            metrics=_metrics_of(path, run),
            version=version,
        )
    except kp.export.ExportError as error:
        raise cli.UserError(str(error)) from error
    card = json.loads((exported / "assets.extra" / "model_card.json").read_text(encoding="utf-8"))
    files = [file for file in exported.rglob("*") if file.is_file()]
    largest, allowed = card["check"]["largest_difference"], card["check"]["allowed_difference"]
    print(
        f"Written: {exported}, {len(files)} files, {_size(files)} "
        f"(weights: {_size((exported / 'variables').iterdir())}, {card['parameters']['total']:,} parameters)\n"
        f"Written: {output / name / 'model_card.json'}\n"
        f"Checked with TensorFlow alone against {path}: the logits differ by up to {largest['logits']:.1e} "
        f"(allowed: {allowed['logits']:.1e}), the probabilities by {largest['probabilities']:.1e} "
        f"({allowed['probabilities']:.1e}).\n"
        f"Next: python -m training.predict {output / name} IMAGE.png"
    )


def _without_places(config: dict) -> dict:
    """Return a run's config.json for the card: without what the card holds already, and without paths of this machine."""
    own = {key: value for key, value in config.items() if key not in ("classes", "preprocessing")}
    data = config["config"]["data"] | {"dir": None}
    return own | {"config": config["config"] | {"data": data, "output": None}}


def _metrics_of(path: Path, run: Path) -> dict | None:
    """Return the run's metrics.json if it was measured on the model in `path`."""
    file = run / "metrics.json"
    metrics = json.loads(file.read_text()) if file.is_file() else {}
    if Path(metrics.get("model", "")).name == path.name:
        return {key: value for key, value in metrics.items() if key != "model"}
    print(f"The card gets no metrics: python -m training.evaluate {run} measures them before an export.")
    return None


def _size(files) -> str:
    size = sum(file.stat().st_size for file in files)
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


if __name__ == "__main__":
    cli.main(export)
