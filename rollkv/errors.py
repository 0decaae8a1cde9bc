"""Errors a user can cause: one sentence, and an exit code by kind."""


class RollkvError(Exception):
    """What failed; the value; what was wanted; what to try. Printed as one line on stderr, without a traceback."""

    exit_code = 2


class UsageError(RollkvError):
    """An option, a prompt or a combination of them cannot be honoured."""

    exit_code = 2


class CheckFailed(RollkvError):
    """A run came to its end and found that something is not true (non-finite logits, a missed needle)."""

    exit_code = 1


class Interrupted(RollkvError):
    """The user ended the run (Ctrl-C)."""

    exit_code = 130  # 128 and the number of SIGINT, as shells say it


class DeviceError(RollkvError):
    """No usable GPU, driver or compiler, or the device failed while running."""

    exit_code = 3


class ModelFileError(RollkvError):
    """The model file is damaged, incomplete, or not what it says it is."""

    exit_code = 4


class UnsupportedModelError(ModelFileError):
    """The file is sound; this architecture, tensor type or option of it is not supported."""


class LogitFileError(RollkvError):
    """A file of stored logits is damaged, incomplete, or not what it says it is."""

    exit_code = 4


class OutOfMemoryError(RollkvError):
    """Device cap, device memory, host RAM or a cgroup limit is too small for the run."""

    exit_code = 5
