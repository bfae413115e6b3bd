"""The layout of a layer's keys and values on the device, for every kernel that reads or writes it.

Owns the shape `kv_B2KPD` and the float32 gather that the references use; allocates nothing. The
kernels around attention address the pool by these rules.

```
kv_B2KPD  | block 0: keys of head 0 | keys of head 1 | ... | values of head 0 | ... | block 1 ...
            P tokens x D features, contiguous
```
B blocks, K key-value heads, P block size, D head_dim, L tokens of a request, M blocks of a row.
"""

import torch
from torch import Tensor

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
