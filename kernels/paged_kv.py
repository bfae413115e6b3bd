"""The layout of a layer's keys and values on the device, for every kernel that reads or writes it.

Owns the shape `kv_B2KPD`, the early request of a row's tokens that decode kernels make, and the
float32 gather that the references use; allocates nothing. The attention kernels and
`position_and_store` address the pool by these rules.

```
kv_B2KPD  | block 0: keys of head 0 | keys of head 1 | ... | values of head 0 | ... | block 1 ...
            P tokens x D features, contiguous
```
B blocks, K key-value heads, P block size, D head_dim, L tokens of a request, M blocks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cearx.kernels.dependent_launch import fetch_into_l2

HEAD_DIMS = (16, 32, 64, 128)
BLOCK_SIZES = (16, 32, 64, 128, 256)


def check_pool(kv_B2KPD: Tensor) -> tuple[int, int, int]:
    """Returns (K, P, D) of a pool that the kernels can address."""
    assert kv_B2KPD.dim() == 5 and kv_B2KPD.shape[1] == 2, f"KV pool of {kv_B2KPD.shape}"
    assert kv_B2KPD.is_contiguous(), "the KV pool must be contiguous"
    _, _, num_kv_heads, block_size, head_dim = kv_B2KPD.shape
    assert head_dim in HEAD_DIMS, f"head_dim {head_dim} is none of {HEAD_DIMS}"
    assert block_size in BLOCK_SIZES, f"block size {block_size} is none of {BLOCK_SIZES}"
    return num_kv_heads, block_size, head_dim


def check_tables(block_tables_SM: Tensor, seats: Tensor, seq_lens: Tensor) -> None:
    """All int32 but the seats' rows contiguous: the kernels load them without conversion."""
    assert block_tables_SM.dtype == torch.int32 and block_tables_SM.stride(1) == 1
    assert seats.dtype == torch.int32 and seats.is_contiguous()
    assert seq_lens.dtype == torch.int32 and seq_lens.is_contiguous()
    assert seats.shape == seq_lens.shape, f"{seats.shape} seats, {seq_lens.shape} lengths"


def gather_float(kv_B2KPD: Tensor, table_M: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one request in float32, each [L, K, D]."""
    block_size = kv_B2KPD.shape[3]
    blocks = table_M[: -(-length // block_size)].long()
    kv_M2KPD = kv_B2KPD[blocks].float()
    kv_2LKD = kv_M2KPD.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
    return kv_2LKD[0], kv_2LKD[1]


@triton.jit
def fetch_tokens(
    p_k,
    p_table,
    start,
    last,
    VALUES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Asks for keys and values of a head's tokens, at most up to `last`, one address a line.

    `p_k` is where the head's keys lie in a block, VALUES the distance of its values.
    """
    ELEMENTS: tl.constexpr = 128 // (p_k.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = (HEAD_DIM + ELEMENTS - 1) // ELEMENTS
    position = tl.minimum(start + tl.arange(0, TOKENS), last)
    blocks = tl.load(p_table + position // BLOCK_SIZE)
    o_token = blocks.to(tl.int64) * (2 * VALUES) + position % BLOCK_SIZE * HEAD_DIM
    p_lines = p_k + o_token[:, None] + (tl.arange(0, LINES) * ELEMENTS)[None, :]
    fetch_into_l2(p_lines)
    fetch_into_l2(p_lines + VALUES)
