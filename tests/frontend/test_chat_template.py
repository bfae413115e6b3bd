"""Chat templates: the same prompts as transformers, clear errors, and no way out of the sandbox."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gguf_samples import write_gguf
from small_tokenizers import SPECIAL, byte_level_folder, gguf_tokenizer
from transformers import AutoTokenizer

from cearx.core.config import ModelFiles
from cearx.core.gguf_file import GGUFFile
from cearx.core.model_source import resolve
from cearx.frontend import template_limits
from cearx.frontend.chat_template import (
    BadChatTemplate,
    ChatTemplate,
    ChatTemplateError,
    ChatTemplateMissing,
    load_chat_template,
    require,
)
from cearx.frontend.tokenizer import load_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The weather of a <city> & its "mood"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": 'Be <terse> & "exact".'}, {"role": "user", "content": "中 😀"}],
    [
        {"role": "user", "content": "  spaces kept  \n"},
        {"role": "assistant", "content": "{{ not a template }} {% raw %}"},
        {"role": "user", "content": "<|im_end|>"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "function": {
                        "name": "get_weather",
                        "arguments": {"city": "Zürich", "n": 12345678},
                    }
                }
            ],
        },
        {"role": "tool", "content": "sunny"},
    ],
]
TEMPLATES = {
    "loops and blocks": """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- bos_token ~ 'system:default\\n' }}
    {%- endif %}
    {% if message['role'] == 'tool' %}{% continue %}{% endif %}
    {{ message['role'] + ':' + (message['content'] | trim) + eos_token }}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}
""",
    "tools and macros": """
{%- macro call(function) -%}
{"name": "{{ function.name }}", "arguments": {{ function.arguments | tojson }}}
{%- endmacro -%}
{%- set ns = namespace(last=-1, text='') -%}
{%- if tools %}# Tools
{% for tool in tools %}{{ tool | tojson(indent=2) }}
{{ tool.function.parameters.properties | items | map('first') | join(', ') }}
{% endfor %}{% endif %}
{%- for message in messages[::-1] %}{% if message.role == 'user' and ns.last < 0 %}
{%- set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.tool_calls is defined and message.tool_calls %}
{%- for tool_call in message.tool_calls %}{{ call(tool_call.function) }}
{% endfor %}{% else %}
{%- generation %}[{{ message.role | upper }}{{ loop.index0 == ns.last }}] {{ message.content }}
{% endgeneration %}{% endif %}{% endfor %}
{%- if not add_generation_prompt %}{{ 'closed %s %03d' | format('x', 7) }}{% endif %}
{{- '%s=%d' % ('n', messages | length) }} {{ '{:>4}'.format('r') }} {{ 'q'.ljust(3) }}|
""",
    "kwargs and dates": """
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{{- strftime_now('%Y-%m-%d') }} {{ undefined_name }}{{ documents }}
{%- set words = [] %}{% for message in messages %}
{%- set words = words + [message.content] %}{{ words | join('~') | replace('~', '-') }}
{%- if loop.index > 1 %}{% break %}{% endif %}{% endfor %}
{{- {'b': [1, 2.5, none, true], 'a': 'é<>&'} | tojson(sort_keys=true) }}
{{- messages | map(attribute='role') | unique | list }}{{ dict(a=1) | dictsort }}
{{- 'two\\nlines' | indent(3) }}{{ 'two\\nlines' | indent(2, true) }}{{ [3, 1] | sort | string }}
""",
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory):
    return AutoTokenizer.from_pretrained(byte_level_folder(tmp_path_factory.mktemp("reference")))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"enable_thinking": False}])
def test_prompts_equal_transformers(reference, name: str, options: dict[str, Any]) -> None:
    """Each conversation becomes the prompt that apply_chat_template makes of it."""
    template = ChatTemplate(TEMPLATES[name], SPECIAL[1], SPECIAL[3])
    for conversation in CONVERSATIONS:
        for add in (True, False):
            expected = reference.apply_chat_template(
                conversation,
                chat_template=TEMPLATES[name],
                add_generation_prompt=add,
                tokenize=False,
                **options,
            )
            found = template.render(conversation, add_generation_prompt=add, **options)
            assert found == expected


@pytest.mark.model
def test_default_model_template(reference) -> None:
    """The default model's own template, with the system prompt that it adds."""
    files = resolve(None, lambda stage, completed, total: None)
    template = load_chat_template(files, load_tokenizer(files))
    source = GGUFFile(files.path).get("tokenizer.chat_template")
    for conversation in CONVERSATIONS[:3]:
        expected = reference.apply_chat_template(
            conversation, chat_template=source, add_generation_prompt=True, tokenize=False
        )
        assert require(template).render(conversation) == expected
    prompt = require(template).render(CONVERSATIONS[0])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_refusal_carries_its_words() -> None:
    """raise_exception reaches the client as the template wrote it."""
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", None, None)
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render([])


