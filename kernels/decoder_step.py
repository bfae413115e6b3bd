"""All layers of a Llama-like decoder for a step of few tokens, run by a whole team of threads.

Owns the order of a step's parts and the arithmetic between the products. Threads claim panels,
tokens or heads and meet after each part. Every token's result is computed in one order, whatever
stands beside it in the step. `worker/compiled_decoder.py` builds the arguments.

T tokens, E hidden size, N query heads, K key-value heads, H = N + 2 * K, D head_dim, I intermediate
size, P panels, L layers, M blocks of the longest request, R requests, F features of a product.
E, N * D and I are padded to whole groups of 32 by zeros where they are inputs of a product.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]  # exported in all but name

from cearx.kernels.cpu_compiler import compiled, emitted
from cearx.kernels.panel_product import ADD, GATE, STORE, Floats, Table, exp, panel_product
from cearx.kernels.thread_steps import fetch_add, wait_for_all
from cearx.kernels.vectors import add_scaled, dot

COUNTERS_EACH = 16
"""A part's claims and, a cache line further, its barrier."""
PARTS = 6
"""Of a layer: queries, keys and values; positions; attention; its output; gate and up; down."""


class DecoderWeights(NamedTuple):
    panels_P4: Table
    """Of all products, layer by layer."""
    first_panel_X: Table
    """Where each layer's four products begin, and the end."""
    norms_LXE: Floats
    """Before attention and before the MLP."""
    head_norms_LXD: Floats
    """Of queries and keys; no layers where the model has none."""
    qkv_bias_LF: Floats
    output_bias_LE: Floats
    gate_up_bias_LF: Floats
    down_bias_LE: Floats
    num_kv_heads: int
    epsilon: float


class StepInputs(NamedTuple):
    layers_L: Table
    """Addresses of the KV cache's layers, each [slots, 2 * K, D]."""
    cos_TD: Floats
    sin_TD: Floats
    row_T: Table
    position_T: Table
    slot_T: Table
    block_tables_RM: Table
    block_size: int


class StepBuffers(NamedTuple):
    hidden_TE: Floats
    """The embedded tokens; the residual stream."""
    normed_XTE: Floats
    """Of each thread, which all normalise all tokens rather than wait for each other."""
    qkv_THD: Floats
    attended_TF: Floats
    gated_TI: Floats


