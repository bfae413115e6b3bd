"""Start-up on a CUDA device: weights, measurements, KV pool, graphs, warm-up.

Owns the order, which is the point: every buffer is allocated and every kernel compiled before the
first graph is captured, and the KV pool takes what the largest step and the graphs leave. Called
once by the process.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog
import torch

from cearx.core.child import StartupError
from cearx.core.config import WorkerConfig, WorkerLaunch, graph_sizes
from cearx.worker.cuda.compile_watch import CompileWatch
from cearx.worker.cuda.decoder import DeviceDecoder, StepTensors, Workspace
from cearx.worker.cuda.device_batch import DeviceBatch
from cearx.worker.cuda.device_model import DeviceModel
from cearx.worker.cuda.graph_runner import MODES, StepGraphs, decode_graph_sizes
from cearx.worker.cuda.memory import GRAPH_MARGIN, Measured, cuda_memory_table, plan_cuda_memory
from cearx.worker.cuda.padded_steps import padded_step_sizes
from cearx.worker.cuda.runner import CudaRunner
from cearx.worker.cuda.staging import InputStaging, TokenRing
from cearx.worker.cuda.warm_up import warm_products, warm_up
from cearx.worker.device import StepSizes
from cearx.worker.kv_cache import block_bytes, kv_type
from cearx.worker.memory_plan import weights_text
from cearx.worker.model_config import ModelConfig
from cearx.worker.model_loader import DTYPES, Checkpoint, bytes_by_form, fill_from, open_checkpoint
from cearx.worker.request_states import RequestStates
from cearx.worker.sampler import Sampler
from cearx.worker.seats import SeatTable

MAX_IN_FLIGHT = 4
"""Steps whose tokens may be on their way at once; the core has two."""

log = structlog.get_logger()


@dataclass(frozen=True, eq=False)
class StartedCuda:
    """What start-up leaves behind."""

    runner: CudaRunner
    config: ModelConfig
    num_blocks: int
    max_model_len: int
    memory_table: str
    stage_seconds: dict[str, float]
    compile_watch: CompileWatch


class _Stages:
    """Seconds of each stage, for the log."""

    def __init__(self, progress: Callable[[str, int, int], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._begin = time.monotonic()

    def enter(self, name: str) -> Callable[[int, int], None]:
        self._begin = time.monotonic()
        self._progress(name, 0, 0)
        return lambda done, total: self._progress(name, done, total)

    def leave(self, name: str) -> None:
        torch.cuda.synchronize()
        self.seconds[name] = round(time.monotonic() - self._begin, 2)


def start_cuda(
    spec: WorkerLaunch,
    sizes: StepSizes,
    device: torch.device,
    progress: Callable[[str, int, int], None],
) -> StartedCuda:
    """Everything up to the first step; raises StartupError for what the person can mend."""
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    try:
        return _start(spec, sizes, device, _Stages(progress))
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise StartupError(
            f"out of GPU memory at start ({free / 2**30:.1f} of {total / 2**30:.1f} GiB free): "
            f"{str(error).splitlines()[0]}"
        ) from error


@torch.inference_mode()
def _start(
    spec: WorkerLaunch, sizes: StepSizes, device: torch.device, stages: _Stages
) -> StartedCuda:
    on_progress = stages.enter("loading weights")
    checkpoint = open_checkpoint(spec.model, spec.config)
    config = checkpoint.config
    wanted = _wanted_length(spec.config, config)
    decoder = load_decoder(checkpoint, spec.config, wanted, device, on_progress)
    stages.leave("loading weights")
    by_form = bytes_by_form(decoder.weight_slots(), {}, decoder.dtype)
    log.info(weights_text(by_form))
    weights = sum(by_form.values())

    stages.enter("measuring memory")
    before = torch.cuda.memory_allocated(device)
    kv_dtype = kv_type(spec.config.kv_cache_dtype, decoder.dtype, device)
    model = build_model(decoder, sizes, wanted, kv_dtype)
    sizes_with_graph = decode_graph_sizes(_given_sizes(spec.config), sizes.max_num_seqs)
    measured = _measure(model, sizes, wanted, weights, before, sizes_with_graph, spec.config)
    plan = plan_cuda_memory(
        spec.config,
        measured,
        block_size=sizes.block_size,
        bytes_per_block=block_bytes(config, sizes.block_size, kv_dtype),
        max_num_seqs=sizes.max_num_seqs,
        model_len_wanted=wanted,
    )
    model.allocate_kv(plan.num_blocks)
    stages.leave("measuring memory")

    stages.enter("warming up")
    runner = build_runner(model, sizes, plan.max_model_len)
    warm_up(runner, sizes, plan.num_blocks, plan.max_model_len)
    warm_products(model, sizes.max_num_batched_tokens)
    stages.leave("warming up")
    graph_bytes = 0
    if not spec.config.enforce_eager:
        on_progress = stages.enter("capturing graphs")
        free = free_bytes(device)
        graphs = StepGraphs(sizes_with_graph, torch.cuda.current_stream(device))
        graphs.capture(model.decode, on_progress)
        padded = runner.padded_steps(padded_step_sizes(sizes.max_num_batched_tokens))
        padded.capture(torch.cuda.current_stream(device), on_progress)
        stages.leave("capturing graphs")
        graph_bytes = free - free_bytes(device)
        runner.graphs, runner.padded = graphs, padded
        warm_up(runner, sizes, plan.num_blocks, plan.max_model_len)
    watch = CompileWatch()
    watch.arm()
    log.info("start-up", **stages.seconds)
    return StartedCuda(
        runner=runner,
        config=config,
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        memory_table=cuda_memory_table(plan, graph_bytes, torch.cuda.mem_get_info(device)[0]),
        stage_seconds=stages.seconds,
        compile_watch=watch,
    )


def load_decoder(
    checkpoint: Checkpoint,
    config: WorkerConfig,
    max_model_len: int,
    device: torch.device,
    on_progress: Callable[[int, int], None],
) -> DeviceDecoder:
    """A decoder with its weights on the device."""
    dtype = DTYPES[config.dtype]
    if config.dtype == "auto":
        is_half = checkpoint.config.source_dtype == "float16"
        dtype = torch.float16 if is_half else torch.bfloat16
    fp8 = config.quantization == "fp8"
    decoder = DeviceDecoder(checkpoint.config, max_model_len, dtype, device, fp8=fp8)
    fill_from(checkpoint, decoder.weight_slots(), config, device, dtype, on_progress)
    return decoder


def build_model(
    decoder: DeviceDecoder,
    sizes: StepSizes,
    max_model_len: int,
    kv_dtype: torch.dtype | None = None,
) -> DeviceModel:
    """All buffers of the largest step; the KV pool has one block until it is allocated.

    Keys and values are of the model's type where `kv_dtype` names none.
    """
    max_blocks = -(-max_model_len // sizes.block_size)
    batch = DeviceBatch(sizes.max_num_seqs, max_blocks, decoder.device)
    workspace = Workspace(
        decoder.config,
        sizes.max_num_batched_tokens,
        sizes.max_num_seqs,
        decoder.dtype,
        decoder.device,
        fp8=decoder.fp8,
    )
    model = DeviceModel(decoder, batch, workspace, sizes.block_size, kv_dtype or decoder.dtype)
    model.allocate_kv(1)
    return model


def build_runner(model: DeviceModel, sizes: StepSizes, max_model_len: int) -> CudaRunner:
    """The runner of a model whose KV pool is allocated."""
    device, vocab_size = model.decoder.device, model.decoder.config.vocab_size
    seats = SeatTable(sizes.max_num_seqs, max_model_len, sizes.block_size)
    # Changes of a step: at most every seat's whole row, a word and its int64 index each.
    words_a_seat = 3 * (seats.max_blocks + 16) + 16
    num_words = 6 * sizes.max_num_batched_tokens + words_a_seat * (sizes.max_num_seqs + 1) + 64
    return CudaRunner(
        model,
        RequestStates(seats, vocab_size),
        InputStaging(num_words, device),
        TokenRing(sizes.max_num_seqs, device, MAX_IN_FLIGHT),
        Sampler(vocab_size),
    )


def _wanted_length(config: WorkerConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len or model.max_position_embeddings
    if wanted > model.max_position_embeddings:
        raise StartupError(
            f"--max-model-len is {wanted}, the model has {model.max_position_embeddings} positions"
        )
    return wanted


def _given_sizes(config: WorkerConfig) -> tuple[int, ...] | None:
    return None if config.cuda_graph_sizes is None else graph_sizes(config.cuda_graph_sizes)


def _measure(
    model: DeviceModel,
    sizes: StepSizes,
    max_model_len: int,
    weights: int,
    allocated_before: int,
    sizes_with_graph: tuple[int, ...],
    config: WorkerConfig,
) -> Measured:
    """Runs the largest prefill and decode in a pool of one block, and captures two sizes."""
    device = model.decoder.device
    buffers = torch.cuda.memory_allocated(device) - allocated_before
    torch.cuda.reset_peak_memory_stats(device)
    base = torch.cuda.memory_allocated(device)
    model.forward(largest_prefill(model, sizes, max_model_len))
    for mode in MODES:
        model.decode(sizes.max_num_seqs, mode)
    torch.cuda.synchronize()
    activations = torch.cuda.max_memory_allocated(device) - base
    torch.cuda.empty_cache()
    graph_bytes = 0
    if not config.enforce_eager:
        graph_bytes = _measure_graphs(
            model, sizes_with_graph, len(padded_step_sizes(sizes.max_num_batched_tokens))
        )
    free, total = torch.cuda.mem_get_info(device)
    return Measured(
        total_bytes=total,
        used_bytes=total - free,
        weight_bytes=weights,
        buffer_bytes=buffers,
        activation_bytes=activations,
        graph_bytes=graph_bytes,
    )


def free_bytes(device: torch.device) -> int:
    """Of the GPU, with nothing that this process keeps for later.

    A capture gives that back before it begins. Where the steps before it had left more than the
    graphs then took, a difference without this was negative.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def _measure_graphs(model: DeviceModel, sizes: tuple[int, ...], num_padded: int) -> int:
    """Bytes of all graphs, from the first, which brings the pool, and the next of its size.

    The `num_padded` sizes of steps with chunks have a pool of their own and as many kernels.
    """
    device = model.decoder.device
    trial = StepGraphs(sizes, torch.cuda.current_stream(device))
    free = [free_bytes(device)]
    for mode in MODES:
        trial.capture_one(model.decode, sizes[-1], mode)
        free.append(free_bytes(device))
    first, later = free[0] - free[1], max(free[1] - free[2], free[2] - free[3])
    del trial
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    num_graphs, num_pools = (len(sizes) + num_padded) * len(MODES), 2 if num_padded else 1
    return int(GRAPH_MARGIN * (first * num_pools + later * (num_graphs - num_pools)))


