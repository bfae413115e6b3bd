"""The folder that stands in for Qwen3 where nothing can be downloaded."""

import json
from pathlib import Path

import pytest
from make_dummy_model import MODELS, NUM_ORDINARY, SPECIAL, find_config, make_dummy_model

from cearx.core.config import ModelFiles
from cearx.frontend.bench.local_count import local_counter
from cearx.frontend.bench.random_prompts import WORDS
from cearx.frontend.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dummy_model(find_config("qwen3_0.6b"), tmp_path_factory.mktemp("qwen"))


def test_ids_are_those_of_qwen3(folder: Path) -> None:
    """Every ordinary id has text, and the special ones stand where the config expects them."""
    tokenizer = load_tokenizer(ModelFiles(path=folder, name="dummy"))
    assert all(tokenizer.token_bytes(token_id) for token_id in range(NUM_ORDINARY))
    config = json.loads((folder / "config.json").read_text())
    assert tokenizer.encode("<|im_end|>") == [config["eos_token_id"]] == [NUM_ORDINARY + 2]
    assert tokenizer.encode(SPECIAL[0]) == [config["bos_token_id"]]


def test_words_are_one_token_each(folder: Path) -> None:
    """A chat of one word has nine tokens, and each common word adds exactly one."""
    count = local_counter(folder, "chat")
    assert count("The") == 9
    assert count("The " + " ".join(WORDS)) == 9 + len(WORDS)
    assert count("The unbelievable") > 10


@pytest.mark.parametrize(("name", "weights"), [("qwen3_8b", 15.137e9), ("qwen3_0.6b", 1.192e9)])
def test_configs_have_the_published_sizes(name: str, weights: float) -> None:
    """The bytes that one decode step reads, in bfloat16, are the known ones."""
    config = json.loads((MODELS / name / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    attention = hidden * config["head_dim"] * (2 * heads + 2 * config["num_key_value_heads"])
    layer = attention + 3 * hidden * config["intermediate_size"]
    elements = config["num_hidden_layers"] * layer + config["vocab_size"] * hidden
    assert 2 * elements == pytest.approx(weights, rel=1e-3)
