"""The CUDA worker without a GPU: kernels in Triton's interpreter, float32, the CPU worker as judge.

What only a GPU can show (capture, bfloat16, overlap) is checked by tests/gpu/check_worker.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from device_runners import EagerGraphs, device_decoder, device_runner, use_references
from local_engine import LocalEngine
from tiny_models import reference_logits, tiny_model
from transformers import PreTrainedModel
from worker_models import worker_config, worker_model

from cearx.core.config import SchedulerConfig
from cearx.core.events import Admission, BlocksGranted, PrefillChunk, StepPlan
from cearx.core.identifiers import BlockId, RequestId, StepId
from cearx.core.messages import Embed, ExecuteStep, NewRequest, SamplingParams, Score, pack_tokens
from cearx.worker.cuda.decode_group import DecodeGroup, decode_group
from cearx.worker.cuda.decoder import DeviceDecoder
from cearx.worker.cuda.padded_steps import MAX_CONTEXT, PaddedSteps, padded_step_sizes
from cearx.worker.cuda.runner import NOT_FINITE, CudaRunner
from cearx.worker.cuda.step_builder import ChunkWork
from cearx.worker.model_config import UnsupportedModel

VOCAB_SIZE = 301
MAX_LEN = 640
GREEDY = SamplingParams(temperature=0)
ON_DEVICE = [
    GREEDY,
    SamplingParams(seed=2**64 - 1, temperature=0.8),
    SamplingParams(seed=3, top_p=0.9, top_k=30),
    SamplingParams(seed=9, min_p=0.1, temperature=1.3),
]
ON_HOST = [
    SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=0.25),
    SamplingParams(seed=5, frequency_penalty=0.5, top_k=20),
    SamplingParams(temperature=0, num_logprobs=2),
    SamplingParams(temperature=0, min_tokens=3, eos_token_ids=tuple(range(0, VOCAB_SIZE, 2))),
    SamplingParams(seed=4, logit_bias=((7, 4.0), (8, -100.0))),
]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""NumPy, which the interpreter computes with, warns where a GPU's result is infinite as well."""

Capture = Callable[[CudaRunner], None]


def small(family: str, **options: Any) -> PreTrainedModel:
    """As small as the kernels take it: the interpreter is slow."""
    return tiny_model(family, **{"num_heads": 2, "num_kv_heads": 1, "num_layers": 2, **options})


