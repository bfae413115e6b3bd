"""The tokens of a prompt by the model's own files instead of the server's answers.

Owns nothing: the tokenizer and the chat template are the frontend's. For `--tokenizer`; called by
`prompt_source.py` and `dataset.py`.
"""

from collections.abc import Callable
from pathlib import Path

from cearx.core.child import StartupError
from cearx.core.config import ModelFiles
from cearx.core.gguf_file import GGUFError
from cearx.frontend.bench.bench_error import BenchError
from cearx.frontend.bench.endpoint import EndpointKind
from cearx.frontend.chat_template import ChatTemplateError, load_chat_template, require
from cearx.frontend.tokenizer import load_tokenizer


def local_counter(path: Path, kind: EndpointKind) -> Callable[[str], int]:
    """Counts a text as a prompt of the endpoint; `path` is a model's folder or a .gguf file."""
    if not path.exists():
        raise BenchError(f"--tokenizer: no such folder or file: {path}")
    files = ModelFiles(path=path, name=path.name)
    try:
        tokenizer = load_tokenizer(files)
        if kind == "completions":
            return lambda text: len(tokenizer.encode(text))
        template = require(load_chat_template(files, tokenizer))
    except (StartupError, GGUFError, ChatTemplateError) as error:
        raise BenchError(f"--tokenizer {path}: {error}") from error

    def count(text: str) -> int:
        prompt = template.render([{"role": "user", "content": text}])
        return len(tokenizer.encode(prompt, add_special_tokens=False))

    return count