def largest_prefill(model: DeviceModel, sizes: StepSizes, max_model_len: int) -> StepTensors:
    """A step of `max_num_batched_tokens` tokens in the longest chunks that there can be."""
    device, total = model.decoder.device, sizes.max_num_batched_tokens
    length = max(min(max_model_len, total), -(-total // sizes.max_num_seqs))
    ends = np.minimum(np.arange(length, total + length, length), total)
    starts = np.concatenate(([0], ends[:-1]))
    lengths = (ends - starts).astype(np.int32)
    positions = (np.arange(total) - np.repeat(starts, lengths)) % max_model_len
    nobody = torch.zeros(0, dtype=torch.int32, device=device)
    return StepTensors(
        input_ids_T=torch.zeros(total, dtype=torch.int64, device=device),
        positions_T=torch.from_numpy(positions).to(device),
        slots_T=torch.from_numpy(positions % sizes.block_size).to(device),
        block_tables_SM=model.batch.block_tables_SM,
        seats_D=nobody,
        seq_lens_D=nobody,
        seats_C=torch.arange(len(ends), dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *ends.tolist()], dtype=torch.int32, device=device),
        seq_lens_C=torch.from_numpy(lengths).to(device),
        max_chunk_len=int(lengths.max()),
        logits_indices_R=torch.from_numpy(ends - 1).to(device),
    )
