"""A tool call and a structured answer with pydantic-ai; arguments: URL MODEL."""

import sys

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    name: str = Field(max_length=12)
    is_capital: bool


def main(url: str, name: str) -> None:
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="-"))
    settings = {"temperature": 0.0, "max_tokens": 150}
    # The class as a tool that must be called: how this library asks for an answer of a type.
    by_tool = Agent(model, output_type=ToolOutput(City, name="describe"), model_settings=settings)
    called = by_tool.run_sync("Describe Paris.").output
    assert isinstance(called, City)
    by_schema = Agent(model, output_type=NativeOutput(City), model_settings=settings)
    structured = by_schema.run_sync("Describe Paris.").output
    assert isinstance(structured, City)
    text = Agent(model, model_settings=settings).run_sync("What is the capital of France?").output
    assert "Paris" in text
    print("pydantic-ai:", repr(called), repr(structured), text)


if __name__ == "__main__":
    main(*sys.argv[1:])
