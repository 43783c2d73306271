"""The commands of `keras-preact`, as a table: what each does, and examples."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Command:
    """A row of the table.

    Args:
        group: Heading in the help text.
        about: What the command does, in one line.
        examples: Command lines without the name of the program, each with a comment.
        module: Module of training/ whose `main` takes the arguments. Default: the one of
            the command's name in commands/.
    """

    group: str
    about: str
    examples: Mapping[str, str]
    module: str = ""


#: Commands by name, in the order of the help text.
COMMANDS: Mapping[str, Command] = {
    "train": Command(
        "Train and use a network",
        "Train a network by a recipe, or by the options of a run.",
        {
            "train digits": "handwritten digits, a minute on a CPU",
            "train folder_small --data.dir PHOTOS --data.test 0.2": "your images",
            "train digits --seeds 5": "five runs with different seeds, then a table",
            "train --config runs/NAME --lr 0.05": "the options of a run, and another rate",
        },
    ),
    "sweep": Command(
        "Train and use a network",
        "Train a recipe at several depths and learning rates; show the best rate at each.",
        {
            "sweep digits --rates 0.05 0.1 0.2": "a recipe at three rates, a minute per run",
            "sweep cifar10 --depths 20 56 110 --seeds 3": "five rates at three depths, three seeds",
            "sweep digits --depths 20 56 110 218 --rates 0.1": "one rate: where does it fail?",
        },
    ),
    "resume": Command(
        "Train and use a network",
        "Resume an interrupted run.",
        {
            "resume runs/NAME": "with its own options",
            "resume runs/NAME --trust": "if it uses your own functions or parts",
        },
    ),
    "evaluate": Command(
        "Train and use a network",
        "Measure accuracy on the test images, by class.",
        {
            "evaluate runs/NAME": "a run",
            "evaluate runs/NAME --checkpoint best": "its best epoch",
            "evaluate model.keras --data cifar10": "a file",
        },
        "commands.evaluate.__main__",
    ),
    "compare": Command(
        "Train and use a network",
        "Compare runs: options, accuracy, curves.",
        {
            "compare runs/A runs/B": "a table",
            "compare runs/A runs/B --output comparison": "write comparison.csv, draw the curves",
        },
    ),
    "predict": Command(
        "Train and use a network",
        "Classify image files and folders with an exported network.",
        {
            "predict saved_models/NAME photo.png": "the newest version",
            "predict saved_models/NAME photos --output photos.csv": "a folder, into a file",
            "predict saved_models/NAME 'photos/*.jpg' --json": "a pattern, for a program",
        },
        "commands.predict.__main__",
    ),
    "export": Command(
        "Put it into production",
        "Write a run's network as a SavedModel, ONNX or LiteRT file.",
        {
            "export runs/NAME --name flowers": "saved_models/flowers/1",
            "export runs/NAME --name flowers --precision bfloat16": "for AVX512_BF16 or AMX",
            "export runs/NAME --name flowers --format onnx": "saved_models/flowers.onnx",
        },
    ),
    "serve": Command(
        "Put it into production",
        "Serve exported networks over HTTP.",
        {
            "serve saved_models": "http://127.0.0.1:8501",
            "serve saved_models --engine openvino": "faster, most of all in 16 and 8 bits",
            "serve saved_models --host 0.0.0.0 --token-file token": "for other machines",
        },
    ),
    "analyze": Command(
        "Understand it",
        "Show how signals travel through a network, on one page.",
        {
            "analyze runs/NAME": "a trained network",
            "analyze cifar_resnet110_preact --quick": "a new one",
            "analyze model.keras --data cifar10": "a file",
        },
        "commands.analyze.__main__",
    ),
    "audit": Command(
        "Understand it",
        "Check any Keras model for misplaced activations and other mistakes.",
        {
            "audit model.keras": "a file of any Keras model with shortcuts",
            "audit runs/NAME": "a run, on its own images",
            "audit runs/NAME --verbose": "with the evidence",
            "audit cifar_resnet110_original": "a registered model",
        },
    ),
    "convert": Command(
        "Exchange weights",
        "Convert weights from and to keras.applications, keras-hub, timm and Torch.",
        {
            "convert resnetv2_50.safetensors resnet50.keras": "from timm",
            "convert resnet50.keras resnetv2_50.safetensors --target-format timm": "to timm",
            "convert weights.h5 net.keras --source-format keras_applications": "from Keras",
        },
    ),
    "reproduce": Command(
        "Measure",
        "Measure the paper's tables and compare with the published numbers.",
        {
            "reproduce digits": "small versions of Tables 1 and 2, half an hour on a CPU",
            "reproduce table2 --rows resnet110-original --seeds 1": "one run on CIFAR-10",
            "reproduce report": "write results/README.md",
        },
        "reproduce.__main__",
    ),
    "benchmark": Command(
        "Measure",
        "Measure time and memory of networks side by side.",
        {
            "benchmark step --models cifar_resnet20_preact": "time of a train step",
            "benchmark compile": "time to the first step, stacked or not",
            "benchmark exports saved_models/cifar10_resnet20": "an exported network in each engine",
            "benchmark input PHOTOS": "how fast batches come from a folder",
            "benchmark serve saved_models/cifar10_resnet20": "the server under load",
            "benchmark very-deep preact --remat 33": "10,001 layers",
        },
        "benchmark.__main__",
    ),
}


#: What a recipe needs besides its name.
NEEDED: Mapping[str, str] = {
    **dict.fromkeys(("folder", "folder_small"), " --data.dir PHOTOS --data.test 0.2"),
    "finetune": " --model.weights RUN --data.dir PHOTOS --data.test 0.2",
}


def recipe_examples(recipe: str) -> Mapping[str, str]:
    """Return command lines of `train RECIPE`, each with a comment."""
    line = f"train {recipe}{NEEDED.get(recipe, '')}"
    return {
        f"{line} --dry-run": "memory and time; writes nothing",
        f"{line} --output runs/first": "as the recipe says",
        f"{line} --epochs 20 --seeds 3": "three short runs",
    }


def examples(name: str) -> list[str]:
    """Return the examples of a command, with their comments in a column."""
    command, *recipe = name.split()
    lines = COMMANDS[command].examples
    if command == "train" and recipe and recipe[0] != "--config":
        lines = recipe_examples(recipe[0])
    width = max(map(len, lines))
    return [f"keras-preact {line:<{width}}  # {comment}" for line, comment in lines.items()]
