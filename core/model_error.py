"""What every way of finding a model has in common: its error and its progress reports.

Owns nothing else; used by `model_source.py`, `default_model.py` and `hub_model.py`.
"""

import errno
from collections.abc import Callable

from cearx.core.child import StartupError

OnProgress = Callable[[str, int, int], None]
"""(stage, completed, total): total is 0 when nobody knows it."""


class ModelNotFound(StartupError):
    """The model cannot be had; the message is one line that says why and what helps."""


def storage_error(error: OSError, what: str) -> ModelNotFound:
    """The error for a failure to write `what`, with a full disk named as such."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelNotFound(f"the disk is full: {what} could not be stored")
    place = f" ({error.filename})" if error.filename else ""
    return ModelNotFound(f"{what} could not be stored: {error.strerror or error}{place}")
