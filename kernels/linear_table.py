"""Which kernel runs a product, by (tokens rounded up, outputs N, inputs K) of its weight matrix.

Data only, measured on one NVIDIA H200 by `tests/benchmarks/tune_linear.py`, which writes this file.
A gated MLP's N counts gate and up together. What the table does not list goes to
`layer_linear.choose`'s rule. None means the library's product.
"""

from cearx.kernels.gemv import GemvConfig
from cearx.kernels.skinny_linear import SkinnyConfig

TABLE: dict[tuple[int, int, int], GemvConfig | SkinnyConfig | None] = {}
