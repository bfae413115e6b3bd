"""`--set NAME=VALUE`: another value for a field of the scheduler's configuration."""

from collections.abc import Iterable

import msgspec

from cearx.core.admission import find_policy, load_policy
from cearx.core.config import SchedulerConfig


def with_overrides(config: SchedulerConfig, settings: Iterable[str]) -> SchedulerConfig:
    """The configuration with these values; raises ValueError that says what is possible."""
    settings = list(settings)
    values = msgspec.structs.asdict(config)
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator or name not in values:
            raise ValueError(f"{setting!r} is no NAME=VALUE with one of {', '.join(values)}")
        values[name] = value
    try:
        config = msgspec.convert(values, SchedulerConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{', '.join(settings)}: {error}") from None
    is_asked_for = any(setting.startswith("admission=") for setting in settings)
    (load_policy if is_asked_for else find_policy)(config.admission)
    return config
