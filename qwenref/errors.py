"""Every exception and warning the package raises.

A message says what, where, found, expected, and what to do: the first line stands alone, further lines are indented.
"""

import sys


class QwenrefError(Exception):
    """Root of all errors of this package; catch this one to catch them all.

    `code` is a short stable name for programs; the message is for people.
    """

    code = "error"


class ConfigError(QwenrefError, ValueError):
    """A configuration that is unreadable, incomplete, contradictory, or of another architecture."""

    code = "config"


class CheckpointError(QwenrefError):
    """Weights that cannot be opened, or that do not fit the model one to one."""

    code = "checkpoint"


class ShapeError(QwenrefError, ValueError):
    """An array whose dimensions do not fit the others of a call."""

    code = "shape"


class DTypeError(QwenrefError, TypeError):
    """An array of an element type the operation does not take."""

    code = "dtype"


class InputError(QwenrefError, ValueError):
    """A value a model cannot take: token ids, masks, positions, options."""

    code = "input"


class CapabilityMissing(QwenrefError):
    """Something this machine, installation, checkpoint or engine cannot do."""

    code = "capability"


class HookError(QwenrefError, RuntimeError):
    """A hook or edit that returned what its place cannot use."""

    code = "hook"


class TemplateError(QwenrefError, ValueError):
    """A chat template that does not compile, or that refused a conversation; `message_index` is set where known."""

    code = "template"
    message_index = None


class NonFiniteError(QwenrefError, ArithmeticError):
    """NaN or infinity where a token has to be chosen, or in a model under `check_finite`.

    The guard says where: path of the `module`, its `layer`, `site` (None for what the module returns), `op`, `row`,
    `token` of the call, `head`; `count` of bad values, `value` and `index` of the first, `inputs_finite` of the module.
    """

    code = "non-finite"
    module = layer = site = op = row = token = head = count = value = index = inputs_finite = None


class ModelNotFound(QwenrefError, FileNotFoundError):
    """No model under this name; the message lists where it was looked for, in order."""

    code = "not-found"


class Unreachable(QwenrefError, ConnectionError):
    """A model that would have to be fetched, and could not be."""

    code = "unreachable"


class UnknownName(QwenrefError, KeyError):
    """A name or pattern that stands for nothing in this model or capture."""

    code = "name"
    __str__ = Exception.__str__  # KeyError would show the message quoted, on one line


class BudgetExceeded(QwenrefError, MemoryError):
    """A capture that would hold more bytes than it was allowed; raised before anything is stored."""

    code = "budget"


class QwenrefWarning(UserWarning):
    """Something to know about that did not stop the work."""


def compose(first, *, found=None, expected=None, do=None):
    """The message form of this package: one line that stands alone, then indented details."""
    lines = [first]
    for label, text in (("found", found), ("expected", expected), ("do", do)):
        if text is not None:
            lines.append(f"    {label:<8} " + str(text).replace("\n", "\n" + " " * 13))
    return "\n".join(lines)


def a_kind(value):
    """ "a list", "an int": what a message calls a value of the wrong kind."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def frames_of_the_package():
    """The `stacklevel` of a warning that is to name the line of the caller, however many of our functions lie between.

    For `warnings.warn` right in the function that calls this one.
    """
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]:
        frame, level = frame.f_back, level + 1
    return level
