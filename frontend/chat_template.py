"""Turns a conversation into the model's prompt with the model's own Jinja template.

Owns where a template is found (a file of the person's choice, chat_template.jinja,
tokenizer_config.json, GGUF metadata) and the errors around it; what a template may do is
`template_sandbox.py`. Called by the chat route, from worker threads.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateError

from cearx.core.child import StartupError
from cearx.core.config import ModelFiles
from cearx.core.gguf_file import GGUFFile
from cearx.frontend.template_sandbox import TemplateEnvironment, render
from cearx.frontend.tokenizer import Tokenizer

GGUF_KEY = "tokenizer.chat_template"
RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
)


class ChatTemplateError(Exception):
    """The conversation cannot be rendered; the message is for the client."""


class ChatTemplateMissing(ChatTemplateError):
    """The model has no chat template."""


class BadChatTemplate(StartupError):
    """The template itself cannot be read or compiled."""


class ChatTemplate:
    """A compiled template; `render` may be called from several threads at once."""

    def __init__(self, source: str, bos_token: str | None, eos_token: str | None) -> None:
        """Raises BadChatTemplate when the source does not compile."""
        self.source = source
        try:
            self._template = TemplateEnvironment().from_string(source)
        except (TemplateError, RecursionError, SyntaxError) as error:
            raise BadChatTemplate(f"the chat template does not compile: {error}") from error
        named = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: token for name, token in named.items() if token is not None}

    @property
    def knows_tools(self) -> bool:
        """Whether it may tell the model which tools there are."""
        return re.search(r"\btools\b", self.source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt; special tokens are written out in it.

        `kwargs` are the client's chat_template_kwargs. Raises ChatTemplateError with the template's
        own words when it refuses the conversation.
        """
        if taken := RESERVED & kwargs.keys():
            raise ChatTemplateError(f"chat_template_kwargs cannot set {', '.join(sorted(taken))}")
        variables = {
            **self._tokens,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render(self._template, variables)
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses this: {error}") from error
        except Exception as error:  # whatever a template's expressions provoke on these messages
            kind = type(error).__name__
            raise ChatTemplateError(f"the chat template fails on this: {kind}: {error}") from error


def load_chat_template(
    files: ModelFiles, tokenizer: Tokenizer, override: Path | None = None
) -> ChatTemplate | None:
    """The model's template, or the one in the file `override`; None when the model has none.

    Raises BadChatTemplate for a template that cannot be read or compiled.
    """
    source = _read(override) if override is not None else _find_source(files)
    if source is None:
        return None
    return ChatTemplate(source, tokenizer.bos_token, tokenizer.eos_token)


def require(template: ChatTemplate | None) -> ChatTemplate:
    """The template; raises ChatTemplateMissing, which says how to give one."""
    if template is None:
        raise ChatTemplateMissing(
            "this model has no chat template: start the server with --chat-template FILE, "
            "or use /v1/completions"
        )
    return template


def cut_behind(rendered: str, final_content: str) -> str:
    """The rendered conversation up to the end of its final message's content.

    Templates may strip a content; what they kept of it is what is found. Raises ChatTemplateError
    when there is nothing to continue, or when the template does not show it.
    """
    bare = final_content.strip()
    if not bare:
        raise ChatTemplateError("continue_final_message needs a final message that is not empty")
    start = rendered.rfind(bare)
    if start < 0:
        raise ChatTemplateError("the chat template changes the final message: it has no end to cut")
    ending = final_content[final_content.index(bare) + len(bare) :]
    end = start + len(bare)
    return rendered[: end + len(ending)] if rendered.startswith(ending, end) else rendered[:end]


def _find_source(files: ModelFiles) -> str | None:
    if not files.path.is_dir():
        value = GGUFFile(files.path).get(GGUF_KEY)
        return value if isinstance(value, str) else None
    path = files.path / "chat_template.jinja"
    if path.is_file():
        return _read(path)
    return _from_tokenizer_config(files.path / "tokenizer_config.json")


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """What we read of tokenizer_config.json."""

    chat_template: str | list[_NamedTemplate] | None = None


def _from_tokenizer_config(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_TokenizerConfig).chat_template
    except (OSError, msgspec.DecodeError) as error:
        raise BadChatTemplate(f"{path} cannot be used: {error}") from error
    if not isinstance(found, list):
        return found
    for named in found:
        if named.name == "default":
            return named.template
    names = ", ".join(named.name for named in found)
    raise BadChatTemplate(f"{path}: none of its chat templates ({names}) is called 'default'")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadChatTemplate(f"cannot read the chat template {path}: {error}") from error
