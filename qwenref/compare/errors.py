"""What ends a comparison, or limits it: an error for each bad input, with the exit code of the command line."""

from qwenref.errors import (
    BudgetExceeded,
    CapabilityMissing,
    CheckpointError,
    ConfigError,
    InputError,
    NonFiniteError,
    QwenrefError,
    ShapeError,
    UnknownName,
    Unreachable,
)

AGREE, DIVERGED, UNDECIDED, INVALID, UNREACHABLE = range(5)  # exit codes


class CompareError(QwenrefError):
    """Root of the errors of a comparison; `exit_code` is what the command line ends with."""

    exit_code = INVALID


class ModelFilesError(CompareError, CheckpointError):
    """The reference's folder lacks a file, or its index names one that is not there."""

    code = "model-files"


class UnsupportedModel(CompareError, ConfigError):
    """A model of another architecture than the reference's."""

    code = "unsupported-model"


class VocabMismatch(CompareError, InputError):
    """An engine whose vocabulary is not the reference's, padding rows left aside."""

    code = "vocab-mismatch"


class BadTokenIds(CompareError, InputError):
    """Ids outside the vocabulary, of a wrong kind, none at all, or more than the model has positions for.

    `index` is that of the first bad one, None where the list as a whole is wrong.
    """

    code = "bad-token-ids"
    index = None


class RecordError(CompareError, InputError):
    """A recorded run that is no such thing: bad JSON, another schema, an id twice; `line` counts from 1."""

    code = "record"
    line = None


class RecordAlignment(CompareError, InputError):
    """Log-probabilities of a record that do not go with its ids, position by position."""

    code = "record-alignment"
    line = None


class NotRecorded(CompareError, CapabilityMissing):
    """A question that a recorded run has no answer to."""

    code = "not-recorded"
    exit_code = UNDECIDED


class BadLogprobs(CompareError, InputError):
    """Numbers that are no log-probabilities: NaN, above 0, of a sum above 1, unsorted, an id twice."""

    code = "bad-logprobs"
    position = None


class LogprobKindUnknown(CompareError, CapabilityMissing):
    """Log-probabilities after temperature and penalties which nobody states, and no fit recovers."""

    code = "logprob-kind-unknown"
    exit_code = UNDECIDED


class SeedNotComparable(CompareError, InputError):
    """Equal tokens asked of equal seeds: engines draw from different generators."""

    code = "seed-not-comparable"


class TooFewPositions(CompareError, InputError):
    """Too few usable positions, or rounding variants, for a verdict."""

    code = "too-few-positions"
    exit_code = UNDECIDED


class EngineContractViolation(CompareError):
    """An engine that did not do what it was asked for; kept as a finding where the comparison can go on."""

    code = "engine-contract"
    exit_code = DIVERGED


class EngineUnreachable(CompareError, Unreachable):
    """An engine that cannot be connected to, or does not answer in time."""

    code = "engine-unreachable"
    exit_code = UNREACHABLE


class EngineRejected(CompareError, CapabilityMissing):
    """An engine that refused a request; `field` is what it named, `status` the HTTP status, None where unknown."""

    code = "engine-rejected"
    exit_code = UNREACHABLE
    field = status = None


class EngineFailed(CompareError):
    """An engine that raised what is none of these errors; kept as a finding where the comparison can go on."""

    code = "engine-failed"
    exit_code = UNREACHABLE


class WorkersLost(CompareError, ChildProcessError):
    """Workers that ended again and again, or a cluster that went away; what was scored until then is kept."""

    code = "workers-lost"
    exit_code = UNDECIDED


class ClusterUnreachable(CompareError, Unreachable):
    """A Dask cluster that cannot be connected to, or that has no worker."""

    code = "cluster-unreachable"
    exit_code = UNREACHABLE


class WorkerMismatch(CompareError, CapabilityMissing):
    """A worker that lacks the model's files, has others under their name, or computes with another version."""

    code = "worker-mismatch"
    exit_code = UNREACHABLE


class ActivationShape(CompareError, ShapeError):
    """Activations of another shape than their site has."""

    code = "activation-shape"


class UnknownSite(CompareError, UnknownName):
    """Activations under a name that is no site of the model."""

    code = "unknown-site"


class NonFinite(CompareError, NonFiniteError):
    """NaN or infinity in what an engine gave; `index` is that of the first."""

    code = "non-finite"


class MemoryBudget(CompareError, BudgetExceeded):
    """A comparison that needs more memory than there is; raised before anything is loaded."""

    code = "memory-budget"


class OutputExists(CompareError, InputError, FileExistsError):
    """A file that would be written over; nothing was computed."""

    code = "output-exists"


class ReportError(CompareError, InputError):
    """A report that does not keep to its own schema; `path` is where."""

    code = "report"
    path = None


class Disagreement(CompareError, AssertionError):
    """What `Report.assert_agrees` raises; `report` is the whole of it."""

    code = "disagreement"
    exit_code = DIVERGED
    report = None
