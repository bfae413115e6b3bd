"""Every flag of `cearx serve`, as one small frozen struct a process.

They stand here, and not beside each process, because the supervisor parses them and hands each
child its own, and the core imports no other folder. Each field is a flag (`cli.py` makes it from
name, type, default and the docstring below it); a value out of range raises ValueError with the
value and the limit. "auto" values are None and are resolved once by their owner.
"""

from pathlib import Path
from typing import Literal

import msgspec

DEFAULT_MODEL = "smollm2"
"""The name that stands for SmolLM2-135M-Instruct from its PyPI package (`model_source.py`)."""

Task = Literal["generate", "embed", "score"]
"""What a model is served for; each has endpoints of its own."""

MAX_SHUTDOWN_TIMEOUT = 24 * 3600
MAX_REQUEST_READ_TIMEOUT = 24 * 3600
MAX_STARTUP_TIMEOUT = 7 * 24 * 3600
"""Seconds; in milliseconds it must fit what `poll` takes."""


def _at_least(name: str, value: float | None, limit: float) -> None:
    if value is not None and not value >= limit:
        raise ValueError(f"{name} must be at least {limit}, got {value}")


def _check_budget(max_num_batched_tokens: int | None, max_num_seqs: int | None) -> None:
    """Every running request must be able to decode in every step."""
    if max_num_batched_tokens is None or max_num_seqs is None:
        return
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"--max-num-batched-tokens must be at least --max-num-seqs ({max_num_seqs}),"
            f" got {max_num_batched_tokens}"
        )


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the pure scheduler knows; written into the trace log's header."""

    block_size: int
    """Tokens in a KV block."""
    num_blocks: int
    """Blocks in the pool."""
    max_model_len: int
    """Tokens of prompt and output together that one request may have."""
    max_num_seqs: int
    """Requests that run at once."""
    max_num_batched_tokens: int
    """Tokens computed in one step, decodes and prefill chunks together."""
    enable_prefix_caching: bool
    """Whether full blocks are kept for requests that begin with the same tokens."""
    pipeline_depth: int = 1
    """Steps that may be in flight at once."""
    admission: str = "forecast"
    """Name of the admission policy (`admission.py`)."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Whether requests go in order of arrival, or of priority and then arrival."""
    max_overtakes: int = 4
    """Admissions that may pass a request which waits for blocks."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step; 0 is no limit."""
    max_num_partial_prefills: int = 0
    """Prompts that may be computed in part at the same time; 0 is no limit."""
    target_itl_us: int = 0
    """Length in microseconds that prefill chunks may bring a step with decodes to; 0: no limit."""
    max_num_queued_reqs: int = 0
    """Requests that may wait beside those for whom a seat is free; 0 is no limit."""
    max_num_queued_tokens: int = 0
    """Known tokens of all that may wait when no seat is free; 0 is no limit."""
    request_timeout_us: int = 0
    """Time from a request's arrival to its deadline; 0 is none."""

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "num_blocks",
            "max_num_seqs",
            "max_num_batched_tokens",
            "pipeline_depth",
        ):
            _at_least(name, getattr(self, name), 1)
        for name in (
            "max_overtakes",
            "long_prefill_token_threshold",
            "max_num_partial_prefills",
            "target_itl_us",
            "max_num_queued_reqs",
            "max_num_queued_tokens",
            "request_timeout_us",
        ):
            _at_least(name, getattr(self, name), 0)
        _at_least("max_model_len", self.max_model_len, 2)
        _check_budget(self.max_num_batched_tokens, self.max_num_seqs)


class TraceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How a trace log is cut into segments, kept and synced; the flags are `CoreConfig`'s."""

    segment_bytes: int = 64 * 1024 * 1024
    segment_seconds: int = 3600
    keep: int = 8
    fsync: Literal["never", "rotate", "everysec"] = "everysec"


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int | None = None
    """Requests that run at once (default: 64 on the CPU, 256 on CUDA)."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step, decodes and prefill chunks together (default: 2048 on the CPU, 4352
    on CUDA)."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of prompts that begin with the same tokens."""
    async_scheduling: bool = True
    """Plan the next step while one runs."""
    admission: str = "forecast"
    """When a request gets blocks: 'forecast', 'watermark', 'greedy' or an installed policy."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Serve in order of arrival, or of each request's priority (lower first) and then arrival."""
    max_overtakes: int = 4
    """Requests that may pass one which waits for KV blocks; 0 keeps the order strictly."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step (0: no limit)."""
    max_num_partial_prefills: int = 0
    """Prompts that may be computed in part at the same time (0: no limit)."""
    target_itl_ms: int = 0
    """Milliseconds that a step with decodes may take: sizes prefill chunks (0: no target)."""
    max_num_queued_reqs: int = 0
    """Requests that may wait; more are answered with 503 (0: no limit)."""
    max_num_queued_tokens: int = 0
    """Prompt tokens that may wait; more are answered with 503 (0: no limit)."""
    request_timeout: int = 0
    """Seconds after which a request is ended with 504 (0: never)."""
    trace: str = "auto"
    """Folder of the trace log, 'off' for none, 'auto' for ~/.cache/cearx/traces."""
    trace_segment_size: int = 64 * 1024 * 1024
    """Bytes after which the trace log begins a new file."""
    trace_segment_seconds: int = 3600
    """Seconds after which the trace log begins a new file."""
    trace_keep: int = 8
    """Files of the trace log that are kept, those of earlier runs in the folder included."""
    trace_fsync: Literal["never", "rotate", "everysec"] = "everysec"
    """When the trace log is forced to the disk; a crash of this process loses nothing either way.

    'rotate' is at the end of each file."""

    def __post_init__(self) -> None:
        _at_least("--max-num-seqs", self.max_num_seqs, 1)
        _at_least("--max-num-batched-tokens", self.max_num_batched_tokens, 1)
        for name in (
            "max_overtakes",
            "long_prefill_token_threshold",
            "max_num_partial_prefills",
            "target_itl_ms",
            "max_num_queued_reqs",
            "max_num_queued_tokens",
            "request_timeout",
        ):
            _at_least(f"--{name.replace('_', '-')}", getattr(self, name), 0)
        _check_budget(self.max_num_batched_tokens, self.max_num_seqs)
        _at_least("--trace-segment-size", self.trace_segment_size, 65536)
        _at_least("--trace-segment-seconds", self.trace_segment_seconds, 1)
        _at_least("--trace-keep", self.trace_keep, 2)


