"""The inputs of a decode step against plain integers."""

import pytest
import torch

from cearx.kernels.step_inputs import prepare_decode, prepare_decode_reference


@pytest.mark.parametrize(("num_rows", "block_size"), [(1, 16), (7, 64), (129, 16)])
def test_decode_inputs(num_rows: int, block_size: int, device: torch.device) -> None:
    """Every row reads its own seat, first and last place of a block included."""
    torch.manual_seed(num_rows)
    num_seats, blocks = 150, 5
    lengths = torch.randint(1, blocks * block_size + 1, (num_seats + 1,), dtype=torch.int32)
    lengths[:3] = torch.tensor([1, block_size, block_size + 1])
    tokens = torch.randint(0, 2**31 - 1, (num_seats + 1,), dtype=torch.int32)
    tables = torch.randint(0, 2**31 - 1, (num_seats + 1, blocks), dtype=torch.int32)
    seats = torch.randperm(num_seats, dtype=torch.int32)[:num_rows]
    seats[0] = 0
    int64 = [torch.full((num_rows,), -7, dtype=torch.int64, device=device) for _ in range(3)]
    seq_lens = torch.full((num_rows,), -7, dtype=torch.int32, device=device)
    prepare_decode(
        seats.to(device),
        lengths.to(device),
        tokens.to(device),
        tables.to(device),
        block_size=block_size,
        input_ids_R=int64[0],
        positions_R=int64[1],
        slots_R=int64[2],
        seq_lens_R=seq_lens,
    )
    got = list(zip(*(t.tolist() for t in (*int64, seq_lens)), strict=True))
    assert got == prepare_decode_reference(
        seats.tolist(), lengths.tolist(), tokens.tolist(), tables.tolist(), block_size
    )
