"""Clients that leave at every moment of a request's life leave nothing behind."""

import asyncio
from pathlib import Path

from disconnect_storm import MODEL, STAGES, ProcessState, processes, storm, wait_idle
from frontend_process import write_model
from server_process import Server, final_scheduler, replay, serving
from tiny_models import save_tiny, tiny_model

CLIENTS = 5 * len(STAGES)
MAX_GROWTH_BYTES = 8 * 1024 * 1024
"""Of one process in one round of so few clients."""
GRAMMAR_PIPES = 4
"""Of the two processes that try grammars, which the frontend keeps until one is cancelled."""


def lasting_processes(server: Server) -> list[ProcessState]:
    """Without those that try grammars, which come and go."""
    return [state for state in processes(server) if "grammar" not in state.name]


def test_a_storm_of_disconnects(tmp_path: Path) -> None:
    """The streams of those who stay are exact; pool, memory and descriptors are as before."""
    model = tmp_path / "model"
    model.mkdir()
    save_tiny(tiny_model("llama", vocab_size=258), model)
    write_model(model)
    flags = (
        str(model),
        "--served-model-name",
        MODEL,
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        "8",
    )
    with serving(*flags, "--log-level", "warning", trace=tmp_path / "trace") as server:
        asyncio.run(storm(server, CLIENTS, seed=0))  # grows what grows once
        wait_idle(server)
        before = lasting_processes(server)
        found = asyncio.run(storm(server, CLIENTS, seed=1))
        wait_idle(server)
        after = lasting_processes(server)
        assert found["exact"] and not found["other"], found
        for old, new in zip(before, after, strict=True):
            assert new.name == old.name
            assert new.num_fds <= old.num_fds + GRAMMAR_PIPES, (old, new)
            assert new.rss_bytes < old.rss_bytes + MAX_GROWTH_BYTES, (old, new)
        assert server.stop() == 0
        assert "Traceback" not in "".join(server.stderr)
        assert replay(server.trace_log).returncode == 0
        scheduler = final_scheduler(server.trace_log)
        assert (len(scheduler.books.running), len(scheduler.books.waiting)) == (0, 0)
        assert scheduler.books.pool.num_free == scheduler.config.num_blocks
