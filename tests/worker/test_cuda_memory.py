"""The KV pool on a GPU takes what is left, and not a byte more."""

import pytest

from cearx.core.child import StartupError
from cearx.core.config import WorkerConfig
from cearx.worker.cuda.memory import RESERVE_BYTES, CudaMemoryPlan, Measured, plan_cuda_memory

BLOCK_BYTES = 2_359_296


def plan(config: WorkerConfig, left_bytes: int) -> CudaMemoryPlan:
    measured = Measured(
        total_bytes=RESERVE_BYTES + left_bytes,
        used_bytes=0,
        weight_bytes=0,
        buffer_bytes=0,
        activation_bytes=0,
        graph_bytes=0,
    )
    return plan_cuda_memory(
        config,
        measured,
        block_size=64,
        bytes_per_block=BLOCK_BYTES,
        max_num_seqs=256,
        model_len_wanted=40_960,
    )


@pytest.mark.parametrize("spare_bytes", [0, 1, BLOCK_BYTES - 1])
def test_the_pool_and_the_block_of_padded_rows_fit(spare_bytes: int) -> None:
    """All whole blocks but one become the pool, whatever is left beside them."""
    config = WorkerConfig(gpu_memory_utilization=1.0)
    assert plan(config, 9 * BLOCK_BYTES + spare_bytes).num_blocks == 8


def test_a_single_block_is_too_little() -> None:
    """Without room for one block beside the padded rows' there is no pool."""
    with pytest.raises(StartupError, match="does not fit"):
        plan(WorkerConfig(gpu_memory_utilization=1.0), BLOCK_BYTES)
