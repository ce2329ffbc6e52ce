"""What a comparison found: one document, from which all forms are made."""

import json
import os

import numpy as np

from qwenref.compare.document import FIELDS, check, filled, plain_values
from qwenref.compare.errors import Disagreement, OutputExists, ReportError
from qwenref.compare.wording import verdict
from qwenref.errors import compose

# Arrays of a report: dimensions and meaning.  N: scored positions, prompt after prompt; P: prompts; S: sites.
ARRAYS = {
    "prompt": ("N", "number of the prompt"),
    "pos": ("N", "index of the token in prompt and continuation"),
    "margin": ("N", "difference of the reference's two largest logits, nats"),
    "sigma": ("N", "noise of the difference of both choices, nats"),
    "u": ("N", "log-probability that the engine's choice gives up, in sigmas; 0 where both choose the same"),
    "flip": ("N", "0 the same choice, 1 tie, 2 benign, 3 ambiguous, 4 non-benign"),
    "kl": ("N", "divergence of the engine from the reference, nats"),
    "kl_jitter_min": ("N", "the least among rounding variants"),
    "kl_jitter_max": ("N", "the largest among rounding variants"),
    "R_prompt": ("P", "error of the engine to that of a rounding variant, by prompt"),
    "R_prompt_low": ("P", "lower end of its 95 % interval"),
    "R_prompt_high": ("P", "upper end"),
    "error_mod64": ("64", "error in sigmas by position mod 64"),
    "error_mod128": ("128", "error in sigmas by position mod 128"),
    "qq": ("N", "errors in sigmas, in ascending order"),
    "pit": ("N", "randomised probability integral transform of sampled tokens"),
    "layer_error": ("S, N", "error of activations to that of a rounding variant, by site and position"),
}
AGREED = ("AGREE", "AGREE_WITHIN_NOISE")


class Report:
    """A finished comparison.  Every field of the document is an attribute: `.status`, `.cause`, `.findings`, ...

    document: the fields of schema qwenref.compare/1; those left out are blank.  arrays: {name: array} by `ARRAYS`; of
    two engines "1.kl" and "2.kl", in the order of `.arbiter["reports"]`.
    """

    def __init__(self, document, arrays=None):
        self.document = filled(document)
        self.arrays = {}
        numbers = ["", *map(str, range(1, 1 + len((self.arbiter or {}).get("reports", ()))))]
        for name, array in (arrays or {}).items():
            number, _, plain = name.rpartition(".")
            if plain not in ARRAYS or number not in numbers:
                raise ReportError(compose(f"report: no array {name!r}", expected=", ".join(ARRAYS)))
            self.arrays[name] = np.asarray(array)

    def __getattr__(self, name):
        if name in FIELDS:
            return self.document[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dir__(self):
        return [*super().__dir__(), *FIELDS]

    @property
    def verdict(self):
        """The sentence the report begins with."""
        return verdict(self.document)

    @property
    def agrees(self):
        """Whether the engine is inside the reference's envelope."""
        return self.status in AGREED

    @property
    def sides(self):
        """The Reports of each of two engines, with their arrays; this one where there is one engine."""
        if self.arbiter is None:
            return (self,)
        parts = {name: name.partition(".") for name in self.arrays}
        return tuple(
            Report(side, {part[2]: self.arrays[name] for name, part in parts.items() if part[0] == str(n)})
            for n, side in enumerate(self.arbiter["reports"], 1)
        )

    def assert_agrees(self, max_R=1.5):
        """For an engine's tests: `Disagreement` unless the engine is inside the envelope and R at most `max_R`.

        The verdict has gates of its own; `max_R` can make that of R stricter, never looser.
        """
        ratio = (self.stats.get("R") or {}).get("value")
        if self.agrees and (ratio is None or ratio <= max_R):
            return
        found, expected = f"{self.status}, cause {self.cause}", "AGREE or AGREE_WITHIN_NOISE"
        if self.agrees:
            found, expected = f"R {ratio:.4g}", f"at most {max_R:g}"
        error = Disagreement(compose(self.verdict, found=found, expected=expected, do=self.summary or None))
        error.report, error.exit_code = self, Disagreement.exit_code if self.agrees else self.exit_code
        raise error

    def noted(self, code, severity, message, evidence=None):
        """A Report with one finding more."""
        said = {"code": code, "severity": severity, "message": message, "evidence": evidence}
        document = self.to_dict()
        return Report({**document, "findings": [*document["findings"], said]}, self.arrays)

    # Forms.

    def to_dict(self):
        """A copy of the document, of plain values."""
        return plain_values(self.document)

    def text(self, width=100):
        from qwenref.compare.text import text

        return text(self.document, width)

    def __repr__(self):
        from qwenref.plain import plain

        return plain(self.text())

    def _repr_html_(self):
        from qwenref.compare.html import display

        return display(self)

    def to_html(self, path, force=False):
        """Write one file that needs no other and no network."""
        from qwenref.compare.html import page

        write(path, page(self), force)

    save_html = to_html

    def to_junit(self, path, force=False):
        """Write the stages as the test cases of a JUnit file, for continuous integration."""
        from qwenref.compare.junit import junit

        write(path, junit(self.document), force)

    def to_json(self, path, force=False, positions=True):
        """Write the document; with `positions` and any arrays also these, as an npz file beside it."""
        document = self.to_dict()
        if positions and self.arrays:
            beside = positions_file(path)
            free(beside, force)
            free(path, force)
            document["per_position_file"] = os.path.basename(beside)
            np.savez_compressed(beside, **self.arrays)
        write(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", force)

    save = to_json

    @classmethod
    def load(cls, path):
        """The report in a file that `to_json` wrote, with its arrays where they lie beside it."""
        try:
            with open(path, encoding="utf-8") as file:
                document = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ReportError(compose(f"{path}: no report", found=error, expected="JSON")) from error
        check(document)
        return cls(document, _arrays_beside(path, document.get("per_position_file")))


def positions_file(path):
    """Where the arrays of a report lie: beside its JSON file."""
    return os.path.splitext(os.fspath(path))[0] + ".positions.npz"


def _arrays_beside(path, name):
    if not name:
        return {}
    beside = os.path.join(os.path.dirname(os.fspath(path)), os.path.basename(name))
    if not os.path.exists(beside):
        return {}
    with np.load(beside, allow_pickle=False) as stored:
        return {key: stored[key] for key in stored.files}


def free(path, force=False):
    """Refuse to write over a file, or where there is no folder."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(compose(f"{path}: cannot be written", found=f"no folder {folder}"))
    if os.path.isdir(path):
        raise IsADirectoryError(compose(f"{path}: cannot be written", found="a folder", expected="the name of a file"))
    if not force and os.path.lexists(path):
        raise OutputExists(
            compose(f"{path}: there is a file already", do="name another, or write over it: force=True, --force")
        )


def write(path, text, force=False):
    free(path, force)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
