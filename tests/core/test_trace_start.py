"""From flags to the trace log's writer."""

from pathlib import Path

import pytest
from random_run import SMALL
from trace_samples import BOOT_ID

from cearx.core.child import StartupError
from cearx.core.config import CoreConfig, CoreLaunch, TraceLimits
from cearx.core.trace_start import open_trace, pin_after_crash, require_folder, trace_folder


def launch(trace: Path | str, **flags: object) -> CoreLaunch:
    return CoreLaunch(
        boot_id=BOOT_ID,
        runtime_dir=Path("unused"),
        log_level="info",
        config=CoreConfig(trace=str(trace), **flags),  # type: ignore[arg-type]
        frontends=1,
        hash_secret=b"",
    )


def test_every_flag_arrives(tmp_path: Path) -> None:
    """Size, seconds, number and sync policy are the writer's limits."""
    spec = launch(
        tmp_path,
        trace_segment_size=70_000,
        trace_segment_seconds=7,
        trace_keep=3,
        trace_fsync="rotate",
    )
    writer = open_trace(spec, SMALL)
    assert writer is not None and writer.path.parent == tmp_path
    assert writer._limits == TraceLimits(
        segment_bytes=70_000, segment_seconds=7, keep=3, fsync="rotate"
    )
    writer.close()


def test_the_defaults_of_flags_and_limits_agree() -> None:
    """Whoever opens a writer without flags gets what the server gets."""
    config, limits = CoreConfig(), TraceLimits()
    assert config.trace_segment_size == limits.segment_bytes
    assert config.trace_segment_seconds == limits.segment_seconds
    assert (config.trace_keep, config.trace_fsync) == (limits.keep, limits.fsync)


def test_off_means_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No writer, nothing to pin; 'auto' is a folder of the person."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_trace(launch("off"), SMALL) is None
    assert pin_after_crash(CoreConfig(trace="off"), BOOT_ID) is None
    assert trace_folder(CoreConfig()) == tmp_path / ".cache" / "cearx" / "traces"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_tried_before_anything_slow(tmp_path: Path) -> None:
    """A bad one is told with path, reason and flag; a good one is made and left empty."""
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match=r"file/x: Not a directory \(--trace DIR"):
        require_folder(CoreConfig(trace=str(tmp_path / "file" / "x")))
    require_folder(CoreConfig(trace="off"))
    require_folder(CoreConfig(trace=str(tmp_path / "new" / "folder")))
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_what_cannot_be_opened_names_the_flag(tmp_path: Path) -> None:
    """One line with path, reason and what to do."""
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match=r"file/traces.*Not a directory \(--trace DIR"):
        open_trace(launch(tmp_path / "file" / "traces"), SMALL)


def test_a_crash_before_the_log_began_is_told(tmp_path: Path) -> None:
    """There is nothing to pin, and that is no second fault."""
    text = pin_after_crash(CoreConfig(trace=str(tmp_path)), BOOT_ID)
    assert text is not None and text.startswith("cannot pin the trace log")
    writer = open_trace(launch(tmp_path), SMALL)
    assert writer is not None
    writer.close()
    text = pin_after_crash(CoreConfig(trace=str(tmp_path)), BOOT_ID)
    assert text is not None and text.startswith(f"trace log pinned: {tmp_path}/pinned-crash-")
