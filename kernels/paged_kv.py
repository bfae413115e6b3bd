"""The layout of a layer's keys and values on the device, for every kernel that reads or writes it.

Owns the shape `kv_B2KPD` and the float32 gather that the references use; allocates nothing. The
kernels around attention address the pool by these rules.

```
kv_B2KPD  | block 0: keys of head 0 | keys of head 1 | ... | values of head 0 | ... | block 1 ...
            P tokens x D features, contiguous
```
The pool has the model's type, or e4m3: then numbers are rounded as they are written, without a
scale and beyond 448 to 448, and become the model's type, exactly, as they are read.
B blocks, K key-value heads, P block size, D head_dim, L tokens of a request, M blocks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8 = torch.float8_e4m3fn
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


def check_types(kv_B2KPD: Tensor, *tensors: Tensor) -> None:
    """The model's tensors share a type, which is the pool's unless that is e4m3."""
    types = {tensor.dtype for tensor in tensors}
    assert len(types) == 1, f"several types: {types}"
    assert kv_B2KPD.dtype in types | {FP8}, f"{types} for a pool of {kv_B2KPD.dtype}"


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
def as_computed(b_kv, dtype: tl.constexpr):
    """Keys or values of the pool in the model's type."""
    if b_kv.dtype.primitive_bitwidth == 8:
        # By way of float32: straight to bfloat16 takes instructions of a quarter of the rate.
        b_kv = b_kv.to(tl.float32).to(dtype)
    return b_kv


@triton.jit
def as_stored(b_kv, dtype: tl.constexpr):
    """Keys or values of the model's type in the pool's."""
    if dtype.primitive_bitwidth == 8:
        # Casts saturate on a GPU; NaN must stay what it is, which a bound would not let it.
        b_kv = b_kv.to(tl.float32).to(dtype)
    return b_kv
