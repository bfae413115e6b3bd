"""Models from GGUF files: shape, weights and logits equal the transformers model written there."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_models import gguf_tensors, interleave, write_model
from gguf_samples import write_gguf
from paged_steps import PagedSequence, PagedSteps
from tiny_models import FAMILIES, reference_logits, tiny_model
from transformers import PreTrainedModel
from worker_models import kv_pool, worker_config

from cearx.core.config import ModelFiles, WorkerConfig
from cearx.core.gguf_file import GGUFError, GGUFFile
from cearx.worker.gguf_loader import GGUFWeights, gguf_model_config
from cearx.worker.model_config import UnsupportedModel
from cearx.worker.model_loader import load_model

IDS = [(37 * index) % 298 + 3 for index in range(70)]
LLAMA3 = (
    ("rope_type", "llama3"), ("rope_theta", 10_000.0), ("factor", 8.0), ("low_freq_factor", 1.0),
    ("high_freq_factor", 4.0), ("original_max_position_embeddings", 64),
)  # fmt: skip
LINEAR = (("rope_type", "linear"), ("rope_theta", 20_000.0), ("factor", 3.0))
YARN = (
    ("rope_type", "yarn"), ("rope_theta", 10_000.0), ("factor", 4.0),
    ("original_max_position_embeddings", 64),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def logits_of(path: Path, reference: PreTrainedModel) -> torch.Tensor:
    """Logits [T, V] of IDS by the model that the loader makes of the file."""
    loaded = load_model(
        ModelFiles(path=path, name="test"), WorkerConfig(), lambda done, total: None
    )
    steps = PagedSteps(loaded.model, kv_pool(reference, len(IDS), 16))
    return steps.step([(PagedSequence(IDS), len(IDS))])[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_come_back(family: str, tied: bool, tmp_path: Path) -> None:
    """Every tensor of the model, under its name, bit for bit."""
    reference = tiny_model(family, tied=tied)
    weights = GGUFWeights(GGUFFile(write_model(reference, tmp_path / "m.gguf")))
    expected = reference.state_dict()
    if tied:
        del expected["lm_head.weight"]
    assert set(weights.names()) == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights.get(name), tensor), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_shape_equals_config_json(family: str, head_dim: int, tmp_path: Path) -> None:
    """The struct is the one that the same model's config.json gives."""
    reference = tiny_model(family, head_dim=head_dim, tied=family == "qwen2")
    found = gguf_model_config(GGUFFile(write_model(reference, tmp_path / "m.gguf")))
    expected = worker_config(reference)
    for field in expected.__struct_fields__:
        if field == "source_dtype":
            continue
        theirs = getattr(expected, field)
        if field == "rms_norm_eps":
            theirs = float(np.float32(theirs))  # GGUF keeps it in 32 bits
        assert getattr(found, field) == theirs, field


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_logits_equal_transformers(family: str, head_dim: int, tmp_path: Path) -> None:
    """The loaded model computes what the original computes."""
    reference = tiny_model(family, head_dim=head_dim)
    path = write_model(reference, tmp_path / "m.gguf")
    difference = logits_of(path, reference) - reference_logits(reference, IDS)
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("rope", [LLAMA3, LINEAR, YARN], ids=["llama3", "linear", "yarn"])
def test_rope_scaling(rope: tuple[tuple[str, object], ...], tmp_path: Path) -> None:
    """Divisors per frequency, linear and YaRN scaling give the original's logits."""
    reference = tiny_model("llama", rope=rope, head_dim=32, max_positions=256)
    path = write_model(reference, tmp_path / "m.gguf")
    expected = reference_logits(reference, IDS)
    assert (logits_of(path, reference) - expected).abs().max() < 1e-4
    plain = tiny_model("llama", head_dim=32, max_positions=256)
    assert (reference_logits(plain, IDS) - expected).abs().max() > 1e-2, "scaling must show"


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q5_0])
def test_quantised_weights(kind: Kind, tmp_path: Path) -> None:
    """Each matrix is what the package's own quantiser keeps of it, in the original row order."""
    reference = tiny_model("llama", num_heads=6, head_dim=16)
    weights = GGUFWeights(GGUFFile(write_model(reference, tmp_path / "m.gguf", kind)))
    name = "model.layers.1.self_attn.q_proj.weight"
    rows = interleave(reference.state_dict()[name], 6).numpy()
    kept = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
    halves = torch.from_numpy(kept).view(6, 8, 2, -1).transpose(1, 2).reshape(rows.shape)
    found = weights.get(name)
    assert torch.equal(found, halves) and found.dtype == torch.float32
    assert 0 < (found - reference.state_dict()[name]).abs().max() < 0.2


