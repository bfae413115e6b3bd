"""The flags of `cearx bench`, and the values that argparse has no types for.

Owns names, defaults and the refusal of values out of range. Flags carry the names of `vllm bench
serve` where they mean the same. Called by `cli.py`.
"""

import argparse
import math
from pathlib import Path

from cearx.frontend.bench.matrix import MatrixPoint, parse_points
from cearx.frontend.bench.metrics import Goodput
from cearx.frontend.chat_connection import DEFAULT_URL, base_url


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cearx bench", description="Measure a server that speaks OpenAI's API."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    matrix = verbs.add_parser("matrix", help="bursts of exact lengths, the 30 official points")
    _add_server(matrix)
    matrix.add_argument(
        "--points",
        type=_points,
        default="all",
        help="'all', or C1/I32/O256,C4/... (streams, prompt tokens, output tokens)",
    )
    matrix.add_argument("--reverse", action="store_true", help="run the points backwards")
    matrix.add_argument("--repeat", type=_positive, default=1, help="run all of them so often")
    serve = verbs.add_parser("serve", help="requests at a rate, of random lengths or from a file")
    _add_server(serve)
    _add_workload(serve)
    compare = verbs.add_parser("compare", help="two result files, point by point")
    compare.add_argument("baseline", type=Path, help="result file; may hold several engines")
    compare.add_argument("results", type=Path, help="result file that is compared with it")
    compare.add_argument("--model", help="the baseline's model (default: the one of the results)")
    plot = verbs.add_parser("plot", help="latency against load, as a page or a picture")
    plot.add_argument("files", type=Path, nargs="+", metavar="FILE", help="result files")
    plot.add_argument(
        "--output",
        type=Path,
        required=True,
        help=".html (one page, no dependencies) or .png (needs the extra cearx[bench])",
    )
    return parser


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base-url", type=base_url, default=DEFAULT_URL, help="server to measure (%(default)s)"
    )
    parser.add_argument("--model", help="name of the model (default: the first that is served)")
    parser.add_argument(
        "--endpoint",
        choices=("chat", "completions"),
        default="chat",
        help="chat sends words, completions token ids (%(default)s)",
    )
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="folder or .gguf file to count prompt tokens with (default: ask the server)",
    )
    parser.add_argument(
        "--token-ids",
        type=_token_ids,
        default=(1000, 10000),
        metavar="FIRST:END",
        help="ids that completions prompts are drawn from (1000:10000)",
    )
    parser.add_argument("--num-clients", type=_positive, help="client processes (default: auto)")
    parser.add_argument(
        "--request-timeout", type=_above_zero, default=3600.0, help="seconds (%(default)g)"
    )
    parser.add_argument("--seed", type=int, help="of prompts and arrivals (default: a new one)")
    for name, kind in (("temperature", float), ("top-p", float), ("top-k", int), ("min-p", float)):
        parser.add_argument(f"--{name}", type=kind, help="sampling (default: the server's)")
    parser.add_argument("--label", help="name of the engine in the results (default: the model)")
    parser.add_argument(
        "--stream-interval-label",
        type=_positive,
        help="tokens an event that the server was started with, for the record",
    )
    parser.add_argument("--output", type=Path, help="result file to write (JSON)")


def _add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--request-rate",
        type=_rates,
        default=(math.inf,),
        help="requests a second, 'inf' for all at once; several with commas give a row each",
    )
    parser.add_argument("--burstiness", type=float, default=1.0, help="1 is Poisson (%(default)g)")
    parser.add_argument("--num-prompts", type=int, default=1000, help="requests (%(default)s)")
    parser.add_argument("--max-concurrency", type=int, help="requests in flight (default: any)")
    parser.add_argument("--random-input-len", type=int, default=1024, help="tokens (%(default)s)")
    parser.add_argument("--random-output-len", type=int, default=128, help="tokens (%(default)s)")
    parser.add_argument(
        "--random-range-ratio", type=float, default=0.0, help="spread of both lengths, 0 to 1"
    )
    parser.add_argument(
        "--random-prefix-len", type=int, default=0, help="tokens that all prompts begin with"
    )
    parser.add_argument(
        "--dataset-path", type=Path, help="JSON lines with prompt and output_len, or ShareGPT JSON"
    )
    parser.add_argument("--output-len", type=_positive, help="output tokens for --dataset-path")
    parser.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="ttft:MS tpot:MS e2el:MS"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="outputs of exact lengths")
    parser.add_argument(
        "--save-result", action="store_true", help="write a file with a name of its own"
    )
    parser.add_argument(
        "--save-detailed", action="store_true", help="add every request's times to the file"
    )


def parse_goodput(bounds: list[str]) -> Goodput | None:
    """Raises ValueError."""
    limits: dict[str, float] = {}
    for bound in bounds:
        name, _, text = bound.partition(":")
        if name not in Goodput.__struct_fields__:
            names = ", ".join(Goodput.__struct_fields__)
            raise ValueError(f"--goodput takes NAME:MS with one of {names}, got {bound!r}")
        limits[name] = float(text)
        if not limits[name] > 0:
            raise ValueError(f"--goodput {name} must be above 0 ms, got {text}")
    return Goodput(**limits) if limits else None


def _points(text: str) -> tuple[MatrixPoint, ...]:
    try:
        return parse_points(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _above_zero(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return number


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(float(part) for part in text.split(","))
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"rates must be above 0, got {text}")
    return rates


def _token_ids(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    ids = int(first), int(end)
    if not 0 <= ids[0] < ids[1]:
        raise argparse.ArgumentTypeError(f"needs 0 <= FIRST < END, got {text}")
    return ids
