"""The core's engine and a worker's step runner in one process: real decisions, a real model."""

from array import array
from collections.abc import Callable, Sequence

import torch

from cearx.core.block_hash import prompt_hashes, root_hash
from cearx.core.config import SchedulerConfig
from cearx.core.engine import Engine
from cearx.core.event_log import NullLog
from cearx.core.identifiers import RequestKey
from cearx.core.messages import Pooling, SamplingParams, StepResult, Submit, pack_tokens
from cearx.worker.batch_inputs import BatchInputsBuilder
from cearx.worker.kv_cache import KVCache
from cearx.worker.model_config import ModelConfig
from cearx.worker.models.interface import LanguageModel
from cearx.worker.process import Runner
from cearx.worker.request_states import RequestStates
from cearx.worker.sampler import Sampler
from cearx.worker.seats import SeatTable
from cearx.worker.step_runner import StepRunner

SECRET = bytes(32)
GREEDY = SamplingParams(temperature=0)


def cpu_runner(
    model: LanguageModel, model_config: ModelConfig, config: SchedulerConfig
) -> StepRunner:
    """The CPU's runner over a pool in which nothing is a number before it was written."""
    kv_cache = KVCache(model_config, config.num_blocks, config.block_size, torch.float32)
    for layer in kv_cache.layers_SHD:
        layer.fill_(float("nan"))
    vocab_size = model_config.vocab_size
    seats = SeatTable(config.max_num_seqs, config.max_model_len, config.block_size)
    states = RequestStates(seats, vocab_size)
    inputs = BatchInputsBuilder(states, config.max_num_seqs, config.max_num_batched_tokens)
    return StepRunner(model, kv_cache, states, inputs, Sampler(vocab_size))


class LocalEngine:
    """Serves token prompts with a model; counts what the scheduler did."""

    def __init__(
        self,
        model: LanguageModel,
        model_config: ModelConfig,
        *,
        num_blocks: int = 512,
        block_size: int = 16,
        budget: int = 256,
        max_num_seqs: int = 16,
        caching: bool = True,
        admission: str = "forecast",
        pipeline_depth: int = 2,
        make_runner: Callable[[SchedulerConfig], Runner] | None = None,
    ) -> None:
        """`make_runner` replaces the CPU's step runner, and the model with it."""
        self._config = SchedulerConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=min(1024, num_blocks * block_size),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            admission=admission,
            pipeline_depth=pipeline_depth,
        )
        if make_runner is None:
            self._runner = cpu_runner(model, model_config, self._config)
        else:
            self._runner = make_runner(self._config)
        self._engine = Engine(self._config, SECRET, NullLog())
        self._next_key = 0
        self._tokens: dict[RequestKey, list[int]] = {}
        self._vectors: dict[RequestKey, array[float]] = {}
        self._now_us = 0
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_chunks = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    ) -> list[list[int]]:
        """The tokens of all prompts, submitted at once and run to their end.

        `sampling` is one for all or one each.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        keys = [
            self._submit(prompt, max_tokens, params)
            for prompt, params in zip(prompts, each, strict=True)
        ]
        self._run()
        return [self._tokens.pop(key) for key in keys]

    def pool(
        self,
        prompts: Sequence[Sequence[int]],
        pooling: Pooling,
        beside: Sequence[Sequence[int]] = (),
        num_beside: int = 40,
    ) -> list[list[float]]:
        """The vectors of all prompts, while `beside` are continued by some tokens."""
        neighbours = [self._submit(prompt, num_beside, GREEDY) for prompt in beside]
        keys = [self._submit(prompt, 1, GREEDY, pooling) for prompt in prompts]
        self._run()
        for key in neighbours:
            assert len(self._tokens.pop(key)) == num_beside
        for key in keys:
            assert self._tokens.pop(key) == [], "a vector is no token"
        return [self._vectors.pop(key).tolist() for key in keys]

    def _run(self) -> None:
        while self._engine.num_requests:
            while self._engine.wants_step:
                self._plan()
            result = self._next_result()
            for outputs in self._engine.finish_step(result).values():
                for output in outputs:
                    self._tokens[output.request_key].extend(output.token_ids)
                    if output.vector is not None:
                        self._vectors[output.request_key] = array("f", output.vector)
        while self._runner.num_in_flight:  # late rows of requests that ended
            self._engine.finish_step(self._next_result())

    def _next_result(self) -> StepResult:
        while (result := self._runner.collect()) is None:
            pass
        return result

    def _plan(self) -> None:
        """One more step is launched, while those before it may run."""
        self._now_us += 1
        self._engine.tick(self._now_us)
        step = self._engine.next_step()
        if step is not None:
            self._runner.launch(step)
            self.num_preemptions += len(step.plan.preempted)
            self.num_chunks += len(step.plan.chunks)
            self.num_cached_tokens += sum(a.num_cached_tokens for a in step.plan.admitted)

    def _submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams,
        pooling: Pooling | None = None,
    ) -> RequestKey:
        key = RequestKey(self._next_key)
        self._next_key += 1
        self._tokens[key] = []
        packed, root = pack_tokens(list(prompt)), root_hash(SECRET, None)
        hashes = prompt_hashes(SECRET, root, packed, self._config.block_size)
        refused = self._engine.submit(
            0,
            Submit(
                request_key=key,
                token_ids=packed,
                block_hashes=hashes if self._config.enable_prefix_caching else (),
                cache_root=root,
                max_tokens=max_tokens,
                sampling=sampling,
                has_exact_length=pooling is not None,
                pooling=pooling,
            ),
            self._now_us,
        )
        assert refused is None, refused
        return key
