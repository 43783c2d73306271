"""`keras-preact benchmark`: its figures by hand, its order and limits, and one command on a
tiny network. No test asserts a time.
"""

import json
import math
import re
import subprocess
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

from tests.training.calls import error_of, words
from training.benchmark import __main__ as command
from training.benchmark import candidates, child, input, loaders, report, rounds
from training.benchmark.candidates import Candidate
from training.benchmark.questions import Step
from training.errors import UserError

BACKEND = keras.backend.backend()


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def measured(question, found) -> list[rounds.Outcome]:
    return list(rounds.run(question, found))


def test_ratios_by_hand():
    """b takes 2, 2 and 2.5 times as long as a, whatever the speed of the machine in a round.
    c fails in the second round.
    """
    figures = (
        {"a": {"s": 1.0}, "b": {"s": 2.0}, "c": {"s": 3.0}},
        {"a": {"s": 10.0}, "b": {"s": 20.0}},
        {"a": {"s": 2}, "b": {"s": 5}},
    )

    def entry(*values, over):
        keys = ("median", "min", "max")
        ratio = {"over": "a"} | dict(zip(keys, over, strict=True))
        return {"s": dict(zip((*keys, "rounds"), values, strict=True)) | {"ratio": ratio}}

    assert report.summarize(figures, dict.fromkeys("abcd", "a")) == {
        "a": entry(2, 1, 10, 3, over=(1, 1, 1)),
        "b": entry(5, 2, 20, 3, over=(2, 2, 2.5)),
        "c": entry(3, 3, 3, 1, over=(3, 3, 3)),
        "d": {},
    }


def test_candidates_take_turns(monkeypatch):
    started = []

    def pretend(question, candidate):
        started.append(candidate.label)
        if candidate.name == "b" and len(started) > 3:
            return -9, "", ""
        if candidate.name == "c":
            return 1, "", "Traceback\nKeyError: 'x'\n"
        return 0, '{"figures": {}}\n', ""

    monkeypatch.setattr(rounds, "_child", pretend)
    found = [Candidate("jax", "a"), Candidate("torch", "b"), Candidate("torch", "c")]
    outcomes = measured(Step(rounds=3, limit=10), found)
    a, b, c = (row.label for row in found)
    assert started == [a, b, c, a, b, a]  # a candidate that failed is not measured again
    assert {(each.round, each.label): each.problem for each in outcomes if each.problem} == {
        (1, c): "failed: KeyError: 'x'",
        (2, b): "ended by SIGKILL, perhaps out of memory",
    }
    # a user error stops the run
    monkeypatch.setattr(rounds, "_child", lambda *_: (2, "", "a note\nerror: no such remat\n"))
    with pytest.raises(UserError, match=r"^jax/a: no such remat$"):
        measured(Step(), found[:1])


def test_a_process_over_its_limit_is_killed_with_its_children(monkeypatch):
    """subprocess.run() would wait until the grandchild closes the pipe."""
    begun = []
    popen = subprocess.Popen
    hang = "import time; time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hang!r}])"

    def slow(arguments, **options):
        begun.append(popen([arguments[0], "-c", code], **options))
        return begun[0]

    monkeypatch.setattr(subprocess, "Popen", slow)
    outcomes = measured(Step(rounds=2, limit=0.5), [Candidate(BACKEND, "a")])
    assert [outcome.problem for outcome in outcomes] == ["over 0.5 s"]
    assert begun[0].returncode == -9


def test_an_interruption_keeps_what_was_measured(monkeypatch, capsys):
    turns = []

    def interrupted(question, candidate):
        turns.append(candidate.label)
        if len(turns) > 1:
            raise KeyboardInterrupt
        answer = {"figures": {"step_seconds": 0.5}, "jit_compile": True, "device": "CPU"}
        return 0, json.dumps(answer), ""

    monkeypatch.setattr(rounds, "_child", interrupted)
    options = f"--backends {BACKEND} --models dense_resnet6 dense_resnet12 --output figures.json"
    with pytest.raises(SystemExit, match="130"):
        command.main(["step", *words(options)])
    found = json.loads(Path("figures.json").read_text())
    first, second = found["summary"].values()
    assert (first["step_seconds"]["median"], second) == (0.5, {})
    assert "500.0" in capsys.readouterr().out