@pytest.fixture(autouse=True)
def references(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's kernels are replaced where a test does not ask for them."""
    if "logits" not in request.node.name:
        use_references(monkeypatch)


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return small("qwen3", head_dim=16)


@pytest.fixture(scope="module")
def decoder(reference: PreTrainedModel) -> DeviceDecoder:
    return device_decoder(reference, MAX_LEN)


def on_device(
    decoder: DeviceDecoder, after: Capture | None = None, **sizes: Any
) -> tuple[LocalEngine, CudaRunner]:
    """An engine whose steps the device's runner executes."""
    made: list[CudaRunner] = []

    def make(config: SchedulerConfig) -> CudaRunner:
        made.append(device_runner(decoder, config))
        if after is not None:
            after(made[0])
        return made[0]

    engine = LocalEngine(None, decoder.config, make_runner=make, **sizes)  # type: ignore[arg-type]
    return engine, made[0]


def with_graphs(*sizes: int) -> Capture:
    """Decodes run as graphs of these sizes do, padded."""

    def attach(runner: CudaRunner) -> None:
        runner.graphs = EagerGraphs(runner._model, sizes)  # type: ignore[assignment]

    return attach


def with_padded(*sizes: int) -> Capture:
    """Steps with chunks run as graphs of these sizes do, padded; decodes too."""

    def attach(runner: CudaRunner) -> None:
        with_graphs(3, 8)(runner)
        runner.padded = runner.padded_steps(sizes)

    return attach


def prompts(count: int, longest: int = 30) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [
        rng.integers(0, VOCAB_SIZE, int(rng.integers(1, longest))).tolist() for _ in range(count)
    ]


@pytest.mark.parametrize(
    "model",
    [
        ("llama", {"num_heads": 4, "num_kv_heads": 2, "num_layers": 1}),
        (
            "llama",
            {
                "rope": (("rope_type", "yarn"), ("rope_theta", 1e4), ("factor", 4.0)),
                "num_layers": 1,
            },
        ),
        ("qwen2", {"tied": True, "num_layers": 1}),
        ("qwen3", {"num_heads": 3, "head_dim": 32}),
    ],
    ids=lambda model: f"{model[0]}-{'-'.join(model[1])}",
)
def test_logits_equal_transformers(
    model: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt in chunks and of decodes behind it, with norms, biases and scaled positions."""
    reference = small(model[0], **model[1])
    engine, runner = on_device(
        device_decoder(reference, MAX_LEN), num_blocks=8, budget=9, max_num_seqs=2
    )
    sample, seen = runner._model.sample, []

    def record(logits_RV: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(logits_RV.clone())
        return sample(logits_RV, *rest)

    monkeypatch.setattr(runner._model, "sample", record)
    prompt = prompts(1, 12)[0] + [5] * 8
    (tokens,) = engine.generate([prompt], 3)
    wanted_TV = reference_logits(reference, prompt + tokens[:-1])[len(prompt) - 1 :]
    torch.testing.assert_close(torch.cat(seen), wanted_TV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("num_blocks", "budget", "max_num_seqs", "caching", "depth", "graphs"),
    [
        (64, 20, 8, False, 2, (3, 8)),  # chunks beside decodes, padded decodes
        (5, 32, 4, False, 2, (4,)),  # preemption
        (5, 24, 4, True, 3, ()),
    ],
)
def test_tokens_equal_the_cpu_worker(
    reference: PreTrainedModel,
    decoder: DeviceDecoder,
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    caching: bool,
    depth: int,
    graphs: tuple[int, ...],
) -> None:
    """Greedy and seeded rows through chunks, mixed batches, preemption, seat reuse, pipelining."""
    sizes = {
        "num_blocks": num_blocks,
        "budget": budget,
        "max_num_seqs": max_num_seqs,
        "caching": caching,
        "pipeline_depth": depth,
        "admission": "greedy",
    }
    cases = prompts(5)
    if num_blocks == 5:  # four at once, all of which come to need a second block
        cases = [prompt + [7] * (14 - len(prompt)) for prompt in prompts(5, 14)]
    params = [ON_DEVICE[i % len(ON_DEVICE)] for i in range(len(cases))]
    judge = LocalEngine(worker_model(reference), decoder.config, **sizes)  # type: ignore[arg-type]
    wanted = judge.generate(cases, 5, params)
    engine, runner = on_device(decoder, with_graphs(*graphs) if graphs else None, **sizes)
    assert engine.generate(cases, 5, params) == wanted
    assert (engine.num_preemptions > 0) == (num_blocks == 5)
    if graphs:
        replayed = runner.graphs.replayed  # type: ignore[union-attr]
        assert {size for size, _ in replayed} <= set(graphs)
        assert replayed


@pytest.mark.parametrize(
    ("num_blocks", "depth", "seats", "params"),
    [(64, 2, 3, ON_DEVICE), (5, 3, 4, ON_DEVICE), (64, 1, 5, [*ON_HOST, *ON_DEVICE])],
    ids=["mixed", "preempting", "host"],
)
def test_padded_steps_with_chunks(
    reference: PreTrainedModel,
    decoder: DeviceDecoder,
    monkeypatch: pytest.MonkeyPatch,
    num_blocks: int,
    depth: int,
    seats: int,
    params: list[SamplingParams],
) -> None:
    """Chunks with a prefix, several in a step and beside decodes, give the CPU worker's tokens."""
    cases = [prompt + [7] * 15 for prompt in prompts(9, 15)]
    if num_blocks == 5:  # four at once, all of which come to need a second block
        cases = [prompt + [7] * (14 - len(prompt)) for prompt in prompts(5, 14)]
    params = [params[i % len(params)] for i in range(len(cases))]
    sizes = {
        "num_blocks": num_blocks,
        "budget": 24,
        "max_num_seqs": seats,
        "pipeline_depth": depth,
        "admission": "greedy",
    }
    judge = LocalEngine(worker_model(reference), decoder.config, **sizes)  # type: ignore[arg-type]
    wanted = judge.generate(cases, 5, params)
    seen: set[tuple[bool, bool, int, bool]] = set()
    send = PaddedSteps.send

    def record(padded: PaddedSteps, size: int, decodes: DecodeGroup, chunks: Any) -> None:
        has_prefix = any(chunk.start > 0 for chunk in chunks)
        num_tokens = len(decodes.states) + sum(chunk.num_tokens for chunk in chunks)
        seen.add((num_tokens < size, bool(decodes.states), len(chunks), has_prefix))
        send(padded, size, decodes, chunks)

    engine, _ = on_device(decoder, with_padded(6, 13, 24), **sizes)
    monkeypatch.setattr(PaddedSteps, "send", record)
    assert engine.generate(cases, 5, params) == wanted
    assert (engine.num_preemptions > 0) == (num_blocks == 5)
    assert any(with_decodes and count > 1 for _, with_decodes, count, _ in seen)
    assert any(has_prefix for *_, has_prefix in seen) or num_blocks == 5
    assert any(is_padded for is_padded, *_ in seen)


def test_steps_that_are_not_padded(decoder: DeviceDecoder) -> None:
    """Too many tokens or rows, or a decode that reads too far."""
    runner = small_runner(decoder)
    runner.execute(step_of([1, 2], [3], [4, 5, 6]))
    states = [runner._states[RequestId(i)] for i in range(3)]
    decodes = decode_group((RequestId(0), RequestId(1)), states[:2])
    padded = runner.padded_steps((2, 4))
    known = np.full(5, MAX_CONTEXT)
    nobody, one = decode_group((), ()), [ChunkWork(states[2], 0, 1, False)]
    assert padded.size_of(nobody, one, known) == 2
    assert padded.size_of(decodes, one, known) == 4
    assert padded.size_of(decodes, one, known + 1) is None
    assert padded.size_of(nobody, one, known + 1) == 2
    assert padded.size_of(decodes, [ChunkWork(states[2], 0, 3, False)], known) is None
    assert padded.size_of(decodes, one * 3, known) is None
    assert padded_step_sizes(100) == (16, 32, 64)


@pytest.mark.parametrize("graphs", [(), (2, 9)])
def test_rows_that_the_host_samples(
    reference: PreTrainedModel, decoder: DeviceDecoder, graphs: tuple[int, ...]
) -> None:
    """Penalties, bias, log-probabilities and min_tokens beside rows of the device, and joining."""
    params = [*ON_HOST, *ON_DEVICE]
    cases = prompts(len(params), 12)
    sizes = {"num_blocks": 64, "budget": 64, "max_num_seqs": 6}
    judge = LocalEngine(worker_model(reference), decoder.config, **sizes)  # type: ignore[arg-type]
    wanted = judge.generate(cases, 6, params)
    engine, _ = on_device(decoder, with_graphs(*graphs) if graphs else None, **sizes)
    assert engine.generate(cases, 6, params) == wanted


def step_of(
    *prompts: list[int], params: SamplingParams = GREEDY, decodes: tuple[int, ...] = ()
) -> ExecuteStep:
    """Admits the prompts as requests 0, 1, ... with a block each; or decodes requests."""
    ids = [RequestId(i) for i in range(len(prompts))]
    plan = StepPlan(
        step_id=StepId(0),
        decodes=tuple(map(RequestId, decodes)),
        chunks=tuple(
            PrefillChunk(request_id=i, start=0, num_tokens=len(prompts[i]), samples=True)
            for i in ids
        ),
        granted=tuple(BlocksGranted(request_id=i, block_ids=(BlockId(i),)) for i in ids),
        admitted=tuple(Admission(request_id=i, num_cached_tokens=0) for i in ids),
        preempted=(),
        waits=(),
    )
    new = tuple(
        NewRequest(request_id=i, token_ids=pack_tokens(prompts[i]), sampling=params) for i in ids
    )
    return ExecuteStep(plan=plan, new_requests=new, ended=())


def small_runner(decoder: DeviceDecoder) -> CudaRunner:
    """Room for four requests of a few blocks."""
    config = SchedulerConfig(
        block_size=16,
        num_blocks=8,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )
    return device_runner(decoder, config)


def test_a_request_that_cannot_be_set_up_fails_alone(decoder: DeviceDecoder) -> None:
    """Its row has the reason, the others their tokens."""
    runner = small_runner(decoder)
    rows = runner.execute(step_of([1, 2], [3, VOCAB_SIZE], [4])).rows
    assert [row.token_id is None for row in rows] == [False, True, False]
    assert "prompt must be token ids in 0..300, got 301" in str(rows[1].error)


def test_logits_that_are_not_finite_fail_their_row(
    decoder: DeviceDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled on the device, the row has no token and its seat stays as it was."""
    runner = small_runner(decoder)
    forward = runner._model.forward

    def poisoned(tensors: Any) -> torch.Tensor:
        logits_RV = forward(tensors)
        logits_RV[1, 7] = torch.nan
        return logits_RV

    monkeypatch.setattr(runner._model, "forward", poisoned)
    rows = runner.execute(step_of([1, 2], [3, 4], [5])).rows
    assert [row.error for row in rows] == [None, NOT_FINITE, None]
    assert runner._batch.num_tokens_S[:3].tolist().count(3) == 1  # grew from two tokens


def test_two_steps_in_flight_and_an_over_run(decoder: DeviceDecoder) -> None:
    """A second decode is launched before the first is collected; a gone request's row is harmless.

    Its seat goes to a newcomer in the very next step.
    """
    alone = small_runner(decoder)
    wanted = [alone.execute(step_of([5, 6, 7])).rows[0].token_id]
    runner = small_runner(decoder)
    first = step_of([1, 2, 3])
    runner.launch(first)
    runner.launch(step_of(decodes=(0,)))  # the core has not seen the token that ends it
    newcomer = step_of([5, 6, 7])
    plan = newcomer.plan
    runner.launch(
        ExecuteStep(
            plan=StepPlan(
                step_id=StepId(2),
                decodes=(),
                chunks=(
                    PrefillChunk(request_id=RequestId(9), start=0, num_tokens=3, samples=True),
                ),
                granted=(BlocksGranted(request_id=RequestId(9), block_ids=(BlockId(3),)),),
                admitted=(Admission(request_id=RequestId(9), num_cached_tokens=0),),
                preempted=plan.preempted,
                waits=plan.waits,
            ),
            new_requests=(
                NewRequest(
                    request_id=RequestId(9), token_ids=pack_tokens([5, 6, 7]), sampling=GREEDY
                ),
            ),
            ended=(RequestId(0),),
        )
    )
    assert runner.num_in_flight == 3
    results = [runner.collect() for _ in range(3)]
    assert [r is not None and r.rows[0].request_id for r in results] == [0, 0, 9]
    assert [row.token_id for row in results[2].rows] == wanted  # type: ignore[union-attr]
    assert runner.collect() is None


@pytest.mark.parametrize("host", [False, True])
def test_a_lack_of_memory_divides_the_step(
    reference: PreTrainedModel,
    decoder: DeviceDecoder,
    monkeypatch: pytest.MonkeyPatch,
    host: bool,
) -> None:
    """Steps above half the size fail once, and all tokens come out as if they had not."""
    cases = prompts(5)
    params = [*ON_DEVICE, ON_HOST[0] if host else GREEDY]
    sizes = {"num_blocks": 64, "budget": 40, "max_num_seqs": 4}
    judge = LocalEngine(worker_model(reference), decoder.config, **sizes)  # type: ignore[arg-type]
    wanted = judge.generate(cases, 4, params)
    engine, runner = on_device(decoder, **sizes)
    forward, failed = runner._model.forward, []

    def scarce(tensors: Any) -> torch.Tensor:
        if len(tensors.input_ids_T) > 20:
            failed.append(len(tensors.input_ids_T))
            raise torch.cuda.OutOfMemoryError("no memory")
        return forward(tensors)

    monkeypatch.setattr(runner._model, "forward", scarce)
    assert engine.generate(cases, 4, params) == wanted
    assert failed


@pytest.mark.parametrize("host", [False, True])
def test_decodes_that_lack_memory_are_tried_again_once(
    reference: PreTrainedModel,
    decoder: DeviceDecoder,
    monkeypatch: pytest.MonkeyPatch,
    host: bool,
) -> None:
    """Every other forward pass over decodes fails, no token changes; two failures are the end."""
    cases = prompts(3)
    params = [ON_HOST[0] if host else GREEDY] * len(cases)
    sizes = {"num_blocks": 64, "budget": 64, "max_num_seqs": 4}
    judge = LocalEngine(worker_model(reference), decoder.config, **sizes)  # type: ignore[arg-type]
    wanted = judge.generate(cases, 4, params)
    engine, runner = on_device(decoder, **sizes)
    forward, calls = runner._model.forward, []

    def scarce(tensors: Any) -> torch.Tensor:
        if tensors.seats_C is None:
            calls.append(len(tensors.input_ids_T))
            if len(calls) % 2:
                raise torch.cuda.OutOfMemoryError("no memory")
        return forward(tensors)

    monkeypatch.setattr(runner._model, "forward", scarce)
    assert engine.generate(cases, 4, params) == wanted
    assert len(calls) >= 6

    def never(tensors: Any) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(runner._model, "forward", never)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        engine.generate(cases, 2, params)


@pytest.mark.parametrize(
    "step",
    [
        step_of(decodes=(5,)),  # nobody knows it
        step_of([1] * 17),  # one block holds 16
    ],
)
def test_a_step_that_contradicts_the_states(decoder: DeviceDecoder, step: ExecuteStep) -> None:
    """Nothing is computed for a plan that does not fit what is known."""
    with pytest.raises((AssertionError, KeyError)):
        small_runner(decoder).launch(step)


def test_biases_in_the_mlp_are_refused() -> None:
    """The line says where the model can run."""
    with pytest.raises(UnsupportedModel, match="--device cpu"):
        device_decoder(small("llama-bias"), MAX_LEN)
    with pytest.raises(UnsupportedModel, match="head_dim 24"):
        device_decoder(small("llama", head_dim=24), MAX_LEN)
    assert worker_config(small("llama")).head_dim == 16


@pytest.mark.parametrize("after", [None, with_padded(16, 48)], ids=["launched", "padded"])
def test_vectors_are_those_of_the_cpu(
    reference: PreTrainedModel, decoder: DeviceDecoder, after: Capture | None
) -> None:
    """Embeddings and scores beside texts that the device samples, in chunks and after hits."""
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 16, "budget": 48, "max_num_seqs": 8}
    engine, _ = on_device(decoder, after, **sizes)
    judge = LocalEngine(worker_model(reference), decoder.config, **sizes)
    batch, beside = prompts(4, longest=60), prompts(1)
    for pooling in (Embed(dimensions=5), Score(negative=4, positive=77)):
        for _ in range(2):
            found = engine.pool(batch, pooling, beside=beside, num_beside=3)
            wanted = judge.pool(batch, pooling, beside=beside, num_beside=3)
            for vector, right in zip(found, wanted, strict=True):
                assert vector == pytest.approx(right, abs=1e-5)
    assert engine.num_cached_tokens == judge.num_cached_tokens > 0