def test_unsupported_files_are_named(tmp_path: Path) -> None:
    """Other architectures, experts, scalings, parts and tensors are refused by name."""
    reference = tiny_model("llama")

    def attempt(words: str, tweak) -> None:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        with pytest.raises(UnsupportedModel, match=words):
            GGUFWeights(GGUFFile(write_model(reference, path, tweak=tweak)))

    attempt(r"llama\.expert_count 8", lambda writer: writer.add_expert_count(8))
    attempt(r"llama\.logit_scale 0\.5", lambda writer: writer.add_logit_scale(0.5))
    attempt("sliding_window 4096", lambda writer: writer.add_sliding_window(4096))
    attempt("one of 3 parts", lambda writer: writer.add_uint16("split.count", 3))
    attempt("value_length 8", lambda writer: writer.add_value_length(8))
    attempt(
        "RoPE scaling longrope",
        lambda writer: (
            writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            writer.add_rope_scaling_factor(2.0),
        ),
    )
    attempt(
        r"'blk\.0\.ffn_gate_exps\.weight' belongs to no supported model",
        lambda writer: writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros(4, np.float32)),
    )
    other = write_gguf(tmp_path / "other.gguf", "gemma3", lambda writer: None, {})
    with pytest.raises(UnsupportedModel, match=r"'gemma3' is not supported.*llama, qwen2, qwen3"):
        gguf_model_config(GGUFFile(other))


def test_files_that_make_no_sense(tmp_path: Path) -> None:
    """Missing and impossible numbers, and a Q with a wrong number of rows, are named."""
    tensors = gguf_tensors(tiny_model("llama"))

    def write(changes: dict[str, object], **arrays: np.ndarray) -> GGUFFile:
        values: dict[str, object] = {
            "embedding_length": 96, "block_count": 2, "attention.head_count": 6,
            "attention.head_count_kv": 2, "feed_forward_length": 200, "context_length": 64,
            "attention.layer_norm_rms_epsilon": 1e-5, **changes,
        }  # fmt: skip

        def fill(writer) -> None:
            for name, value in values.items():
                if isinstance(value, list):
                    writer.add_array(f"llama.{name}", value)
                elif isinstance(value, float):
                    writer.add_float32(f"llama.{name}", value)
                elif value is not None:
                    writer.add_uint32(f"llama.{name}", value)

        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        return GGUFFile(write_gguf(path, "llama", fill, tensors | arrays))

    gguf_model_config(write({}))
    for changes, words in (
        ({"embedding_length": None}, "embedding_length must be an integer, got None"),
        ({"attention.head_count": [6, 6]}, "head_count must be an integer"),
        ({"attention.head_count": 0}, "must be in 1..2147483647, got 0"),
        ({"attention.head_count_kv": 4}, "not a multiple of num_kv_heads 4"),
        ({"attention.layer_norm_rms_epsilon": None}, "epsilon must be a number"),
        ({"attention.layer_norm_rms_epsilon": [1, 2]}, "epsilon must be a number"),
    ):
        with pytest.raises(GGUFError, match=words):
            gguf_model_config(write(changes))
    bad_q = write({}, **{"blk.0.attn_q.weight": np.zeros((90, 96), np.float32)})
    with pytest.raises(GGUFError, match=r"attn_q.weight' must have 96 rows, got 90"):
        GGUFWeights(bad_q).get("model.layers.0.self_attn.q_proj.weight")
    divisors = write({}, **{"rope_freqs.weight": np.ones(5, np.float32)})
    with pytest.raises(GGUFError, match="must have 8 items"):
        gguf_model_config(divisors)
