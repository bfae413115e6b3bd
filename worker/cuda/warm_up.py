"""Warm-up: real steps of many sizes, so that no kernel is compiled when requests come.

Owns the shapes: prompts from one token to the largest step, alone and beside decodes, sampled in
every way. Uses the runner as the core will and leaves no request behind. The library loads one of
many kernels for a number of tokens when it first meets it, which takes up to a tenth of a second:
one layer's products run for numbers of tokens over the whole range. Called at start.
"""

from collections.abc import Iterator, Sequence

from cearx.core.identifiers import RequestId
from cearx.core.messages import ExecuteStep, SamplingParams
from cearx.worker.cuda.device_model import DeviceModel
from cearx.worker.cuda.runner import CudaRunner
from cearx.worker.device import StepSizes
from cearx.worker.warm_up_step import warm_up_step

LENGTHS = (1, 2, 3, 5, 9, 17, 32, 33, 64, 65, 128, 129, 256, 257, 300, 512, 1024, 4096)
"""Prompts that are computed alone; the largest step comes behind them."""
NUM_DECODES = (1, 2, 17, 64, 256)
"""Decodes beside which a prompt is computed."""
SAMPLING = (
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_k=5, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=0, num_logprobs=0),
)


PRODUCT_STEP, MAX_PRODUCTS = 32, 136
"""Products run for every 32nd number of tokens, or for as many numbers as this."""


def warm_up(runner: CudaRunner, sizes: StepSizes, num_blocks: int, max_model_len: int) -> None:
    """Runs the steps that fit the sizes; raises what the model raises."""
    longest = min(
        max_model_len - 1, sizes.max_num_batched_tokens, num_blocks * sizes.block_size - 1
    )
    if longest < 1:
        return
    for step in _steps(sizes, num_blocks, longest):
        runner.execute(step)


def warm_products(model: DeviceModel, max_num_tokens: int) -> None:
    """Lets the library load what products of up to so many tokens need."""
    for num_tokens in product_sizes(max_num_tokens):
        model.run_products(num_tokens)


def product_sizes(max_num_tokens: int) -> list[int]:
    """Numbers of tokens, and each one's successor, as odd numbers may have kernels of their own."""
    distance = max(PRODUCT_STEP, -(-max_num_tokens // MAX_PRODUCTS))
    found = {*range(distance, max_num_tokens, distance), max_num_tokens}
    return sorted(found | {n + 1 for n in found if n < max_num_tokens} | {1})


def _steps(sizes: StepSizes, num_blocks: int, longest: int) -> Iterator[ExecuteStep]:
    for index, length in enumerate(sorted({min(n, longest) for n in (*LENGTHS, longest)})):
        request = [RequestId(0)]
        yield _step(sizes, arriving=request, length=length, sampling=index)
        yield _step(sizes, ended=request)
    count = min(sizes.max_num_batched_tokens // longest, sizes.max_num_seqs)
    count = min(count, num_blocks // -(-(longest + 1) // sizes.block_size))
    requests = [RequestId(i) for i in range(count)]
    yield _step(sizes, arriving=requests, length=longest)
    yield _step(sizes, ended=requests)
    for index, count in enumerate(NUM_DECODES):
        count = min(count, sizes.max_num_seqs - 1, num_blocks - 1, sizes.max_num_batched_tokens - 1)
        if count < 1:
            continue
        requests = [RequestId(i) for i in range(count)]
        newcomer = [RequestId(count)]
        yield _step(sizes, arriving=requests, length=1, sampling=index)
        yield _step(sizes, decodes=requests, arriving=newcomer, length=1, sampling=index)
        yield _step(sizes, decodes=requests)
        yield _step(sizes, ended=[*requests, *newcomer])


def _step(
    sizes: StepSizes,
    *,
    decodes: Sequence[RequestId] = (),
    arriving: Sequence[RequestId] = (),
    ended: Sequence[RequestId] = (),
    length: int = 0,
    sampling: int = 0,
) -> ExecuteStep:
    """Request r has the rule `sampling + r`, which goes round."""
    return warm_up_step(
        decodes=decodes,
        arriving=arriving,
        ended=ended,
        length=length,
        blocks_each=-(-(length + 1) // sizes.block_size),
        sampling=[SAMPLING[(sampling + i) % len(SAMPLING)] for i in range(len(SAMPLING))],
    )
