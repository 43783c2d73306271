"""Measure the claims, keep their findings in a file, and show them as tables."""

import collections
import dataclasses
import functools
import importlib
import inspect
import json
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import backends, disk
from ...cli.terminal import markdown
from ...errors import UserError, command, nearest, reading
from ..results import RESULTS
from .finding import Finding, Unmeasured

FORMAT = 1
FILE = "claims.json"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A sentence about residual networks.

    Args:
        name: Its name in `claims.toml`.
        topic: Heading of its table.
        claim: The sentence.
        where: Where it is made.
        measure: Module of this package and function that measures it.
        arguments: Arguments of the function.
        slow: Whether it is only measured by name.
        surprising: Whether the page names it first.
    """

    name: str
    topic: str
    claim: str
    where: str
    measure: str
    arguments: Mapping[str, Any]
    slow: bool = False
    surprising: bool = False

    @property
    def function(self) -> Callable[..., Finding]:
        module, _, name = self.measure.partition(".")
        found: Callable[..., Finding] = getattr(
            importlib.import_module(f"{__package__}.{module}"), name
        )
        return found

    def find(self, folder: Path) -> Finding:
        """Measure the claim. What reads finished runs reads those in `folder`."""
        takes_folder = "folder" in inspect.signature(self.function).parameters
        try:
            return self.function(**({"folder": folder} if takes_folder else {}), **self.arguments)
        except Unmeasured as missing:
            return Finding("unmeasured", str(missing))


@functools.cache
def all_claims() -> Mapping[str, Claim]:
    """Return all claims by name, in the order of the file."""
    words = tomllib.loads((Path(__file__).parent / "claims.toml").read_text(encoding="utf-8"))
    return {
        name: Claim(name, arguments=entry.pop("with", {}), **entry) for name, entry in words.items()
    }


def claims(only: tuple[str, ...] = (), output: Path = RESULTS) -> None:
    """Measure what texts about the paper claim: a verdict and a number for each claim.

    Networks of up to 110 layers are measured before training, and one is trained, all on
    digits. What needs longer runs is taken from the finished runs in --output. Each
    finding is in OUTPUT/claims.json as soon as it is measured; the page docs/claims.md
    shows them. Slow claims are measured only if they are named; other findings are kept.

    Args:
        only: Names of claims, or parts of names. If not given: all that are not slow.
        output: Folder of the results.

    Raises:
        UserError: for an unknown claim, or a file that holds no findings.
    """
    chosen = _chosen(only)
    kept = read(output)
    kept = {name: each for name, each in kept.items() if name in all_claims()}
    disk.make(output, "--output")
    device = backends.described()
    start = time.perf_counter()
    for claim in chosen:
        begun = time.perf_counter()
        finding = claim.find(output)
        seconds = time.perf_counter() - begun
        kept[claim.name] = disk.plain(
            dataclasses.asdict(finding) | {"seconds": round(seconds, 1)}, digits=4
        )
        found = {name: kept[name] for name in all_claims() if name in kept}
        # each at once: all of them take minutes
        disk.write_json(output / FILE, {"format": FORMAT, "device": device, "claims": found})
        print(f"{claim.name}: {_verdict(kept[claim.name])}. {finding.text}", flush=True)
    took = time.perf_counter() - start
    print(f"{len(chosen)} claims in {took:.0f} s. Written: {output / FILE}")
    unmeasured = [claim.name for claim in chosen if kept[claim.name]["verdict"] == "unmeasured"]
    if unmeasured:
        print(
            f"Not measured: {len(unmeasured)} of {len(chosen)}. {output} lacks finished runs. Give "
            "--output the folder results of the repository, or train the runs: "
            f"{command('reproduce', '--help')} lists the tables."
        )


def _chosen(names: Sequence[str]) -> list[Claim]:
    """Return the claims with these names, or whose names contain one."""
    every = all_claims()
    if not names:
        return [claim for claim in every.values() if not claim.slow]
    chosen: dict[str, Claim] = {}
    for name in names:
        found = [name] if name in every else [each for each in every if name in each]
        if not found:
            raise UserError(f"Unknown claim: {name!r}. {nearest(name, every)}")
        chosen |= {each: every[each] for each in found}
    return list(chosen.values())


def read(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the findings in a folder of results by claim; none without the file.

    Raises:
        UserError: for a file that holds no findings.
    """
    file = folder / FILE
    if not file.exists():
        return {}
    with reading(f"{file} holds no findings of claims"):
        record = json.loads(file.read_text())
        found: dict[str, dict[str, Any]] = dict(record["claims"])
        known = record["format"] == FORMAT
    if not known:
        raise UserError(f"{file} has a format that this version does not know.")
    return found


def _verdict(finding: Mapping[str, Any]) -> str:
    """Return a verdict in words."""
    condition = finding["condition"]
    return f"true if {condition}" if finding["verdict"] == "true if" else finding["verdict"]


def table(claims: Sequence[Claim], findings: Mapping[str, Mapping[str, Any]]) -> str:
    """Return claims and their findings as a Markdown table."""
    rows = [["claim", "where", "verdict", "measured", "by"]]
    for claim in claims:
        finding = findings[claim.name]
        verdict = f"**{finding['verdict']}** {finding['condition']}".strip()
        rows.append([claim.claim, claim.where, verdict, finding["text"], f"`{claim.measure}`"])
    return markdown(rows)


def counts(findings: Mapping[str, Mapping[str, Any]]) -> str:
    """Return how many claims have which verdict, in a sentence."""
    found = collections.Counter(finding["verdict"] for finding in findings.values())
    words = {
        "true": "true",
        "true if": "true under a condition",
        "false": "false",
        "not clear": "not clear",
        "unmeasured": "not measured here",
    }
    parts = [f"{found[verdict]} {word}" for verdict, word in words.items() if found[verdict]]
    return f"{len(findings)} claims: {', '.join(parts)}."
