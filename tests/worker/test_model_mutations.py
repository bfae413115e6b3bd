"""Planted mistakes in the models: each must move the logits far beyond the tests' tolerance."""

from collections.abc import Callable

import pytest
import torch
from paged_steps import PagedSequence, PagedSteps
from tiny_models import reference_logits, tiny_model
from torch import Tensor
from worker_models import kv_pool, worker_model

from cearx.worker import attention, norm, rotary
from cearx.worker.models import llama, qwen3
from cearx.worker.models.interface import LanguageModel

VISIBLE = 1e-2
"""A hundred times the tolerance of the equality tests."""

Mutation = Callable[[pytest.MonkeyPatch, LanguageModel], None]


def _no_rotation(patch: pytest.MonkeyPatch, model: LanguageModel) -> None:
    patch.setattr(llama, "rotate_in_place", lambda *_: None)
    patch.setattr(qwen3, "rotate_in_place", lambda *_: None)


def _rotation_in_pairs(patch: pytest.MonkeyPatch, model: LanguageModel) -> None:
    def rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> None:
        half = x_THD.shape[-1] // 2
        order = torch.arange(2 * half).view(2, half).t().flatten()
        pairs = x_THD[..., order.argsort()].clone()
        rotary.rotate_in_place(pairs, cos_T1D, sin_T1D)
        x_THD.copy_(pairs[..., order])

    patch.setattr(llama, "rotate_in_place", rotate)
    patch.setattr(qwen3, "rotate_in_place", rotate)


def _other_theta(patch: pytest.MonkeyPatch, model: LanguageModel) -> None:
    original = rotary.Rotary.tables
    patch.setattr(rotary.Rotary, "tables", lambda self, p: original(self, 3 * p))


def _norm_weight_plus_one(patch: pytest.MonkeyPatch, model: LanguageModel) -> None:
    for layer in model.layers:
        layer.mlp_norm.weight += 1.0


def _large_epsilon(patch: pytest.MonkeyPatch, model: LanguageModel) -> None:
    for layer in model.layers:
        layer.attention_norm._floor.fill_(1.0)


def _no_qk_norm(patch: pytest.MonkeyPatch, model: LanguageModel) -> None:
    patch.setattr(norm.QKNorm, "forward", lambda self, x: x)


def _norm_after_rotation(patch: pytest.MonkeyPatch, model: LanguageModel) -> None:
    def position(self: qwen3.Qwen3Layer, qk_THD: Tensor, step: llama.StepTables) -> None:
        rotary.rotate_in_place(qk_THD, step.cos_T1D, step.sin_T1D)
        qk_THD.copy_(self.qk_norm.forward(qk_THD))

    patch.setattr(qwen3.Qwen3Layer, "position", position)


def _qk_norms_swapped(patch: pytest.MonkeyPatch, model: LanguageModel) -> None:
    for layer in model.layers:
        layer.qk_norm.weight.copy_(layer.qk_norm.weight.flip(0))


def _no_bias(patch: pytest.MonkeyPatch, model: LanguageModel) -> None:
    for layer in model.layers:
        layer.qkv.weight.bias_N.zero_()


def _first_key_lost(patch: pytest.MonkeyPatch, model: LanguageModel) -> None:
    original = attention._Keys.read

    def read(self: attention._Keys, kv_SHD: Tensor) -> tuple[Tensor, Tensor]:
        k, v = original(self, kv_SHD)
        k, v = k.clone(), v.clone()
        k[:, :, 0], v[:, :, 0] = k[:, :, 1], v[:, :, 1]
        return k, v

    patch.setattr(attention._Keys, "read", read)


def _heads_interleaved(patch: pytest.MonkeyPatch, model: LanguageModel) -> None:
    """Query head h reads key-value head h % K instead of h // G."""
    original = attention.paged_attention

    def attend(q_TND: Tensor, *rest: object) -> Tensor:
        count = q_TND.shape[1]
        order = torch.arange(count).view(-1, 2).t().flatten()
        return original(q_TND[:, order].contiguous(), *rest)[:, order.argsort()]

    patch.setattr(llama, "paged_attention", attend)


def _future_visible(patch: pytest.MonkeyPatch, model: LanguageModel) -> None:
    original = attention.scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        return original(q, k, v, **{**options, "is_causal": False})

    patch.setattr(attention, "scaled_dot_product_attention", attend)


def _gate_and_up_swapped(patch: pytest.MonkeyPatch, model: LanguageModel) -> None:
    for layer in model.layers:
        panels = layer.gate_up.weight.panels()
        addresses = panels[:, :2]
        addresses.copy_(addresses.roll(panels.shape[0] // 2, 0))


MUTATIONS: list[tuple[str, Mutation]] = [
    ("llama", _no_rotation),
    ("llama", _rotation_in_pairs),
    ("llama", _other_theta),
    ("llama", _norm_weight_plus_one),
    ("llama", _large_epsilon),
    ("llama", _first_key_lost),
    ("llama", _heads_interleaved),
    ("llama", _future_visible),
    ("llama", _gate_and_up_swapped),
    ("llama-bias", _no_bias),
    ("qwen2", _no_bias),
    ("qwen3", _no_rotation),
    ("qwen3", _rotation_in_pairs),
    ("qwen3", _no_qk_norm),
    ("qwen3", _norm_after_rotation),
    ("qwen3", _qk_norms_swapped),
    ("qwen3", _first_key_lost),
]


def _error(family: str, mutation: Mutation | None, patch: pytest.MonkeyPatch) -> float:
    torch.set_num_threads(1)
    reference = tiny_model(family)
    model = worker_model(reference)
    patch.setattr(model, "compiled", None)  # the mistakes are made in the layers
    if mutation is not None:
        mutation(patch, model)
    ids = list(range(3, 73))
    steps = PagedSteps(model, kv_pool(reference, len(ids), 16))
    sequence = PagedSequence(ids)
    ours = torch.cat([steps.step([(sequence, count)])[0] for count in [40, 27, 1, 1, 1]])
    expected = reference_logits(reference, ids)
    return float((ours - expected).abs().nan_to_num(torch.inf).max())


@pytest.mark.parametrize(
    ("family", "mutation"), MUTATIONS, ids=[f"{f}{m.__name__}" for f, m in MUTATIONS]
)
def test_mutation_shows(family: str, mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake is far outside the tolerance, the code without it inside."""
    assert _error(family, None, monkeypatch) < 1e-4
    assert _error(family, mutation, monkeypatch) > VISIBLE