def test_a_failing_expression_is_an_error() -> None:
    """Messages of a shape that the template cannot use are a client error, not a crash."""
    template = ChatTemplate("{{ 'x' + messages[0].content }}{{ messages[3].role }}", None, None)
    with pytest.raises(ChatTemplateError, match=r"TypeError.*str"):
        template.render([{"role": "user", "content": 5}])
    with pytest.raises(ChatTemplateError, match="has no element 3"):
        template.render([{"role": "user", "content": "x"}])


def test_missing_tokens_are_undefined() -> None:
    """A model without a BOS renders nothing for it, never the word None."""
    source = "{{ bos_token }}{{ bos_token is defined }}{{ eos_token }}"
    assert ChatTemplate(source, None, "</s>").render([]) == "False</s>"


def test_kwargs_cannot_replace_the_conversation() -> None:
    """A client's chat_template_kwargs reach the template, except under reserved names."""
    template = ChatTemplate("{{ flavour }}{{ bos_token }}", "B", None)
    assert template.render([], flavour="sweet") == "sweetB"
    with pytest.raises(ChatTemplateError, match="cannot set bos_token"):
        template.render([], bos_token="forged")


def test_a_bad_template_fails_at_start() -> None:
    """What does not compile, or names what does not exist here, is refused before any request."""
    for source in ("{% for %}", "{{ 'x' | attr('y') }}", "{% endif %}", "{{ " + "(" * 5000):
        with pytest.raises(BadChatTemplate, match="does not compile"):
            ChatTemplate(source, None, None)


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['__builtins__'] }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ messages[0].clear() }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ self.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ dict.mro() }}",
    "{{ 'x'.encode() }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_escape(source: str) -> None:
    """Attributes of the interpreter, other files and changes to the messages are out of reach."""
    messages = [{"role": "user", "content": "hi"}]
    try:
        text = ChatTemplate(source, None, None).render(messages)
    except ChatTemplateError:
        text = ""
    assert text == "" and messages == [{"role": "user", "content": "hi"}]


