"""The page of diagnosis by symptom: each broken run fails as the page says, what the page
names finds the fault, and the repaired run is well. The numbers of a training depend on the
CPU and are not compared.
"""

import importlib
import math
import re
from pathlib import Path

import pytest

from keras_preact.analysis import Status
from tests.test_docs import PAGES, anchor

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hook():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "hooks")
        return importlib.import_module("diagnosis")


@pytest.fixture(scope="module")
def digits(hook):
    return hook.digits()


def starts(run) -> list[str]:
    """The messages of a run up to their first colon, without numbers."""
    return [re.sub(r"\d[\d.e+-]* ", "", message.split(":")[0]) for message in run.messages]


PATH = "identity path"
TOO_HIGH = "Learning rate is too high"
OLD = "The moving statistics of the batch normalisation are out of date"


@pytest.mark.soak
def test_moving_statistics(hook, digits):
    """The runs differ only at inference."""
    found = hook.stale(*digits, epochs=6)
    broken, repaired = found["runs"].values()
    assert found["audit"]["moving statistics"].status == Status.FAIL
    assert starts(broken) == [OLD]
    assert repaired.messages == []
    assert broken.history["accuracy"] == pytest.approx(repaired.history["accuracy"], abs=0.02)
    assert broken.history["accuracy"][-1] > 0.85
    assert broken.at_inference < 0.5 < repaired.at_inference
    assert max(broken.history["val_accuracy"]) < 0.5 < max(repaired.history["val_accuracy"])


@pytest.mark.soak
def test_logits_in_a_loss_for_probabilities(hook, digits):
    found = hook.logits(*digits, epochs=4)
    broken, repaired = found["runs"].values()
    assert found["audit"]["loss and metrics"].status == Status.FAIL
    assert broken.messages[0].startswith("The network returns logits, and the loss expects")
    assert repaired.messages == []
    assert min(broken.history["loss"]) > 4
    assert broken.history["accuracy"][-1] < 0.3
    assert repaired.history["accuracy"][-1] > 0.7


def test_pixels(hook, digits):
    found = hook.scale(*digits, epochs=4)
    *wrong, right = found["accuracies"]
    assert found["accuracies"][right] > 0.8
    assert found["findings"][right].status == Status.PASS
    assert found["warnings"][right] == []
    for name in wrong:
        assert found["accuracies"][name] < 0.4
        assert found["findings"][name].status == Status.FAIL
        [warning] = found["warnings"][name]
        assert "This network expects values from 0 to 255" in warning


@pytest.mark.parametrize(
    ("case", "build", "depth", "mistake", "check", "words"),
    [
        ("flat", "resnet", 8, {"shortcut": "constant_scaling"}, PATH, "has a scaling by 0.5."),
        (
            "nan",
            "resnet",
            56,
            {"normalization": "none"},
            "normalised input",
            "Weight layers without a normalisation before them",
        ),
        ("depth", "network", 8, {"activated": True}, PATH, "a normalisation and an activation."),
    ],
)
def test_the_audit_names_the_cause(hook, digits, case, build, depth, mistake, check, words):
    """In shallower networks than those of the page."""
    images, labels = hook.normalized(digits[0]), digits[1]
    found = hook.audited(getattr(hook, build)(depth, **mistake), images, labels)
    assert (found[check].status, found.causes[0].check) == (Status.FAIL, check)
    assert words in found[check].detail
    repaired = hook.audited(getattr(hook, build)(8), images, labels)
    assert repaired.worst != Status.FAIL
    assert repaired[check].status == Status.PASS
    shown = " ".join(hook.measured()[case]["audit"].split())  # on the page
    assert f"Found ({check}): " in shown
    assert words in shown


@pytest.mark.soak
def test_branches_without_normalisation(hook, digits):
    pixels, labels = digits
    broken, repaired = (
        hook.run(
            lambda kind=kind: hook.resnet(110, normalization=kind),
            hook.normalized(pixels),
            labels,
            interval=1,
            epochs=2,
        )[0]
        for kind in ("none", "batch")
    )
    assert starts(broken)[0] == TOO_HIGH
    update = re.match(r"Training diverged in update (\d+): ", broken.messages[1])
    assert int(update[1]) < 10
    assert starts(repaired) == []
    assert repaired.history["accuracy"][-1] > 0.5


@pytest.mark.soak
def test_runs_that_need_minutes(hook, digits):
    broken, slower, repaired = hook.flat(*digits)["runs"].values()
    for run in (broken, slower):
        assert starts(run) == [TOO_HIGH]
        assert run.history["loss"][0] == pytest.approx(math.log(10), abs=0.2)
        # Rounding decides whether the loss leaves 2.30 after the first epoch.
        assert run.history["loss"][-1] > 3 * repaired.history["loss"][-1]
        assert run.history["accuracy"][-1] + 0.3 < repaired.history["accuracy"][-1]
    shallow, deep, _, repaired = hook.depth(*digits)["runs"].values()
    for column in ("accuracy", "val_accuracy"):
        worse = deep.history[column][-1] + 0.05
        assert worse < shallow.history[column][-1]
        assert worse < repaired.history[column][-1]


def test_every_mistake_has_a_symptom():
    headings = re.findall(r"^### (.+)$", PAGES["docs/mistakes.md"], re.M)
    table = PAGES["docs/diagnosis.md"].partition("\n## ")[0]
    linked = re.findall(r"\(mistakes\.md#([^)]+)\)", table)
    assert {*map(anchor, headings)} == {*linked}
    own = re.findall(r"\]\(#([^)]+)\)", table)
    headings = re.findall(r"^## (.+)$", PAGES["docs/diagnosis.md"], re.M)
    assert own == list(map(anchor, headings))
