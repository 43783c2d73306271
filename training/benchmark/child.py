"""Measures one candidate. The benchmark runs this module in a process per candidate.

The argument is JSON: the name of the question, its options and the candidate. The
result is one line of JSON on stdout. KERAS_BACKEND chooses the backend.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator

import keras

from .. import backends, children
from ..errors import checking
from . import candidates, subjects
from .candidates import Candidate
from .questions import QUESTIONS, Question


def measure(question: Question, candidate: Candidate) -> Iterator[dict]:
    """Yield the figures of a candidate: seconds, images per second, bytes.

    In a process that stays for all rounds: first an empty answer, when the network is
    compiled, then the figures for each line of stdin.
    """
    candidate, settings = candidate.split()
    question = dataclasses.replace(question, **settings)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(question.dtype)
    with checking():
        build_seconds, subject = subjects.timed(lambda: subjects.make(candidate, question))
    packages = ["keras-preact", "keras", "numpy", keras.backend.backend()]
    peer = candidates.PEERS.get(candidate.name)
    if peer is not None and peer.package is not None:
        packages.append(peer.package)

    def answer() -> dict:
        return {
            "figures": {"build_seconds": build_seconds} | question.measure(subject),
            "device": backends.device(),
            "jit_compile": subject.jit_compile,
            "parameters": subject.parameters,
            "versions": backends.versions(*packages),
        }

    if not question.stays:
        yield answer()
        return
    question.measure(subject)
    yield {}
    for _ in sys.stdin:
        yield answer()


def main(argv: list[str]) -> None:
    job = json.loads(argv[0])
    question = QUESTIONS[job["question"]](**job["options"])
    children.answer_each(lambda: measure(question, Candidate(**job["candidate"])))


if __name__ == "__main__":
    main(sys.argv[1:])
