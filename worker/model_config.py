"""The shape of a model: what its layers need to know, whatever file it came from.

Owns `ModelConfig` and the reading of a Hugging Face config.json; the GGUF loader builds the same
struct from its metadata. Never touches weights. Called by the model loader and the models. What
this worker cannot compute is refused here by name, never approximated.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from cearx.core.child import StartupError

MAX_SIZE = 2**31 - 1
"""Largest size of anything: more is a damaged file, and torch could not even refuse it."""
DTypeName = Literal["float32", "bfloat16", "float16"]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class UnsupportedModel(StartupError):
    """The model needs something that this worker does not have; the message names it."""


class LinearScaling(msgspec.Struct, frozen=True, kw_only=True, tag="linear"):
    """Position interpolation: every frequency is divided by `factor`."""

    factor: Positive


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True, tag="llama3"):
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, a ramp between."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Annotated[int, msgspec.Meta(gt=0)]


class YarnScaling(msgspec.Struct, frozen=True, kw_only=True, tag="yarn"):
    """YaRN (arXiv 2309.00071)."""

    factor: Positive
    original_max_position_embeddings: Annotated[int, msgspec.Meta(gt=0)]
    attention_factor: float | None = None
    """Scale of cos and sin; None derives it from factor and the two mscales."""
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class DivisorScaling(msgspec.Struct, frozen=True, kw_only=True, tag="divisors"):
    """Explicit divisors, one per frequency: how GGUF files store Llama 3.1's scaling."""

    divisors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | DivisorScaling


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding over the whole head, in the half-split form."""

    theta: float
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if not self.theta > 0:
            raise ValueError(f"RoPE theta must be above 0, got {self.theta}")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A dense decoder: RMSNorm, grouped-query attention with RoPE, SiLU-gated MLP."""

    architecture: str
    """Name in the table of models, for example 'LlamaForCausalLM'."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """Rows of the embedding and of the output layer."""
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    """The output layer is the embedding matrix."""
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before RoPE."""
    source_dtype: DTypeName | None = None
    """Type that the publisher computed in, where the file says so."""

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "max_position_embeddings",
        ):
            if not 1 <= getattr(self, name) <= MAX_SIZE:
                raise ValueError(f"{name} must be in 1..{MAX_SIZE}, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")


class _HFArchitectures(msgspec.Struct, kw_only=True):
    architectures: list[str] = []


class _HFConfig(_HFArchitectures, kw_only=True):
    """The fields of config.json that matter here, under the names of both generations."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    use_sliding_window: bool = False
    is_causal: bool = True
    use_bidirectional_attention: bool | str | None = None
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    torch_dtype: str | None = None
    dtype: str | None = None


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What an architecture fixes that its config.json does not say."""

    qkv_bias: bool | None = None
    """None: as `attention_bias` says."""
    attention_output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    head_dim: int | None = None
    """When the file has none; None: hidden_size / num_attention_heads."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=None),
    "Qwen2ForCausalLM": Family(qkv_bias=True, attention_output_bias=False),
    "Qwen3ForCausalLM": Family(qk_norm=True, head_dim=128),
}


def hf_architecture(config: Mapping[str, Any]) -> str:
    """The first name under `architectures` in a parsed config.json; ValueError without one."""
    try:
        return msgspec.convert(config, _HFArchitectures).architectures[0]
    except (msgspec.ValidationError, IndexError) as error:
        raise ValueError(f"config.json names no architecture: {error}") from error


def from_hf_config(config: Mapping[str, Any], family: Family | None = None) -> ModelConfig:
    """Reads a parsed config.json; `family` is given for an architecture outside FAMILIES.

    Raises UnsupportedModel for what cannot be computed, ValueError for a file that makes no sense.
    """
    architecture = hf_architecture(config)
    family = family or FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModel(
            f"architecture {architecture} is not supported; supported: {', '.join(FAMILIES)}"
        )
    try:
        hf = msgspec.convert(config, _HFConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"config.json: {error}") from error
    _refuse_unsupported(hf)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hf.hidden_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=hf.head_dim or family.head_dim or hf.hidden_size // max(1, hf.num_attention_heads),
        intermediate_size=hf.intermediate_size,
        vocab_size=hf.vocab_size,
        max_position_embeddings=hf.max_position_embeddings,
        rms_norm_eps=hf.rms_norm_eps,
        rope=_rope_config(hf),
        tie_word_embeddings=hf.tie_word_embeddings,
        qkv_bias=_flag(family.qkv_bias, hf.attention_bias),
        attention_output_bias=_flag(family.attention_output_bias, hf.attention_bias),
        mlp_bias=_flag(family.mlp_bias, hf.mlp_bias),
        qk_norm=family.qk_norm,
        source_dtype=_source_dtype(hf),
    )


def _flag(fixed: bool | None, configured: bool) -> bool:
    return configured if fixed is None else fixed


def _refuse_unsupported(hf: _HFConfig) -> None:
    if hf.hidden_act != "silu":
        raise UnsupportedModel(f"hidden_act {hf.hidden_act} is not supported; supported: silu")
    other_layers = set(hf.layer_types or ()) - {"full_attention"}
    if hf.use_sliding_window or other_layers:
        kinds = ", ".join(sorted(other_layers)) or "use_sliding_window"
        raise UnsupportedModel(f"{kinds} is not supported; supported: full_attention")
    if not hf.is_causal or hf.use_bidirectional_attention:
        raise UnsupportedModel("bidirectional attention is not supported; supported: causal")
    if hf.quantization_config is not None:
        method = hf.quantization_config.get("quant_method", "(unnamed)")
        raise UnsupportedModel(f"quantization {method} of a safetensors model is not supported")


def _source_dtype(hf: _HFConfig) -> DTypeName | None:
    name = hf.dtype or hf.torch_dtype
    for known in ("float32", "bfloat16", "float16"):
        if name == known:
            return known
    return None


def _rope_config(hf: _HFConfig) -> RopeConfig:
    """RoPE from `rope_parameters` (one dict) or from `rope_theta` and `rope_scaling`."""
    parameters = dict(hf.rope_parameters or hf.rope_scaling or {})
    theta = parameters.pop("rope_theta", None) or hf.rope_theta or 10_000.0
    legacy_kind = parameters.pop("type", "default")
    kind = parameters.pop("rope_type", legacy_kind)
    partial = parameters.pop("partial_rotary_factor", None) or hf.partial_rotary_factor or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported; supported: 1.0")
    if kind == "default":
        return RopeConfig(theta=float(theta))
    scalings: dict[str, type[LinearScaling | Llama3Scaling | YarnScaling]] = {
        "linear": LinearScaling,
        "llama3": Llama3Scaling,
        "yarn": YarnScaling,
    }
    if kind not in scalings:
        raise UnsupportedModel(
            f"RoPE scaling {kind} is not supported; supported: default, {', '.join(scalings)}"
        )
    original = parameters.get("original_max_position_embeddings") or hf.max_position_embeddings
    if kind == "yarn" and parameters.get("factor") is None:
        parameters["factor"] = hf.max_position_embeddings / original
    parameters["original_max_position_embeddings"] = original
    given = {name: value for name, value in parameters.items() if value is not None}
    try:
        scaling = msgspec.convert({**given, "type": kind}, scalings[kind])
    except msgspec.ValidationError as error:
        raise ValueError(f"config.json: RoPE scaling {kind}: {error}") from error
    return RopeConfig(theta=float(theta), scaling=scaling)
