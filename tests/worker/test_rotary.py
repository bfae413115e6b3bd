"""Rotary frequencies and whole models under every RoPE scaling, against transformers."""

import pytest
import torch
from paged_steps import PagedSequence, PagedSteps
from tiny_models import reference_logits, tiny_model
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from worker_models import kv_pool, worker_config, worker_model

from cearx.worker.model_config import (
    DivisorScaling,
    Llama3Scaling,
    RopeConfig,
    UnsupportedModel,
    from_hf_config,
)
from cearx.worker.rotary import amplitude, inverse_frequencies

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN_FULL = {
    **YARN,
    "beta_fast": 20.0,
    "beta_slow": 2.0,
    "mscale": 0.8,
    "mscale_all_dim": 0.5,
    "truncate": False,
}
SCALINGS = [LINEAR, LLAMA3, YARN, YARN_FULL, {**YARN, "attention_factor": 1.3}]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_frequencies(scaling: dict[str, object], head_dim: int, theta: float) -> None:
    """Frequencies and amplitude are the reference's."""
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=1024,
        rope_parameters={**scaling, "rope_theta": theta},
        architectures=["LlamaForCausalLM"],
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[str(scaling["rope_type"])](config)
    rope = from_hf_config(config.to_dict()).rope
    torch.testing.assert_close(
        inverse_frequencies(rope, head_dim), frequencies, rtol=1e-5, atol=1e-9
    )
    assert amplitude(rope) == pytest.approx(factor)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_logits(scaling: dict[str, object]) -> None:
    """A whole model under the scaling gives the reference's logits past the original context."""
    torch.set_num_threads(1)
    reference = tiny_model("llama", rope=tuple({**scaling, "rope_theta": 10_000.0}.items()))
    plain = tiny_model("llama")
    ids = list(range(3, 203))
    steps = PagedSteps(worker_model(reference), kv_pool(reference, 200, 16))
    ours = steps.step([(PagedSequence(ids), 200)])[0]
    expected = reference_logits(reference, ids)
    assert float((ours - expected).abs().max()) < 1e-4
    assert float((reference_logits(plain, ids) - expected).abs().max()) > 1e-2


def test_older_config_fields() -> None:
    """`rope_theta` and `rope_scaling` beside each other mean the same as `rope_parameters`."""
    raw = tiny_model("llama", rope=tuple({**LLAMA3, "rope_theta": 500_000.0}.items()))
    new = {**raw.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    old |= {"rope_theta": 500_000, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    assert from_hf_config(old).rope == from_hf_config(new).rope
    del old["rope_scaling"]["rope_type"]
    assert from_hf_config(old).rope == from_hf_config(new).rope
    assert isinstance(from_hf_config(old).rope.scaling, Llama3Scaling)


def test_divisors() -> None:
    """Explicit divisors divide the plain frequencies; a wrong number of them is an error."""
    divisors = tuple(float(n) for n in range(1, 9))
    rope = RopeConfig(theta=10_000.0, scaling=DivisorScaling(divisors=divisors))
    plain = inverse_frequencies(RopeConfig(theta=10_000.0), 16)
    torch.testing.assert_close(inverse_frequencies(rope, 16) * torch.tensor(divisors), plain)
    with pytest.raises(ValueError, match="8 RoPE divisors for 16"):
        inverse_frequencies(rope, 32)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "made-up"])
def test_unsupported_scaling_is_named(kind: str) -> None:
    """A scaling that is not computed is refused by its name, with the supported ones."""
    raw = {**tiny_model("llama").config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    raw["rope_parameters"] = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UnsupportedModel, match=f"{kind}.*default, linear, llama3, yarn"):
        from_hf_config(raw)


def test_default_has_no_scaling() -> None:
    """The default kind is plain RoPE."""
    assert worker_config(tiny_model("llama")).rope == RopeConfig(theta=10_000.0)
