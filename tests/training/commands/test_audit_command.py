"""`keras-preact audit`: what it prints for people and for programs, and its exit status."""

import contextlib
import dataclasses
import json
import types

import pytest

from keras_preact.analysis.audit import Audit, AuditFinding, Status
from training.cli import console
from training.commands.analyze import specimen

FOUND = AuditFinding(
    *("dead channels", Status.FAIL, 0.625, "largest share of channels at 0", ("unit2",)),
    *("Most are 0. There are 8.", "It matters.", "Change it.", "a paper"),
)


@pytest.mark.parametrize("status", [Status.FAIL, Status.WARN])
@pytest.mark.parametrize("options", [[], ["--verbose"], ["--json"], ["--json", "--verbose"]])
def test_what_is_printed(options, status, capsys, monkeypatch):
    result = Audit("net", None, 8, 3, (dataclasses.replace(FOUND, status=status),))

    def opened(*arguments):
        print("Loading ...")
        return types.SimpleNamespace(audit=lambda: result, data="8 images")

    monkeypatch.setattr(specimen, "open_specimen", opened)
    fails = status == Status.FAIL
    with pytest.raises(SystemExit, match=r"^1$") if fails else contextlib.nullcontext():
        console.main(["audit", "model.keras", *options])
    out, err = capsys.readouterr()
    if "--json" in options:
        assert err == "Loading ...\n"
        shown = json.loads(out)
        assert shown == {**json.loads(json.dumps(result.to_dict())), "measured_on": "8 images"}
        assert shown["findings"][0]["figure"] == 0.625
        return
    is_verbose = "--verbose" in options
    lines = out.splitlines()
    assert lines[3:5] == [f"{status}  Change it.", "      Found (dead channels): Most are 0."]
    for evidence in ("62.5 %", "It matters.", "There are 8.", "a paper"):
        assert (evidence in out) == is_verbose
    end = "" if is_verbose else " Evidence: --verbose."
    assert lines[-1] == f"Measured on 8 images.{end}"