@pytest.mark.soak
def test_resident_processes_compile_once_and_take_turns(monkeypatch, tmp_path):
    """Each process notes when it is ready and when it is asked."""
    popen, begun = subprocess.Popen, []
    code = """
import json, sys, time
name = json.loads(sys.argv[1])["candidate"]["name"]
def note(word):
    with open("notes", "a") as file:
        file.write(word + name + "\\n")
if name == "broken":
    sys.exit("error: it does not compile")
note("ready ")
print("{}", flush=True)
for turn, line in enumerate(sys.stdin):
    note("")
    if name == "hangs" and turn:
        time.sleep(600)
    print(json.dumps({"figures": {"turn": turn}}), flush=True)
"""

    def pretend(arguments, **options):
        begun.append(popen([arguments[0], "-c", code, arguments[-1]], **options))
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", pretend)
    names = ("a", "hangs", "broken")
    question = Step(resident=True, rounds=3, limit=15)
    outcomes = measured(question, [Candidate("torch", name) for name in names])
    notes = (tmp_path / "notes").read_text().splitlines()
    assert sorted(notes[:2]) == ["ready a", "ready hangs"]
    assert notes[2:] == ["a", "hangs", "a", "hangs", "a"]
    a = [each.result["figures"]["turn"] for each in outcomes if each.label == "torch/a"]
    assert a == [0, 1, 2]
    assert {(each.round, each.label): each.problem for each in outcomes if each.problem} == {
        (1, "torch/broken"): "failed: it does not compile",
        (2, "torch/hangs"): "over 15 s",
    }
    assert len(begun) == 3
    assert all(process.poll() is not None for process in begun)


def test_settings_of_a_candidate():
    """compile and dtype stand for --jit-compile and --precision; the rest goes to the builder."""
    name, options = candidates.parse(
        "cifar_resnet20_preact:compile=false,stacked=true,dtype=float32"
    )
    candidate, settings = Candidate("jax", name, options).split()
    assert candidate == Candidate("jax", name, {"stacked": True})
    assert settings == {"jit_compile": "off", "dtype": "float32"}


def test_a_tiny_run(monkeypatch):
    """The test measures in this process; the command starts child processes."""

    def measured(question, candidate):
        (answer,) = child.measure(question, candidate)
        return 0, json.dumps(answer) + "\n", ""

    monkeypatch.setattr(rounds, "_child", measured)
    options = f"--backends {BACKEND} --models dense_resnet6 --batch 2 --rounds 1 --steps 2 --output"
    command.main(["step", *words(options), "figures.json"])
    found = json.loads(Path("figures.json").read_text())
    figures = found["outcomes"][0]["result"]["figures"].values()
    assert all(0 <= value < math.inf for value in figures if not isinstance(value, list))
    assert list(found["summary"]) == list(found["candidates"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("stp", "Did you mean 'step'"),
        ("step --models dense_resnet7", "Did you mean 'dense_resnet6'"),
        ("step --models dense_resnet6:remt=1", "Did you mean 'remat'"),
        ("step --models dense_resnet6:compile=1", "compile must be true or false. Received"),
        ("step --rounds 0", "--rounds must be positive. Received: 0"),
        ("step --limit 1e300", "--limit must be positive, at most 1,000,000,000 seconds"),
        ("input there/is/none", "there/is/none must be a folder with a folder of images for each"),
        ("very-deep preact --lr nan", "--learning-rate must be positive. Received: nan"),
        ("very-deep preact --width nan", "--width must be positive. Received: nan"),
        ("very-deep preact --seed -1", "--seed must be from 0 to 4294967295. Received: -1"),
    ],
)
def test_wrong_options(options, message, capsys, empty_folder):
    assert message in error_of(capsys, command.main, words(options))
    assert list(empty_folder.iterdir()) == []


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    input.make_photographs(folder, 70)
    return folder


def test_photographs_are_made_for_every_class(photographs):
    classes = sorted(path for path in photographs.iterdir() if path.name.startswith("class"))
    assert [len(list(path.glob("*.jpg"))) for path in classes] == [7] * 10
    contents = {path.read_bytes() for path in photographs.glob("class*/*.jpg")}
    assert len(contents) == 64


