"""1,000 clients that leave at random moments, round after round: what is left of them?

Owns a hunt, not a test (a small one runs with the tests): a server with a tiny model, witnesses
whose streams must be exact, memory and descriptors of every process behind each round.

    python tests/benchmarks/disconnect_storm.py --clients 1000 --rounds 3
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from disconnect_storm import MODEL, processes, storm, wait_idle
from frontend_process import write_model
from server_process import Server, serving
from tiny_models import save_tiny, tiny_model


def show(server: Server, when: str) -> None:
    for state in processes(server):
        print(f"  {when}: {state.name:24} {state.rss_bytes / 2**20:7.1f} MiB {state.num_fds} fds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3, help="the first one warms up")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny(tiny_model("llama", vocab_size=258), folder)
        write_model(folder)
        flags = (
            "--served-model-name",
            MODEL,
            "--max-model-len",
            "1024",
            "--max-num-seqs",
            "8",
            "--log-level",
            "warning",
        )
        with serving(name, *flags) as server:
            show(server, "start")
            for number in range(arguments.rounds):
                found = asyncio.run(storm(server, arguments.clients, number))
                seconds = wait_idle(server)
                print(f"round {number}: {dict(found)}, idle after {seconds:.1f} s", flush=True)
                show(server, f"round {number}")
            code = server.stop()
    print("".join(server.stderr), f"exit code {code}", sep="\n")


if __name__ == "__main__":
    main()
