"""The official client, with its strict response validation, against the frontend."""

from collections.abc import Iterator

import openai
import pytest
from fake_core import Reply, logprob_of
from frontend_server import MODEL, FrontendServer, frontend_server
from openai.types.chat import ChatCompletionUserMessageParam

from cearx.core.events import FinishReason

HELLO: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[FrontendServer]:
    with frontend_server(enable_prompt_tokens_details=True) as started:
        started.core.reply = lambda submit: Reply(
            token_ids=[*"héllo 😀".encode(), 256],
            finish_reason=FinishReason.STOP,
            logprobs=[logprob_of(i, 97) for i in range(12)]
            if submit.sampling.num_logprobs is not None
            else None,
        )
        yield started


@pytest.fixture(scope="module")
def client(server: FrontendServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.url + "/v1",
        api_key="none",
        max_retries=0,
        timeout=10,
        _strict_response_validation=True,
    ) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    """The list and a single model, found by a name with a slash."""
    [model] = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client: openai.OpenAI) -> None:
    """A whole answer with log-probabilities and usage."""
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, n=2
    )
    assert [c.message.content for c in answer.choices] == ["héllo 😀"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert bytes(answer.choices[0].logprobs.content[0].bytes or []) == b"h"
    assert answer.usage and answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens_details


def test_chat_stream(client: openai.OpenAI) -> None:
    """The stream helper accumulates the same message."""
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == "héllo 😀"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert len(answer.choices[0].logprobs.content) == 12
    assert answer.usage and answer.usage.completion_tokens == 12


def test_completions(client: openai.OpenAI) -> None:
    """Text completions, whole and streamed, for several prompts."""
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1)
    assert [c.text for c in answer.choices] == ["héllo 😀"] * 2
    texts = ["", ""]
    # The client's own type of a chunk has no null for finish_reason, which OpenAI itself sends.
    with openai.OpenAI(base_url=client.base_url, api_key="none") as lenient:
        for chunk in lenient.completions.create(model=MODEL, prompt=["a", "b"], stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert texts == ["héllo 😀"] * 2


def test_errors_have_their_classes(client: openai.OpenAI) -> None:
    """Statuses and bodies become the exceptions that programs catch."""
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
