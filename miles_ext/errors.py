"""Domain errors. Each message says the offending value, what is accepted, and the mend."""


class SupportError(ValueError):
    """A support row breaks the contract (names the row and the reason)."""


class CapabilityError(ValueError):
    """An engine cannot prove that it honours what is asked of it (lists everything that is wrong)."""


class WeightError(ValueError):
    """A weight handoff does not add up: names, shapes, digests or versions differ."""


class RequestError(ValueError):
    """A generation request that cannot be honoured exactly (HTTP 400)."""


class CheckpointError(ValueError):
    """A checkpoint on disk is incomplete, or does not fit what it is loaded beside."""


class EngineError(RuntimeError):
    """An engine failed for a reason that does not depend on content: the request may be issued again."""


class TrainingError(RuntimeError):
    """Training cannot go on: a loss or a gradient is not finite. The weights were not touched."""


class TrainerLostError(RuntimeError):
    """A trainer rank died, fell silent or found no room: what was learnt since the last checkpoint is lost."""
