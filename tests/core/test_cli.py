"""Flags come from the config structs; their list is part of the product."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cearx.core import cli
from cearx.core.config import CoreConfig, SchedulerConfig, ServerConfig, WorkerConfig
from cearx.core.supervisor import ServeFlags

FLAGS = """
host port uds api_key api_key_file frontends task startup_timeout log_level log_format
served_model_name chat_template tool_call_parser enable_auto_tool_choice reasoning_parser
enable_prompt_tokens_details strict_params require_model stream_interval
max_logprobs max_body_bytes max_header_bytes request_read_timeout
sse_keep_alive_interval shutdown_timeout
allowed_origins allowed_methods allowed_headers allow_credentials ssl_keyfile ssl_certfile
max_num_seqs max_num_batched_tokens enable_prefix_caching async_scheduling admission
scheduling_policy max_overtakes long_prefill_token_threshold max_num_partial_prefills target_itl_ms
max_num_queued_reqs max_num_queued_tokens request_timeout
trace trace_segment_size trace_segment_seconds trace_keep trace_fsync
device load_format dtype quantization max_model_len block_size kv_cache_dtype
kv_cache_memory kv_cache_memory_fraction gpu_memory_utilization enforce_eager compilation_level
cuda_graph_sizes
num_kv_blocks seed num_threads profiler_dir profile
""".split()


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "cearx.core.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_list_of_flags_is_pinned() -> None:
    """A flag comes, goes or changes its name only on purpose."""
    assert [parameter.name for parameter in cli.flag_parameters()] == FLAGS


def test_every_flag_is_documented() -> None:
    """No field of a config struct is without its docstring."""
    for config in cli.SECTIONS.values():
        assert set(cli.field_docs(config)) == set(config.__struct_fields__)


def test_defaults_build() -> None:
    """No flag given means the structs' own defaults."""
    values = {p.name: p.default for p in cli.flag_parameters()}
    flags = cli.build_flags(values)
    assert msgspec.structs.asdict(flags) == {n: c() for n, c in cli.SECTIONS.items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1024", 1024), ("512MiB", 512 * 2**20), ("0.5GiB", 2**29), ("2KB", 2000)],
)
def test_sizes_take_units(text: str, expected: int) -> None:
    """Sizes are bytes, or a number with a unit."""
    assert cli.parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "abc", "12 parsecs", "1GiBB", "infGiB", "nanGiB", "1e400KB"])
def test_other_sizes_are_refused(text: str) -> None:
    """What is no size is an error, not zero."""
    with pytest.raises(ValueError):
        cli.parse_bytes(text)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ServerConfig(port=70000), ("70000", "65535")),
        (lambda: ServerConfig(frontends=0), ("0", "1..64")),
        (lambda: CoreConfig(max_num_seqs=0), ("0", "at least 1")),
        (lambda: CoreConfig(max_num_batched_tokens=8, max_num_seqs=9), ("8", "9")),
        (lambda: CoreConfig(trace_segment_size=100), ("100", "at least 65536")),
        (lambda: CoreConfig(trace_segment_seconds=0), ("0", "at least 1")),
        (lambda: CoreConfig(trace_keep=1), ("1", "at least 2")),
        (lambda: WorkerConfig(kv_cache_memory_fraction=1.5), ("1.5", "(0, 1]")),
        (lambda: WorkerConfig(max_model_len=1), ("1", "at least 2")),
        (lambda: WorkerConfig(num_kv_blocks=0), ("0", "at least 1")),
        (lambda: WorkerConfig(num_kv_blocks=9, kv_cache_memory=7), ("9", "7", "give one")),
        (lambda: WorkerConfig(quantization="int8", device="cuda"), ("int8", "CPU", "cuda")),
        (lambda: WorkerConfig(quantization="int8", dtype="float16"), ("float16", "float32")),
        (lambda: WorkerConfig(compilation_level=3), ("--compilation-level", "3", "008")),
        (
            lambda: WorkerConfig(cuda_graph_sizes="1,2", enforce_eager=True),
            ("--cuda-graph-sizes", "1,2", "--enforce-eager"),
        ),
        (
            lambda: SchedulerConfig(
                block_size=0,
                num_blocks=1,
                max_model_len=2,
                max_num_seqs=1,
                max_num_batched_tokens=1,
                enable_prefix_caching=True,
            ),
            ("block_size", "0"),
        ),
    ],
)
def test_values_out_of_range_name_value_and_limit(build: object, words: tuple[str, ...]) -> None:
    """A config that cannot be is never built."""
    with pytest.raises(ValueError) as caught:
        build()  # type: ignore[operator]
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--port", "70000"),
        ("serve", "--no-such-flag"),
        ("serve", "--dtype", "float8"),
        ("serve", "--kv-cache-memory", "lots"),
        ("serve", "--kv-cache-memory", "infGiB"),
        ("serve", "--startup-timeout", str(2**63)),
        ("no-such-command",),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    """One message on stderr, no traceback."""
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("flag", ["--num-kv-blocks", "--num-gpu-blocks-override"])
def test_the_size_of_the_pool_has_two_spellings(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's name is a second spelling of the same flag."""
    given: list[ServeFlags] = []

    def keep(_model: str | None, flags: ServeFlags) -> int:
        given.append(flags)
        return 0

    monkeypatch.setattr(cli, "serve", keep)
    assert cli.main(["serve", flag, "77"]) == 0
    assert [flags.worker.num_kv_blocks for flags in given] == [77]


def test_help_lists_every_flag(tmp_path: Path) -> None:
    """`cearx serve --help` shows all flags."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cearx.core.cli", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={
            "COLUMNS": "200",
            "PATH": "/usr/bin",
            "HOME": str(tmp_path),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        },
    )
    for flag in FLAGS:
        assert "--" + flag.replace("_", "-") in done.stdout


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("--host", ".."), ".."),
        (("--host", "a" * 300), "a" * 300),
        (("./[/]",), "./[/]"),
        (("/tmp/[/red]x.gguf",), "/tmp/[/red]x.gguf"),
        (("[bold]x",), "[bold]x"),
        (("~nobody-of-that-name/x",), "~nobody-of-that-name/x"),
        (("m" * 5000,), "m" * 80),
    ],
)
def test_odd_names_are_one_clear_line(arguments: tuple[str, ...], shown: str) -> None:
    """Whatever a person types stands in the message as it was typed; exit code 2."""
    done = run("serve", "--port", "0", "--trace", "off", *arguments)
    assert done.returncode == 2, done.stderr
    assert shown in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