def scheduler_config(
    core: CoreConfig,
    *,
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> SchedulerConfig:
    """What the flags say, with the sizes that a worker chose; raises ValueError."""
    return SchedulerConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=core.enable_prefix_caching,
        pipeline_depth=2 if core.async_scheduling else 1,
        admission=core.admission,
        scheduling_policy=core.scheduling_policy,
        max_overtakes=core.max_overtakes,
        long_prefill_token_threshold=core.long_prefill_token_threshold,
        max_num_partial_prefills=core.max_num_partial_prefills,
        target_itl_us=core.target_itl_ms * 1000,
        max_num_queued_reqs=core.max_num_queued_reqs,
        max_num_queued_tokens=core.max_num_queued_tokens,
        request_timeout_us=core.request_timeout * 1_000_000,
    )


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; 'auto' is CUDA where there is a GPU."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    """Where the weights come from; 'dummy' draws random ones from the seed."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights, activations and KV; 'auto' is float32 on the CPU, on CUDA the model's 16-bit
    type or bfloat16."""
    quantization: Literal["none", "int8", "fp8"] = "none"
    """'int8' rounds the weights of products to int8 blocks of 32 at load, on the CPU; what a GGUF
    file holds in blocks that are multiplied as they are stays as it is. 'fp8' rounds the weights of
    the layers to 8-bit floats (e4m3) with a scale an output, on CUDA; prompts' activations too."""
    max_model_len: int | None = None
    """Tokens of prompt and output together that one request may have (default: the model's)."""
    block_size: int | None = None
    """Tokens in a KV block (default: 16 on the CPU; 64 on CUDA, where it is 16, 32, 64, 128 or
    256)."""
    kv_cache_dtype: Literal["auto", "bf16", "bfloat16", "fp8", "fp8_e4m3"] = "auto"
    """Type of keys and values; 'auto' is `dtype`, 'fp8' (or 'fp8_e4m3') halves their memory on
    CUDA."""
    kv_cache_memory: int | None = None
    """Bytes for the KV pool (default: a share of the free memory)."""
    kv_cache_memory_fraction: float = 0.3
    """Share of the free memory that the KV pool takes on the CPU when its size is not given."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that weights, activations, graphs and KV pool take together."""
    enforce_eager: bool = False
    """Launch every kernel of a step one by one instead of replaying CUDA graphs."""
    compilation_level: int = 0
    """Level of torch.compile, as in vLLM; only 0, no compilation, is available."""
    cuda_graph_sizes: str | None = None
    """Batch sizes of decodes with a CUDA graph, with commas between (default: 1 to 16, then ever
    wider steps); max_num_seqs always has one."""
    num_kv_blocks: int | None = None
    """Exact size of the KV pool in blocks, instead of bytes or a share (as vLLM's
    --num-gpu-blocks-override)."""
    seed: int = 0
    """Seed of dummy weights."""
    num_threads: int | None = None
    """Threads of the worker on the CPU (default: the physical cores)."""
    profiler_dir: Path | None = None
    """Folder for traces of torch's profiler, which POST /start_profile begins and /stop_profile
    writes (default: there are no such endpoints)."""
    profile: Path | None = None
    """Folder for one such trace of the whole run, from ready to the end; for short runs."""

    def __post_init__(self) -> None:
        if None not in (self.profile, self.profiler_dir) and self.profile != self.profiler_dir:
            raise ValueError(
                f"--profile {self.profile} and --profiler-dir {self.profiler_dir} both give the"
                " folder of traces; give one of them"
            )
        _at_least("--max-model-len", self.max_model_len, 2)
        _at_least("--block-size", self.block_size, 1)
        _at_least("--kv-cache-memory", self.kv_cache_memory, 1)
        _at_least("--num-kv-blocks", self.num_kv_blocks, 1)
        _at_least("--num-threads", self.num_threads, 1)
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            raise ValueError(
                f"--num-kv-blocks {self.num_kv_blocks} and --kv-cache-memory {self.kv_cache_memory}"
                " both give the size of the KV pool; give one of them"
            )
        if not 0 < self.kv_cache_memory_fraction <= 1:
            raise ValueError(
                f"--kv-cache-memory-fraction must be in (0, 1], got {self.kv_cache_memory_fraction}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        if self.quantization == "int8" and self.device == "cuda":
            raise ValueError("--quantization int8 is for the CPU, got --device cuda")
        if self.quantization == "fp8" and self.device == "cpu":
            raise ValueError("--quantization fp8 is for CUDA, got --device cpu; there int8 is")
        if self.quantization == "int8" and self.dtype not in ("auto", "float32"):
            raise ValueError(f"--quantization int8 needs --dtype float32, got {self.dtype}")
        if self.kv_cache_dtype.startswith("fp8") and self.device == "cpu":
            raise ValueError(
                f"--kv-cache-dtype {self.kv_cache_dtype} is for CUDA, got --device cpu"
            )
        if self.compilation_level != 0:
            raise ValueError(
                f"--compilation-level must be 0, got {self.compilation_level}: the kernels are"
                " written by hand and torch.compile would fuse nothing more"
                " (docs/decisions/008); steps are CUDA graphs at every level"
            )
        if self.cuda_graph_sizes is not None:
            graph_sizes(self.cuda_graph_sizes)
            if self.enforce_eager:
                raise ValueError(
                    f"--cuda-graph-sizes {self.cuda_graph_sizes} contradicts --enforce-eager,"
                    " with which there are no graphs"
                )

    @property
    def profiler_folder(self) -> Path | None:
        """Where traces go; None: nothing is profiled."""
        return self.profiler_dir or self.profile


def graph_sizes(text: str) -> tuple[int, ...]:
    """'1,2,8' as numbers, ascending; raises ValueError for anything else."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise ValueError(
            f"--cuda-graph-sizes must be numbers with commas between, got {text!r}"
        ) from error
    _at_least("--cuda-graph-sizes", sizes[0], 1)
    return tuple(sizes)


class FrontendConfig(msgspec.Struct, frozen=True, kw_only=True):
    served_model_name: str | None = None
    """Name of the model in the API (default: the MODEL argument)."""
    chat_template: Path | None = None
    """File with a Jinja chat template that replaces the model's."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls: 'hermes', 'llama3_json', an installed parser, 'none'.

    'auto' looks at the chat template."""
    enable_auto_tool_choice: bool = True
    """Let the model decide whether it calls one of a request's tools."""
    reasoning_parser: Literal["auto", "none", "think", "qwen3", "deepseek_r1"] = "auto"
    """Tell text between <think> and </think> apart as reasoning_content ('none': do not).

    'auto' does it when the chat template knows these tags; the other names mean the same."""
    enable_prompt_tokens_details: bool = False
    """Report usage.prompt_tokens_details.cached_tokens."""
    strict_params: bool = False
    """Refuse request fields that nobody knows instead of ignoring them with a warning."""
    require_model: bool = True
    """Refuse requests that name no model, as OpenAI does; else they mean the one that is served."""
    stream_interval: int = 1
    """Upper bound of tokens gathered into one streaming event; the first goes out at once."""
    max_logprobs: int = 20
    """Most log-probabilities a token that a request may ask for."""
    max_body_bytes: int = 4 * 1024 * 1024
    """Largest request body; more is answered with 413."""
    max_header_bytes: int = 16 * 1024
    """Largest request head; more is answered with 431."""
    request_read_timeout: int = 60
    """Seconds in which a request's head must be there, and then its body; else it gets a 408."""
    sse_keep_alive_interval: int = 0
    """Seconds of silence after which a stream gets a comment (0: never)."""
    shutdown_timeout: int = 0
    """Seconds that running requests get to finish after SIGTERM, before they end with an error."""
    allowed_origins: list[str] = []
    """Origin of a web page that may call the API, '*' for all; may be given several times."""
    allowed_methods: list[str] = msgspec.field(default_factory=lambda: ["*"])
    """HTTP method that such pages may use."""
    allowed_headers: list[str] = msgspec.field(default_factory=lambda: ["*"])
    """Header that such pages may send."""
    allow_credentials: bool = False
    """Whether such pages may send cookies and the like."""
    ssl_keyfile: Path | None = None
    """Private key of the server's certificate, PEM; turns TLS on together with ssl_certfile."""
    ssl_certfile: Path | None = None
    """The server's certificate chain, PEM."""

    def __post_init__(self) -> None:
        _at_least("--max-header-bytes", self.max_header_bytes, 1024)
        if not 1 <= self.request_read_timeout <= MAX_REQUEST_READ_TIMEOUT:
            raise ValueError(
                f"--request-read-timeout must be in 1..{MAX_REQUEST_READ_TIMEOUT},"
                f" got {self.request_read_timeout}"
            )
        _at_least("--sse-keep-alive-interval", self.sse_keep_alive_interval, 0)
        if not 0 <= self.shutdown_timeout <= MAX_SHUTDOWN_TIMEOUT:
            raise ValueError(
                f"--shutdown-timeout must be in 0..{MAX_SHUTDOWN_TIMEOUT},"
                f" got {self.shutdown_timeout}"
            )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            given = "--ssl-keyfile" if self.ssl_certfile is None else "--ssl-certfile"
            raise ValueError(f"--ssl-keyfile and --ssl-certfile need each other, got only {given}")
        _at_least("--stream-interval", self.stream_interval, 1)
        _at_least("--max-logprobs", self.max_logprobs, 0)
        _at_least("--max-body-bytes", self.max_body_bytes, 1024)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor itself needs."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one and prints it."""
    uds: Path | None = None
    """Unix socket to listen on instead of host and port."""
    api_key: list[str] = []
    """Key that clients must send, may be given several times; CEARX_API_KEY adds one."""
    api_key_file: Path | None = None
    """File with one key a line; '#' begins a comment."""
    frontends: int | None = None
    """HTTP processes that share the port; default: one for every 4 cores, at least 1, at most 4."""
    task: Literal["auto", "generate", "embed", "score"] = "auto"
    """What the model is served for: text, embeddings, or scores of pairs of texts.

    'auto' looks at the model (`model_task.py`)."""
    startup_timeout: int = 600
    """Seconds until every process must be ready."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""
    log_format: Literal["console", "json"] = "console"
    """Whether log lines are for people or for machines."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be in 0..65535, got {self.port}")
        if self.frontends is not None and not 1 <= self.frontends <= 64:
            raise ValueError(f"--frontends must be in 1..64, got {self.frontends}")
        if not 1 <= self.startup_timeout <= MAX_STARTUP_TIMEOUT:
            raise ValueError(
                f"--startup-timeout must be in 1..{MAX_STARTUP_TIMEOUT}, got {self.startup_timeout}"
            )


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model on this machine's disk, as `model_source.resolve` found it."""

    path: Path
    """A Hugging Face folder, or one .gguf file."""
    name: str
    """What the person called it."""
    task: Task = "generate"
    """What it is served for."""


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="process"):
    """What a child process reads from the first line of its standard input, as JSON."""

    boot_id: int
    """64 random bits that name this run of the server."""
    runtime_dir: Path
    """0700 folder with the sockets."""
    log_level: str
    log_format: str = "console"


class CoreLaunch(LaunchSpec, frozen=True, kw_only=True, tag="core"):
    config: CoreConfig
    frontends: int
    generates: bool = True
    """Whether requests bring tokens, or else vectors."""
    hash_secret: bytes
    """Key of the block hashes (`block_hash.py`), never logged."""


class WorkerLaunch(LaunchSpec, frozen=True, kw_only=True, tag="worker"):
    config: WorkerConfig
    model: ModelFiles
    max_num_seqs: int | None
    """None, here and below: the worker chooses what suits its device."""
    max_num_batched_tokens: int | None


class FrontendLaunch(LaunchSpec, frozen=True, kw_only=True, tag="frontend"):
    config: FrontendConfig
    model: ModelFiles
    frontend_index: int
    hash_secret: bytes
    listen_fd: int
    """The listening socket, inherited from the supervisor."""
    api_key_digests: tuple[bytes, ...] = ()
    """SHA-256 of every key that lets a client in; empty when all may come."""


Launch = CoreLaunch | WorkerLaunch | FrontendLaunch