NESTED = "{% for i in range(4000) %}{% for j in range(4000) %}BODY{% endfor %}{% endfor %}"
"""Ends by itself after seconds, so that a missing clock fails the test and does not hang it."""
HOSTILE = {
    "endless loop": NESTED.replace("BODY", ""),
    "loop without output": NESTED.replace("BODY", "{% set x = 1 %}"),
    "loop in a condition": NESTED.replace("BODY", "{% if i == -1 %}x{% endif %}"),
    "recursive macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(22) }}",
    "endless macro": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
    "call block": "{% macro f() %}{% for i in range(4000) %}{{ caller() }}{% endfor %}"
    "{% endmacro %}"
    "{% call f() %}{% for i in range(4000) %}{% endfor %}{% endcall %}",
    "filter in loop": NESTED.replace("BODY", "{% set x = 'a' | upper %}"),
    "much output": NESTED.replace("BODY", "{{ 'abcdefgh' * 1000 }}"),
    "long repeat": "{{ 'a' * 1000000000 }}",
    "long repeat, reversed": "{{ 1000000000 * 'a' }}",
    "list repeat": "{{ [0] * 1000000000 }}",
    "doubling by ~": "{% set n = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling by +": "{% set n = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling a list": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling by tojson": "{% set n = namespace(s='\"') %}{% for i in range(60) %}"
    "{% set n.s = n.s | tojson %}{% endfor %}",
    "nested lists": "{% set n = namespace(s=['ab']) %}{% for i in range(60) %}"
    "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "one text many times": "{{ ['a' * 9000000] * 1000000 }}",
    "one text many times, filtered": "{{ (['a' * 9000000] * 1000000) | string }}",
    "one text many times, joined": "{{ ('b' * 9000).join(['a' * 90000] * 100000) }}",
    "one text many times, in JSON": "{{ (['a' * 9000000] * 1000000) | tojson }}",
    "replace": "{{ ('a' * 4000000).replace('a', 'b' * 1000000) }}",
    "replace filter": "{{ ('a' * 4000000) | replace('a', 'b' * 1000000) }}",
    "indent": "{{ ('\\n' * 4000000) | indent(1000000) }}",
    "wide format": "{{ '{:>1000000000}'.format('x') }}",
    "computed width": "{{ '{:{}}'.format('x', 1000000000) }}",
    "wide %": "{{ '%1000000000d' % 1 }}",
    "wide % from outside": "{{ '%*d' % (1000000000, 1) }}",
    "wide format filter": "{{ '%1000000000d' | format(1) }}",
    "padding": "{{ 'x'.ljust(1000000000) }}",
    "tabs": "{{ ('\\t' * 1000000).expandtabs(1000000) }}",
    "batch": "{{ range(3) | batch(1000000000, 'x') | list }}",
    "power": "{{ 10 ** 10000000000 }}",
    "large numbers": "{% set n = namespace(x=3) %}{% for i in range(60) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}",
    "large range": "{{ range(10000000000) | list }}",
    "bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "date": "{{ strftime_now('%Y' * 1000000) }}",
    "deep nesting": "{% set n = namespace(s=[]) %}{% for i in range(99999) %}"
    "{% set n.s = [n.s] %}{% endfor %}{{ n.s }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_ends_soon(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a template computes, it ends within the limits of time and size."""
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    template = ChatTemplate(HOSTILE[name], None, None)
    with pytest.raises(ChatTemplateError) as error:
        template.render([])
    assert len(str(error.value)) < 300


def test_numbers_in_messages_are_no_counts() -> None:
    """The limits on widths do not hit large numbers that a conversation merely contains."""
    source = (
        "{% macro show(x) %}{{ x }}{% endmacro %}{% set n = messages[0].content %}"
        "{{ show(n) }} {{ '{}'.format(n) }} {{ '%d' % n }} {{ n | tojson }} {{ n | default(n) }} "
        "{{ dict(a=n) }} {{ n + 1 }}"
    )
    text = ChatTemplate(source, None, None).render([{"content": 123456789012}])
    assert text.count("123456789012") == 6 and "123456789013" in text


def test_threads_have_their_own_clock() -> None:
    """Renderings in parallel do not disturb each other, and a slow one does not end the others."""
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", None, None)
    messages = [{"content": str(index)} for index in range(1000)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: template.render(messages), range(40)))
    assert found == ["".join(map(str, range(1000)))] * 40


def test_where_a_template_is_found(tmp_path: Path) -> None:
    """A given file, then chat_template.jinja, then tokenizer_config.json; else none."""
    folder = byte_level_folder(tmp_path)
    files = ModelFiles(path=folder, name="test")
    tokenizer = load_tokenizer(files)
    with pytest.raises(ChatTemplateMissing, match="--chat-template FILE"):
        require(load_chat_template(files, tokenizer))

    def rendered(override: Path | None = None) -> str:
        return require(load_chat_template(files, tokenizer, override)).render([])

    config = json.loads((folder / "tokenizer_config.json").read_text())

    def configure(template: object) -> None:
        content = json.dumps(config | {"chat_template": template})
        (folder / "tokenizer_config.json").write_text(content)

    configure("config{{ bos_token }}{{ eos_token }}")
    assert rendered() == f"config{SPECIAL[1]}{SPECIAL[3]}"
    configure([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}])
    assert rendered() == "d"
    configure([{"name": "tool_use", "template": "t"}])
    with pytest.raises(BadChatTemplate, match="tool_use"):
        rendered()
    configure(5)
    with pytest.raises(BadChatTemplate, match=r"tokenizer_config\.json cannot be used"):
        rendered()
    (folder / "chat_template.jinja").write_text("file")
    assert rendered() == "file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert rendered(tmp_path / "mine.jinja") == "mine"
    with pytest.raises(BadChatTemplate, match="cannot read"):
        rendered(tmp_path / "missing.jinja")


def test_template_of_a_gguf_file(tmp_path: Path) -> None:
    """The metadata's template is used, with the metadata's special tokens."""

    def tweak(writer) -> None:
        writer.add_bos_token_id(1)
        writer.add_chat_template("gguf{{ bos_token }}")

    files = ModelFiles(path=gguf_tokenizer(tmp_path / "t.gguf", "qwen2", tweak), name="test")
    tokenizer = load_tokenizer(files)
    assert require(load_chat_template(files, tokenizer)).render([]) == f"gguf{SPECIAL[1]}"
    bare = write_gguf(tmp_path / "bare.gguf", "llama", lambda writer: None, {})
    assert load_chat_template(ModelFiles(path=bare, name="bare"), tokenizer) is None
