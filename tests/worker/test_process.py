"""`python -m cearx.worker` for real: a tiny model, real sockets, transformers as the judge."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaConfig, LlamaForCausalLM
from worker_process import BOOT_ID, WorkerProcess, step_without_rows

from cearx.core.identifiers import RequestId
from cearx.core.link import HEADER
from cearx.core.messages import ProcessFailed, ProcessReady, SamplingParams, WorkerReady

GREEDY = SamplingParams(temperature=0)
VOCAB_SIZE = 211
NUM_TOKENS = 24

Cases = list[tuple[list[int], list[int]]]
"""Prompts with their tokens."""


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    """A random Llama whose weights are large enough that every mistake shows in its tokens."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        attention_bias=False,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(reference: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("tiny")
    reference.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def wanted(reference: LlamaForCausalLM) -> Cases:
    """Prompts of mixed lengths with their greedy tokens by transformers, each alone."""
    torch.manual_seed(4)
    cases = []
    for length in [1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 31, 32, 33, 40, 47, 64]:
        prompt = torch.randint(0, VOCAB_SIZE, (1, length))
        output = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        cases.append((prompt[0].tolist(), output[0, length:].tolist()))
    return cases


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[WorkerProcess]:
    """A started worker that tests share; it must end by SIGTERM with code 0."""
    with WorkerProcess(folder) as started:
        ready = started.report()
        assert isinstance(ready, ProcessReady), ready
        assert "KV cache" in ready.detail and "max_model_len 256" in ready.detail
        assert started.progress[0] == "loading weights" and started.progress[-1] == "warming up"
        yield started
        started.process.send_signal(signal.SIGTERM)
        code, stderr = started.end()
        assert code == 0, stderr
        assert "messages dropped" in stderr and "Traceback" not in stderr


def test_tokens_alone_and_in_a_batch_equal_transformers(
    worker: WorkerProcess, wanted: Cases
) -> None:
    """16 requests of mixed lengths, first one by one, then together."""
    alone = [worker.generate([p], [GREEDY], NUM_TOKENS)[0] for p, _ in wanted]
    assert alone == [tokens for _, tokens in wanted]
    together = worker.generate([p for p, _ in wanted], [GREEDY] * len(wanted), NUM_TOKENS)
    assert together == alone
    # Pool capped at 16 requests of the model's length; vocabulary as in the file.
    assert worker.ready == WorkerReady(
        num_blocks=16 * 256 // 16,
        block_size=16,
        max_model_len=256,
        vocab_size=VOCAB_SIZE,
        max_num_seqs=16,
        max_num_batched_tokens=256,
    )


def test_chunks_of_16_tokens(worker: WorkerProcess, wanted: Cases) -> None:
    """Prompts cut into chunks beside decodes give the same tokens."""
    prompts = [p for p, _ in wanted]
    tokens = worker.generate(prompts, [GREEDY] * len(wanted), NUM_TOKENS, budget=16)
    assert tokens == [t for _, t in wanted]


def test_seeded_rows_do_not_depend_on_the_batch(worker: WorkerProcess, wanted: Cases) -> None:
    """Random requests beside greedy ones: same seed, same tokens, alone and in a batch."""
    prompts = [p for p, _ in wanted[:6]]
    params = [SamplingParams(seed=n, temperature=0.5 * (n % 3), top_p=0.9) for n in range(6)]
    together = worker.generate(prompts, params, NUM_TOKENS)
    for prompt, rule, tokens in zip(prompts, params, together, strict=True):
        assert worker.generate([prompt], [rule], NUM_TOKENS, budget=16) == [tokens]


def test_bad_messages_are_dropped_and_logged(worker: WorkerProcess, wanted: Cases) -> None:
    """Garbage, an old epoch and a wrong type change nothing; the next step is answered."""
    header = HEADER.pack(BOOT_ID, 0, 2**40)
    for frame in (b"x", header, header + b"\xc1", header + b"\x92\xa4step\x01", b"\0" * 64):
        worker.link.socket.send(frame)
    worker.link.socket.send_multipart([b"two", b"frames"])
    prompt, tokens = wanted[0]
    assert worker.generate([prompt], [GREEDY], NUM_TOKENS) == [tokens]


def test_preemption_and_a_supervisor_that_is_gone(folder: Path, wanted: Cases) -> None:
    """In a pool far too small for all, requests are recomputed and lose nothing."""
    block_bytes = 16 * 3 * 2 * 2 * 8 * 4
    with WorkerProcess(folder, kv_cache_memory=24 * block_bytes, max_model_len=128) as worker:
        prompts = [p for p, _ in wanted]
        tokens = worker.generate(prompts, [GREEDY] * len(wanted), NUM_TOKENS)
        assert tokens == [t for _, t in wanted]
        assert worker.ready is not None and worker.ready.num_blocks == 24
        assert worker.num_preemptions > 0
        worker.close_stdin()  # as when the supervisor dies, whatever way
        assert worker.end()[0] == 1


def test_a_step_that_contradicts_the_states_ends_the_process(folder: Path) -> None:
    """The core is never left waiting: the worker reports and exits."""
    with WorkerProcess(folder) as worker:
        assert isinstance(worker.report(), ProcessReady)
        step = step_without_rows()
        worker.link.send(replace(step, plan=replace(step.plan, decodes=(RequestId(5),))))
        worker.link.socket.poll(2000)
        worker.link.flush()
        failure = worker.report()
        assert isinstance(failure, ProcessFailed) and "a step failed" in failure.reason
        code, stderr = worker.end()
        assert code == 1 and "Traceback" in stderr


def test_a_model_that_is_missing(tmp_path: Path) -> None:
    """One clear line for the person, no traceback, exit code 2."""
    with WorkerProcess(tmp_path / "nowhere") as worker:
        failure = worker.report()
        assert isinstance(failure, ProcessFailed)
        assert "nowhere" in failure.reason and "\n" not in failure.reason
        code, stderr = worker.end()
        assert code == 2 and "Traceback" not in stderr


def test_an_architecture_that_is_not_supported(tmp_path: Path) -> None:
    """The line names it and what there is."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with WorkerProcess(tmp_path) as worker:
        failure = worker.report()
        assert isinstance(failure, ProcessFailed)
        assert "MambaForCausalLM" in failure.reason and "LlamaForCausalLM" in failure.reason
        assert worker.end()[0] == 2


def test_a_length_that_does_not_fit_the_pool(folder: Path) -> None:
    """Both sizes are in the line."""
    with WorkerProcess(folder, max_model_len=200, kv_cache_memory=70_000) as worker:
        failure = worker.report()
        assert isinstance(failure, ProcessFailed)
        assert "--max-model-len 200 needs 78.0 KiB" in failure.reason
        assert "66.0 KiB (176 tokens)" in failure.reason
        assert worker.end()[0] == 2


def test_threads_are_told_to_sleep_before_torch_is_loaded() -> None:
    """The OpenMP library reads its settings when torch loads it, so torch must come later."""
    code = (
        "import os, sys, cearx.worker.__main__ as entry\n"
        "assert 'torch' not in sys.modules\n"
        "import cearx.core.child as child\n"
        "def read_launch(_): raise SystemExit(os.environ['GOMP_SPINCOUNT'])\n"
        "child.read_launch = read_launch\n"
        "entry.run()\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "2000"
