"""Folders with and without versions, as a table: what users copy, rename and link."""

from pathlib import Path

#: The folder's entries to what is in them ("" for a folder with a SavedModel, None for an empty
#: one, "file" for a file, a name for a link to it), the versions, and words of the problem.
LAYOUTS = {
    "good": (
        {"1": "", "12": "", "v3": "", "4 (copy)": "", "x.json": "file"},
        {1: "1", 12: "12"},
        "",
    ),
    "zero": ({"0": "", "model_card.json": "file"}, {0: "0"}, ""),
    "leading zeros": ({"0001": "", "00": ""}, {0: "00", 1: "0001"}, ""),
    "the highest": ({"9223372036854775807": ""}, {2**63 - 1: "9223372036854775807"}, ""),
    "a link": ({"v3": "", "3": "v3"}, {3: "3"}, ""),
    "twice": ({"1": "", "01": "", "001": ""}, {1: "1"}, "'001', '01' does not count"),
    "twice, once complete": ({"1": None, "01": ""}, {1: "01"}, ""),
    "too high": ({"9223372036854775808": ""}, {}, "in '9223372036854775808', but.* highest is 922"),
    "twenty digits": ({"1" * 20: ""}, {}, "Give it another name, 1 for example"),
    "a letter": ({"v1": "", "v2": ""}, {}, "saved_model.pb in 'v1', 'v2', but a version is"),
    "a copy": ({"1 (copy)": ""}, {}, r"in '1 \(copy\)', but a version is a folder with a whole"),
    "other digits": ({"²": "", "-1": "", "1.0": "", "1e3": ""}, {}, "'-1', .* and 1 more"),
    "only a link": ({"v3": "", "latest": "v3"}, {}, "'latest', 'v3'"),
    "flat": ({"saved_model.pb": "file", "variables": None}, {}, "itself.* into a folder 1 inside"),
    "models": ({"a/1": "", "b/1": "", "notes": None}, {}, "models, not versions: 'a', 'b'"),
    "incomplete": ({"1": None, "2": None}, {}, "no saved_model.pb in '1', '2'. Copy"),
    "a file": ({"1": "file"}, {}, "no saved_model.pb in '1'"),
    "one folder too many": ({"1/m": ""}, {}, "no saved_model.pb in '1'"),
    "no version": ({"model.keras": "file", "logs": None}, {}, "Found: 'logs', 'model.keras'"),
    "nothing": ({}, {}, "Found: nothing. Export a model into it"),
    "hidden": ({".1": ""}, {}, "Found: nothing"),
    "an export that is being written": ({".export-x/version": ""}, {}, ""),
}

NO_VERSION = r"It has no version, which is .* Found: {}\. Export a model into it\."
#: A path of `build_places` to what is wrong with it as a model, and who takes it nevertheless.
PLACES = {
    "m": ("", {"find", "export", "serve"}),
    "m/0": (r"It is itself a version, 0\. Use the folder above it, the model\.", {"find"}),
    "models": ("It holds models, not versions: 'm', 'n'. Use it as the folder of", set()),
    "models/m": ("", {"find", "export", "serve"}),
    "v": (r"It holds saved_model\.pb in 'v1', but a version is", {"export"}),
    "flat": ("It holds saved_model.pb itself, but a version is .* into a folder 1", {"find"}),
    "run": (NO_VERSION.format("'checkpoints', 'history.csv'"), {"export"}),
    "empty": (NO_VERSION.format("nothing"), {"export"}),
    "file": ("It is a file, not a folder.", set()),
    "missing": ("There is no such folder. ", {"export"}),
}


def build_places(folder: Path) -> None:
    """Make the paths of the table, except the one that is missing."""
    for place, files in {
        "m": {"0": "", "0001": "", "latest": "0001"},
        "models": {"m/1": "", "n/1": ""},
        "v": {"v1": ""},
        "flat": {"saved_model.pb": "file"},
        "run": {"checkpoints": None, "history.csv": "file"},
        "empty": {},
    }.items():
        build(folder / place, files)
    (folder / "file").write_text("mine")


def build(folder: Path, files: dict[str, str | None]) -> None:
    """Make a folder of the table."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        path = folder / name
        if content == "file":
            path.write_text("{}")
        elif content:
            path.symlink_to(content)
        else:
            path.mkdir(parents=True)
            if content == "":
                (path / "saved_model.pb").write_text("good")
