"""Tiny random embedding models and rerankers, and what transformers makes of them by the recipes
of Qwen3-Embedding's and Qwen3-Reranker's model cards.

The tokenizer has a token for each byte, Qwen's special ones, and `no` and `yes` as one token each;
that of an embedding model ends every text with <|endoftext|>.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tiny_models import save_tiny, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
MERGES = [("n", "o"), ("y", "e"), ("ye", "s")]
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
WEB_SEARCH = "Given a web search query, retrieve relevant passages that answer the query"


def save_tokenizer(folder: Path, *, ends_texts: bool) -> PreTrainedTokenizerFast:
    """Pads on the left, as the recipes do."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    if ends_texts:
        end = (SPECIAL[0], backend.token_to_id(SPECIAL[0]))
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A {SPECIAL[0]}", special_tokens=[end]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        padding_side="left",
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


class EmbeddingModel:
    """A folder as publishers make it: names without a prefix, no output layer, modules.json."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = save_tokenizer(folder, ends_texts=True)
        causal = tiny_model("qwen3", tied=True, vocab_size=len(self.tokenizer), seed=5)
        causal.base_model.save_pretrained(folder)
        kinds = ("Transformer", "Pooling", "Normalize")
        modules = [{"path": "", "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
        modules[1]["path"] = "1_Pooling"
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
        self.folder = folder
        self.size = causal.config.hidden_size
        self._model = AutoModel.from_pretrained(folder).eval()

    @torch.no_grad()
    def embed(self, texts: Sequence[str], max_length: int = 512) -> Tensor:
        """[len(texts), size]: the last token's state, at length 1."""
        batch = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=max_length, return_tensors="pt"
        )
        states_BTE = self._model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
        return torch.nn.functional.normalize(states_BTE[:, -1], p=2, dim=1)

    def cut(self, vectors: Tensor, dimensions: int) -> Tensor:
        """Matryoshka: the first components, at length 1 again."""
        return torch.nn.functional.normalize(vectors[:, :dimensions], p=2, dim=1)


class Reranker:
    """A folder whose configuration is that of a model that writes texts; its name tells."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = save_tokenizer(folder, ends_texts=False)
        causal = tiny_model("qwen3", tied=False, vocab_size=len(self.tokenizer), seed=4)
        save_tiny(causal, folder)
        self.folder = folder
        self._model = AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        instruction: str = WEB_SEARCH,
        max_length: int = 1024,
    ) -> list[float]:
        """Of a query and a document: P(yes) among the two answers behind the prompt."""
        before = self.tokenizer.encode(BEFORE, add_special_tokens=False)
        behind = self.tokenizer.encode(BEHIND, add_special_tokens=False)
        bodies = [
            f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
            for query, document in pairs
        ]
        cut = self.tokenizer(
            bodies, truncation=True, max_length=max_length - len(before) - len(behind)
        )
        rows = [before + ids + behind for ids in cut["input_ids"]]
        batch = self.tokenizer.pad({"input_ids": rows}, padding=True, return_tensors="pt")
        logits_BV = self._model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits[:, -1]
        answers = [self.tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]
        chosen = torch.nn.functional.log_softmax(logits_BV[:, answers], dim=1)
        scores: list[float] = chosen[:, 1].exp().tolist()
        return scores
