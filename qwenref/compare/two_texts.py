"""Two answers that were pasted, and the ids they answer: which one is no answer of the reference, in tier D."""

from qwenref.compare.memory import check_memory
from qwenref.compare.running import Comparison, run_all
from qwenref.compare.suites import Item, Suite
from qwenref.engines.base import Capabilities, Closing, Completion
from qwenref.errors import InputError, compose

NAMES = ("text A", "text B")


class Pasted(Closing):
    """A text as the answer of an engine that gives nothing else."""

    asks_again = False

    def __init__(self, name, text):
        self.name, self._text = name, text

    def capabilities(self):
        return Capabilities(ids_in=True)

    def generate(self, prompt, n, k, sampling=None):
        return Completion(list(prompt), None, self._text, "unknown")


def pasted(model, ids, a, b, precision=None, jitter=None, progress=None):
    """The `Report` of two texts [str] that follow the prompt `ids` [int]: tier D, with the reference as arbiter.

    Text has no ids of its own: as far as it says what the reference says it is given the reference's, behind that the
    tokenizer's.  Raises InputError for texts that are empty or equal, MemoryBudget for what no memory holds.
    """
    for name, text in zip(NAMES, (a, b), strict=True):
        if not text:
            raise InputError(compose(f"compare: {name} is empty", do="paste what the engine answered"))
    if a == b:
        raise InputError(compose("compare: both texts are the same", found=f"{len(a):,} characters"))
    ids = list(map(int, ids))
    longest = max(len(model.tokenizer.encode(text)) for text in (a, b))
    asked = Suite("pasted", (Item("pasted", ids, longest, "pasted", None),))
    check_memory(model, asked)
    wanted = {"precision": precision, "jitter": jitter}
    return run_all(
        [
            Comparison(model, Pasted(name, text), asked, wanted, progress=progress)
            for name, text in zip(NAMES, (a, b), strict=True)
        ]
    )