@emitted(types.CPointer(types.float32), types.int64)
def pointer_to(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.inttoptr(address, ir.FloatType().as_pointer())


@compiled
def normalise(x_E: Floats, weight_E: Floats, epsilon: float, out_E: Floats) -> None:
    """`weight * x / sqrt(mean(x^2) + epsilon)`."""
    total = np.float32(0.0)
    for i in range(weight_E.shape[0]):
        total += x_E[i] * x_E[i]
    scale = np.float32(1.0 / np.sqrt(np.float64(total) / weight_E.shape[0] + epsilon))
    for i in range(weight_E.shape[0]):
        out_E[i] = x_E[i] * scale * weight_E[i]


@compiled
def rotate(x_D: Floats, cos_D: Floats, sin_D: Floats) -> None:
    """Turns pairs (i, i + D / 2) in place; the first half of `sin_D` is negated already."""
    half = x_D.shape[0] // 2
    for i in range(half):
        low, high = x_D[i], x_D[i + half]
        x_D[i] = low * cos_D[i] + high * sin_D[i]
        x_D[i + half] = high * cos_D[i + half] + low * sin_D[i + half]


@compiled
def position_token(
    weights: DecoderWeights, inputs: StepInputs, layer: int, kv_SHD: Floats, qkv_THD: Floats, t: int
) -> None:
    """Normalises and turns a token's queries and keys, and writes its keys and values."""
    num_kv_heads = weights.num_kv_heads
    num_heads = qkv_THD.shape[1] - 2 * num_kv_heads
    for head in range(num_heads + num_kv_heads):
        x_D = qkv_THD[t, head]
        if weights.head_norms_LXD.shape[0] > 0:
            which = 0 if head < num_heads else 1
            normalise(x_D, weights.head_norms_LXD[layer, which], weights.epsilon, x_D)
        rotate(x_D, inputs.cos_TD[t], inputs.sin_TD[t])
    for head in range(2 * num_kv_heads):
        for i in range(qkv_THD.shape[2]):
            kv_SHD[inputs.slot_T[t], head, i] = qkv_THD[t, num_heads + head, i]


@compiled
def attend(
    inputs: StepInputs,
    kv_SHD: Floats,
    qkv_THD: Floats,
    t: int,
    first_head: int,
    num_heads: int,
    kv_head: int,
    out_F: Floats,
) -> None:
    """Attention of consecutive heads of one token that share a key-value head."""
    head_dim = qkv_THD.shape[2]
    head_bytes, slot_bytes = 4 * head_dim, 4 * head_dim * kv_SHD.shape[1]
    keys = kv_SHD.ctypes.data + kv_head * head_bytes
    values = keys + kv_SHD.shape[1] // 2 * head_bytes
    queries = qkv_THD.ctypes.data + (t * qkv_THD.shape[1] + first_head) * head_bytes
    out = out_F.ctypes.data + first_head * head_bytes
    block_table_M = inputs.block_tables_RM[inputs.row_T[t]]
    block_size = inputs.block_size
    length = inputs.position_T[t] + 1
    factor = np.float32(1.0 / np.sqrt(head_dim))
    scores = np.empty((num_heads, length), np.float32)
    for start in range(0, length, block_size):
        key = keys + block_table_M[start // block_size] * block_size * slot_bytes
        for j in range(start, min(start + block_size, length)):
            for head in range(num_heads):
                scores[head, j] = factor * dot(queries + head * head_bytes, key, head_dim)
            key += slot_bytes
    for head in range(num_heads):
        largest = scores[head, 0]
        for j in range(1, length):
            largest = max(largest, scores[head, j])
        total = np.float32(0.0)
        for j in range(length):
            scores[head, j] = exp(scores[head, j] - largest)
            total += scores[head, j]
        for j in range(length):
            scores[head, j] /= total
    out_F[first_head * head_dim : (first_head + num_heads) * head_dim] = np.float32(0.0)
    for start in range(0, length, block_size):
        value = values + block_table_M[start // block_size] * block_size * slot_bytes
        for j in range(start, min(start + block_size, length)):
            for head in range(num_heads):
                add_scaled(out + head * head_bytes, scores[head, j], value, head_dim)
            value += slot_bytes


@compiled
def attend_claimed(
    inputs: StepInputs,
    kv_SHD: Floats,
    qkv_THD: Floats,
    out_TF: Floats,
    num_threads: int,
    claims: int,
) -> None:
    """A claim is a token's key-value head, or one query head where those would be few."""
    num_kv_heads = kv_SHD.shape[1] // 2
    num_heads = qkv_THD.shape[1] - 2 * num_kv_heads
    num_tokens = qkv_THD.shape[0]
    shared = num_heads // num_kv_heads
    together = shared if num_tokens * num_kv_heads >= 4 * num_threads else 1
    claims_each = num_heads // together
    while True:
        claim = fetch_add(claims, 1)
        if claim >= num_tokens * claims_each:
            break
        t, head = claim // claims_each, claim % claims_each * together
        attend(inputs, kv_SHD, qkv_THD, t, head, together, head // shared, out_TF[t])


@compiled
def multiply(
    weights: DecoderWeights,
    product: int,
    x_TK: Floats,
    bias_N: Floats,
    out_TN: Floats,
    then: int,
    claims: int,
    scratch: Floats,
) -> None:
    first, end = weights.first_panel_X[product], weights.first_panel_X[product + 1]
    panel_product(weights.panels_P4[first:end], x_TK, bias_N, out_TN, then, claims, scratch)


@compiled
def decoder_step(
    weights: DecoderWeights,
    inputs: StepInputs,
    buffers: StepBuffers,
    index: int,
    num_threads: int,
    counters: int,
    scratch: Floats,
) -> None:
    """From embedded tokens to the hidden states behind the last layer, in place.

    `counters` is the address of COUNTERS_EACH zeros for each part of each layer.
    """
    hidden_TE, normed_TE, qkv_THD = buffers.hidden_TE, buffers.normed_XTE[index], buffers.qkv_THD
    num_tokens, num_layers = hidden_TE.shape[0], weights.norms_LXE.shape[0]
    qkv_TF = qkv_THD.reshape(num_tokens, -1)
    part = 8 * COUNTERS_EACH
    meet = 4 * COUNTERS_EACH
    for layer in range(num_layers):
        kv_shape = (2**40, 2 * weights.num_kv_heads, qkv_THD.shape[2])
        kv_SHD = carray(pointer_to(inputs.layers_L[layer]), kv_shape)
        at = counters + layer * PARTS * part
        for t in range(num_tokens):
            norm_E = weights.norms_LXE[layer, 0]
            normalise(hidden_TE[t], norm_E, weights.epsilon, normed_TE[t])
        bias_F = weights.qkv_bias_LF[layer]
        multiply(weights, 4 * layer, normed_TE, bias_F, qkv_TF, STORE, at, scratch)
        wait_for_all(at + meet, num_threads)
        at += part
        while True:
            t = fetch_add(at, 1)
            if t >= num_tokens:
                break
            position_token(weights, inputs, layer, kv_SHD, qkv_THD, t)
        wait_for_all(at + meet, num_threads)
        at += part
        attend_claimed(inputs, kv_SHD, qkv_THD, buffers.attended_TF, num_threads, at)
        wait_for_all(at + meet, num_threads)
        at += part
        bias_E, attended_TF = weights.output_bias_LE[layer], buffers.attended_TF
        multiply(weights, 4 * layer + 1, attended_TF, bias_E, hidden_TE, ADD, at, scratch)
        wait_for_all(at + meet, num_threads)
        at += part
        for t in range(num_tokens):
            norm_E = weights.norms_LXE[layer, 1]
            normalise(hidden_TE[t], norm_E, weights.epsilon, normed_TE[t])
        bias_F = weights.gate_up_bias_LF[layer]
        multiply(weights, 4 * layer + 2, normed_TE, bias_F, buffers.gated_TI, GATE, at, scratch)
        wait_for_all(at + meet, num_threads)
        at += part
        bias_E, gated_TI = weights.down_bias_LE[layer], buffers.gated_TI
        multiply(weights, 4 * layer + 3, gated_TI, bias_E, hidden_TE, ADD, at, scratch)
        wait_for_all(at + meet, num_threads)
