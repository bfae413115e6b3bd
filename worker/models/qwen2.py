"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values.

Owns nothing but its entry in the table of families, where the biases are set.
"""

from cearx.worker.model_config import FAMILIES, Family
from cearx.worker.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    family: Family = FAMILIES["Qwen2ForCausalLM"]
