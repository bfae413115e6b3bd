"""The burst matrix of a dummy model in one command: makes the model, serves it, measures, stops.

Owns a measurement, not a test: run it by hand on a machine with a GPU (or with a small config.json
on the CPU). All orders run in one lifetime of the server. Into the folder of --output go a result
file for each order, the server's log and its trace, which is on as it is by default.

    python tests/benchmarks/gpu_matrix.py qwen3_8b --points all --orders forwards,reversed
"""

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / ".typing"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import httpx
from make_dummy_model import find_config, make_dummy_model

from cearx.frontend.bench.results import read_results, write_results

ROOT = Path(__file__).parents[2]
END_TIMEOUT_S = 60
LOG_LINES = 40


def hardware() -> str:
    if shutil.which("nvidia-smi") is None:
        return f"{os.cpu_count()} cores, {platform.machine()}"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return "; ".join(answer.split("\n")).strip("; ")


def wait_ready(server: subprocess.Popen[bytes], url: str, timeout_s: float) -> float:
    """Seconds until /health says yes; raises SystemExit when the server ends or takes too long."""
    start = time.monotonic()
    while time.monotonic() - start < timeout_s:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with exit code {server.returncode}")
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return time.monotonic() - start
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"the server was not ready after {timeout_s:g} s")


def measure(options: argparse.Namespace, url: str, order: str) -> int:
    output = options.output / f"{options.name}-{order}.json"
    command = [sys.executable, "-P", "-m", "cearx.core.cli", "bench", "matrix", "--base-url", url]
    command += ["--points", options.points, "--output", str(output), "--label", "CearX"]
    command += ["--repeat", str(options.repeat), "--temperature", str(options.temperature)]
    command += ["--reverse"] if order == "reversed" else []
    code = subprocess.run([*command, *options.bench_args.split()], check=False).returncode
    if output.is_file():
        runs = read_results(output)
        for run in runs:
            run.hardware = hardware()
            run.method = f"cearx serve {options.serve_args}".strip()
        write_results(output, runs)
    return code


def show_log(text: str) -> None:
    """The last lines that tell of no request."""
    lines = [line for line in text.splitlines() if "path=/" not in line]
    print("\n".join(lines[-LOG_LINES:]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="qwen3_8b, qwen3_0.6b, or the path of a config.json")
    parser.add_argument("--name", help="of the model and the files (default: the model's)")
    parser.add_argument("--points", default="all")
    parser.add_argument("--orders", default="forwards", help="forwards, reversed, or both")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--serve-args", default="", help="more flags of cearx serve, one text")
    parser.add_argument("--bench-args", default="", help="more flags of cearx bench matrix")
    parser.add_argument("--port", type=int, default=8321)
    parser.add_argument("--ready-timeout", type=float, default=300.0)
    parser.add_argument("--output", type=Path, default=Path("gpu_matrix"), help="folder")
    options = parser.parse_args()
    options.name = options.name or Path(options.model).name.removesuffix(".json")
    options.output.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / ".typing"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    url = f"http://127.0.0.1:{options.port}"
    codes = []
    with tempfile.TemporaryDirectory() as scratch, open(options.output / "server.log", "wb") as log:
        folder = make_dummy_model(find_config(options.model), Path(scratch) / options.name)
        command = [sys.executable, "-P", "-m", "cearx.core.cli", "serve", str(folder)]
        command += ["--load-format", "dummy", "--port", str(options.port)]
        command += ["--served-model-name", options.name]
        command += ["--trace", str(options.output / "trace")]
        server = subprocess.Popen(
            [*command, *options.serve_args.split()], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            seconds = wait_ready(server, url, options.ready_timeout)
            print(f"{options.name} on {hardware()}: ready after {seconds:.1f} s", flush=True)
            for order in options.orders.split(","):
                codes.append(measure(options, url, order))
        finally:
            server.send_signal(signal.SIGINT)
            try:
                print(f"the server ended with exit code {server.wait(END_TIMEOUT_S)}")
            except subprocess.TimeoutExpired:
                server.kill()
                print(f"the server did not end within {END_TIMEOUT_S} s and was killed")
            show_log(Path(log.name).read_text(errors="replace"))
    return max(codes, default=1)


if __name__ == "__main__":
    sys.exit(main())
