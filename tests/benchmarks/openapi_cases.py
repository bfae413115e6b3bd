"""Requests that schemathesis makes from /openapi.json, against a whole server with a tiny model.

Owns a hunt, not a test: no answer of 5xx, no process that ends, every error an error object. The
description is the server's own; only `model` is pinned to the served name, for with made-up names
all answers but a few would be 404. Needs schemathesis, best in a virtual environment of its own.

    python tests/benchmarks/openapi_cases.py --schemathesis VENV/bin/schemathesis --seconds 480
"""

import argparse
import collections
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from frontend_process import write_model
from server_process import Server, serving
from tiny_models import save_tiny, tiny_model

LEFT_OUT = (
    # Rules between fields are not in the schemas, so that valid data may be refused.
    "positive_data_acceptance",
    # The server of this run has no keys.
    "ignored_auth",
    # Nothing that is made lives on.
    "use_after_free",
    "ensure_resource_availability",
    "object_level_authorization",
)


def described_api(server: Server) -> dict[str, Any]:
    """What the server says of itself, with the name of its model in every body."""
    document: dict[str, Any] = httpx.get(server.url + "/openapi.json").json()
    for schema in document["components"]["schemas"].values():
        properties = schema.get("properties", {})
        if "model" in properties:
            or_none = [] if "model" in schema.get("required", ()) else [None]
            properties["model"] = {"enum": [server.name, *or_none]}
    return document


def run_cases(arguments: argparse.Namespace, server: Server, folder: Path) -> int:
    """schemathesis' exit code; its report goes to standard output."""
    file = folder / "openapi.json"
    file.write_text(json.dumps(described_api(server)))
    command = [arguments.schemathesis, "run", str(file), "--url", server.url]
    command += ["--phases", "coverage,fuzzing", "--mode", "all", "--checks", "all"]
    command += ["--exclude-checks", ",".join(LEFT_OUT), "--continue-on-failure"]
    command += ["--max-examples", str(arguments.examples), "--max-time", str(arguments.seconds)]
    command += ["--seed", str(arguments.seed), "--workers", "2", "--request-timeout", "60"]
    command += ["--suppress-health-check", "all", "--no-shrink"]
    command += ["--exclude-path-regex", "_profile$"]  # off unless a flag turns them on
    return subprocess.run(command, check=False, cwd=folder).returncode


def statuses(server: Server) -> collections.Counter[int]:
    """Of every request in the server's log."""
    found: collections.Counter[int] = collections.Counter()
    for line in server.stderr:
        if line.startswith("{") and (entry := json.loads(line))["event"] == "request":
            found[entry["status"]] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemathesis", default="schemathesis", help="the program")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--examples", type=int, default=100_000, help="at most, an operation")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny(tiny_model("llama", vocab_size=258), folder)
        write_model(folder)
        flags = (name, "--max-model-len", "96", "--log-format", "json", "--served-model-name", "m")
        with serving(*flags) as server:
            children = {child.pid for child in server.family()}
            code = run_cases(arguments, server, folder)
            assert httpx.get(server.url + "/health").status_code == 200
            lost = children - {child.pid for child in server.family()}
            found = statuses(server)
    print(f"{sum(found.values())} answers: {dict(sorted(found.items()))}")
    print(f"5xx: {sum(count for status, count in found.items() if status >= 500)}")
    print(f"processes that have ended: {len(lost)}; schemathesis' exit code: {code}")
    return code or bool(lost)


if __name__ == "__main__":
    sys.exit(main())
