"""`cearx bench`: one of its verbs, from the flags to the exit code.

Owns what each verb is made of. Exit codes: 0 when every stream was right, 1 when some failed, 2
when nothing could be measured, 130 after Ctrl-C. Called by the command line.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console

from cearx.frontend.bench.bench_error import BenchError
from cearx.frontend.bench.compare import choose_baseline, compare, show
from cearx.frontend.bench.dataset import DatasetPrompt, read_dataset
from cearx.frontend.bench.display import Display
from cearx.frontend.bench.local_count import local_counter
from cearx.frontend.bench.matrix import MatrixRunner
from cearx.frontend.bench.options import build_parser, parse_goodput
from cearx.frontend.bench.plot import plot
from cearx.frontend.bench.prompt_source import PromptSource, open_source
from cearx.frontend.bench.results import read_results
from cearx.frontend.bench.serve import ServeRunner, Workload
from cearx.frontend.bench.session import chosen_seed, open_session, recorder

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    display = Display(Console())
    try:
        if options.verb == "matrix":
            is_ok = asyncio.run(_matrix(options, display))
        elif options.verb == "serve":
            is_ok = asyncio.run(_serve(options, display))
        elif options.verb == "compare":
            is_ok = _compare(options, display)
        else:
            plot(options.files, options.output)
            is_ok = True
    except (BenchError, ValueError) as error:
        print(f"cearx bench: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0 if is_ok else EXIT_FAILED


async def _matrix(options: argparse.Namespace, display: Display) -> bool:
    points = options.points[::-1] if options.reverse else options.points
    seed = chosen_seed(options)
    most = max(point.concurrency for point in points)
    async with open_session(options, most, ignores_eos=True) as (endpoint, fleet):
        source = await open_source(
            endpoint, seed=seed, tokenizer=options.tokenizer, token_ids=options.token_ids
        )
        order = "reversed" if options.reverse else "forwards"
        results = recorder(
            options,
            endpoint,
            {"seed": seed, "order": order, "points": len(points), "repeat": options.repeat},
        )
        runner = MatrixRunner(fleet, endpoint, source, display)
        is_ok = await runner.run(points, options.repeat, results.add)
    results.tell(display)
    return is_ok


async def _serve(options: argparse.Namespace, display: Display) -> bool:
    seed = chosen_seed(options)
    goodput = parse_goodput(options.goodput)
    workload = Workload(
        num_prompts=options.num_prompts,
        max_concurrency=options.max_concurrency,
        burstiness=options.burstiness,
        input_len=options.random_input_len,
        output_len=options.random_output_len,
        range_ratio=options.random_range_ratio,
        prefix_len=options.random_prefix_len,
        ignore_eos=options.ignore_eos,
        seed=seed,
    )
    most = min(workload.num_prompts, workload.max_concurrency or workload.num_prompts)
    async with open_session(options, most, ignores_eos=workload.ignore_eos) as (endpoint, fleet):
        source: PromptSource | list[DatasetPrompt]
        if options.dataset_path is not None:
            counter = options.tokenizer and local_counter(options.tokenizer, "completions")
            source = read_dataset(options.dataset_path, options.output_len, counter)
        else:
            source = await open_source(
                endpoint,
                seed=seed,
                tokenizer=options.tokenizer,
                token_ids=options.token_ids,
                prefix_len=workload.prefix_len,
            )
        results = recorder(options, endpoint, msgspec.to_builtins(workload))
        runner = ServeRunner(fleet, endpoint, workload, source, display)
        is_ok = await runner.run(options.request_rate, goodput, options.save_detailed, results.add)
    results.tell(display)
    return is_ok


def _compare(options: argparse.Namespace, display: Display) -> bool:
    """Every run of the results beside the baseline; answers whether none of their points failed."""
    baselines = read_results(options.baseline)
    is_ok = True
    for run in read_results(options.results):
        baseline = choose_baseline(baselines, options.model or run.model)
        comparison = compare(baseline, run)
        show(comparison, baseline, display.console)
        is_ok = is_ok and not comparison.failed
    return is_ok


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
