"""Finds a model by its architecture's name.

Owns the literal table of built-in models; other packages add theirs through the entry-point group
`cearx.models` (name: architecture, value: the class). Called by the model loader.
"""

from importlib.metadata import entry_points

from cearx.worker.model_config import UnsupportedModel
from cearx.worker.models.interface import LanguageModel
from cearx.worker.models.llama import LlamaForCausalLM
from cearx.worker.models.qwen2 import Qwen2ForCausalLM
from cearx.worker.models.qwen3 import Qwen3ForCausalLM

ENTRY_POINT_GROUP = "cearx.models"

MODELS: dict[str, type[LanguageModel]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def find_model(architecture: str) -> type[LanguageModel]:
    """The built-in class, else the one an installed package offers; else UnsupportedModel."""
    if architecture in MODELS:
        return MODELS[architecture]
    offered = entry_points(group=ENTRY_POINT_GROUP)
    for entry_point in offered.select(name=architecture):
        model: type[LanguageModel] = entry_point.load()
        return model
    names = ", ".join([*MODELS, *sorted(offered.names)])
    raise UnsupportedModel(f"architecture {architecture} is not supported; supported: {names}")