def test_every_loader_can_be_chosen():
    assert tuple(loaders.LOADERS) == input.LOADERS


@pytest.mark.parametrize("mode", ["train", "evaluation"])
@pytest.mark.parametrize("name", loaders.LOADERS)
def test_every_loader_gives_the_photographs(name, mode, photographs):
    """Evaluation shows the middle of the first photographs. Keras' resizing does not smooth,
    so it differs more.
    """
    images, labels = map(np.asarray, next(loaders.LOADERS[name](photographs, mode, 48, 4)))
    assert (images.shape, images.dtype, labels.shape) == ((4, 48, 48, 3), np.float32, (4,))
    assert 0 <= images.min() < 60 < 200 < images.max() <= 255
    if mode == "evaluation":
        paths = sorted(photographs.glob("class0/*.jpg"))[:6]
        wanted = [middle(path, of_shorter_side=48 if name == "keras" else 55) for path in paths]
        for found in images:  # `keras-preact` tests one of the images in this class
            difference = min(np.abs(found - want).mean() for want in wanted)
            assert difference < (8 if name == "keras" else 1)
        assert labels.tolist() == [0] * 4


def middle(path: Path, of_shorter_side: int) -> np.ndarray:
    """Return 48 x 48 pixels from the middle of a photograph that Pillow has resized."""
    with Image.open(path) as photograph:
        size = (round(500 / 375 * of_shorter_side), of_shorter_side)
        resized = photograph.resize(size, Image.Resampling.BILINEAR)
    left, top = (size[0] - 48) // 2, (size[1] - 48) // 2
    return np.asarray(resized.crop((left, top, left + 48, top + 48)), "float32")


def test_training_batches_of_a_loader_differ(photographs):
    for name, open_loader in loaders.LOADERS.items():
        stream = open_loader(photographs, "train", 16, 16)
        batches = [tuple(map(np.asarray, next(stream))) for _ in range(3)]
        assert len({images.tobytes() for images, _ in batches}) == 3, name
        assert len({*np.concatenate([labels for _, labels in batches]).tolist()}) > 5, name


@pytest.mark.process
def test_the_input_side(photographs):
    options = "--loaders keras-preact --modes train --size 16 --batch 4 --batches 2 --rounds 2"
    command.main(["input", str(photographs), *words(options), "--output", "input.json"])
    content = json.loads(Path("input.json").read_text())
    [(label, found)] = content["summary"].items()
    assert label == "train/keras-preact"
    assert found.keys() == {"images_per_second", "cpu_seconds", "first_seconds"}
    assert all(0 < each["min"] <= each["median"] for each in found.values())
    assert content["settings"]["files"] is None
    assert content["versions"].keys() >= {"keras-preact", "tensorflow"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--files 3", "--files must be at least 10. Received: 3"),
        ("--rounds 0", "rounds must be positive"),
        ("--loaders", "at least one of --loaders and --modes"),
    ],
)
def test_options_of_the_input_side(options, message, capsys):
    assert message in error_of(capsys, command.main, ["input", *words(options)])


@pytest.mark.soak
@pytest.mark.process
def test_a_folder_that_a_loader_cannot_read(tmp_path, capsys):
    options = "--loaders keras-preact --modes train"
    message = error_of(capsys, command.main, ["input", str(tmp_path), *words(options)])
    assert message.startswith("error: train/keras-preact: ")
    assert "no images" in message or "no test images" in message


SAMPLE = Path(__file__).parents[2] / "saved_models" / "cifar10_resnet20"


@pytest.mark.soak
@pytest.mark.process
def test_a_server_under_load(capsys):
    options = "--rounds 2 --seconds 0.1 --clients 2 --bodies binary json png jpeg --output s.json"
    command.main(["serve", str(SAMPLE), *words(options)])
    printed, content = capsys.readouterr().out, json.loads(Path("s.json").read_text())
    labels = [f"tensorflow/{body}" for body in ("batch", "binary", "json", "png", "jpeg")]
    assert list(content["summary"]) == labels
    assert all(label in printed for label in labels)
    for label, found in content["summary"].items():
        assert found.keys() == {"cpu_seconds", "images_per_second", "latency_99"}
        for figure in found.values():
            assert (figure["rounds"], figure["ratio"]["over"]) == (2, labels[0])
            assert 0 < figure["min"] <= figure["median"] <= figure["max"]
        one = found["cpu_seconds"]["ratio"]["median"]
        assert (one == 1) == (label == labels[0])


