"""What was seen of an engine, before anything is made of it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from qwenref.engines.base import Capabilities

SEVERITIES = ("info", "warning", "error")


class Trajectory(NamedTuple):
    """A prompt with a continuation, and what the engine said of it: a Row, or None, for each id that a row predicts."""

    prompt: int  # its number in the suite
    origin: str  # whose continuation it is: "engine" or "reference"
    ids: tuple
    start: int  # of the continuation
    prefill: list | None = None  # for each of ids[1:], all ids having been given
    decode: list | None = None  # for each of ids[start:]: the steps the engine made itself; None: it made none of these
    finish: str = "unknown"  # of the engine's answer: "stop", "length", "cancelled", "unknown"
    closing: bool = False  # the last id is no one's: it stands where the engine ended without saying by which id


class Difference(NamedTuple):
    """Two answers that have to be equal: of a tokenizer, of a template."""

    what: str
    where: str  # the string, or the conversation's name
    found: object  # str or list of ids
    expected: object
    more: int = 0  # how many differ in all


@dataclass
class Evidence:
    """Filled step by step, so that an interrupted run has what it came to."""

    name: str
    gives: Capabilities
    config: dict = field(default_factory=dict)
    trajectories: list = field(default_factory=list)
    completions: dict = field(default_factory=dict)  # {number of the prompt: Completion}
    differences: list = field(default_factory=list)
    differing_config: list = field(default_factory=list)  # {key, ref, engine}
    findings: list = field(default_factory=list)
    spread: float = 0.0  # standard deviation of log-probabilities between equal requests
    assumed: bool = False  # ids are those of the reference's tokenizer: the engine gave text
    asked: dict = field(default_factory=dict)  # how much of each step there was
    failed: Exception | None = None  # the first error for which a prompt has no answer, or no score

    @property
    def heard(self):
        """Whether any question that has an answer here was answered."""
        return bool(self.completions or any(self.asked.get(what) for what in ("strings", "conversations")))

    def find(self, code, severity, message, evidence=None):
        assert severity in SEVERITIES
        if not any(found["code"] == code and found["message"] == message for found in self.findings):
            self.findings.append({"code": code, "severity": severity, "message": message, "evidence": evidence})