@pytest.mark.soak
@pytest.mark.process
def test_an_export_in_the_engines(capsys):
    options = "--engines plain openvino --batches 2 --rounds 2 --seconds 0.01 --output e.json"
    command.main(["exports", str(SAMPLE), *words(options)])
    printed, content = capsys.readouterr().out, json.loads(Path("e.json").read_text())
    labels = [f"cifar10_resnet20/float32/{each}/batch=2" for each in ("plain", "openvino")]
    assert list(content["summary"]) == labels
    assert all(label in printed for label in labels)
    for found in content["summary"].values():
        assert found.keys() == {"images_per_second", "cpu_seconds"}
        for figure in found.values():
            assert (figure["rounds"], figure["ratio"]["over"]) == (2, labels[0])
            assert 0 < figure["min"] <= figure["median"] <= figure["max"]
    assert content["versions"].keys() >= {"tensorflow", "openvino"}


@pytest.mark.process
@pytest.mark.soak
def test_networks_that_are_exported_for_it():
    names = ["digits_resnet8_preact", "keras_applications_resnet50v2"]
    options = "--precisions float32 bfloat16 int8 --batches 1 --rounds 1 --image-size 32"
    options += " --seconds 0.01 --output e.json"
    command.main(["exports", *names, *words(options)])
    own = "digits_resnet8_preact"
    assert list(json.loads(Path("e.json").read_text())["summary"]) == [
        *(
            f"{own}/{precision}/{engine}/batch=1"
            for precision in ("float32", "bfloat16")
            for engine in ("plain", "tensorflow", "openvino")
        ),
        f"{own}/int8/openvino/batch=1",
        "keras_applications_resnet50v2/plain/batch=1",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "Give at least one model"),
        ("no/such/folder", "no/such/folder is no folder"),
        (".", "It has no version, which is"),
        ("digits_resnet8_prect", "Did you mean 'digits_resnet8_preact'"),
        ("digits_resnet8_preact:dtype=float32", "set by --precisions"),
        ("timm_resnetv2_50", "timm_resnetv2_50 runs on torch"),
        ("digits_resnet8_preact --batches 0", "batches must be positive. Received: 0"),
        (f"{SAMPLE} --rounds 0", "rounds must be positive"),
        (
            "keras_applications_resnet50v2 --engines openvino",
            "No engine computes any of the models",
        ),
    ],
)
def test_options_of_exports(options, message, capsys):
    assert message in error_of(capsys, command.main, ["exports", *words(options)])


def card_with(folder, **changes) -> Path:
    model = folder / "other"
    model.mkdir()
    card = json.loads((SAMPLE / "model_card.json").read_text()) | changes
    (model / "model_card.json").write_text(json.dumps(card))
    return model


SIGNATURES = json.loads((SAMPLE / "model_card.json").read_text())["signatures"]
SEQUENCES = {"serving_default": {"inputs": {"tokens": {"dtype": "int32", "shape": [None, 9]}}}}
WITHOUT_FILES = {key: value for key, value in SIGNATURES.items() if key != "predict_bytes"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "is no exported model: it has no model_card.json"),
        ({"signatures": SEQUENCES}, r"takes no images of one size. Received: the shape \[9\]"),
        ({"signatures": WITHOUT_FILES}, "takes no image files: give --bodies binary json"),
        ({"signatures": {}}, "model_card.json cannot be read"),
    ],
)
def test_models_that_the_load_does_not_fit(changes, message, tmp_path, capsys):
    model = tmp_path / "none" if changes is None else card_with(tmp_path, **changes)
    assert re.search(message, error_of(capsys, command.main, ["serve", str(model)]))


@pytest.mark.process
def test_a_model_that_cannot_be_served_says_why(tmp_path, capsys):
    model = card_with(tmp_path)
    (model / "1").mkdir()
    (model / "1" / "saved_model.pb").touch()
    message = error_of(capsys, command.main, ["serve", str(model), "--seconds", "0.1"])
    assert message.startswith("error: The server does not answer: HTTP/1.1 503")
