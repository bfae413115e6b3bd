"""A tool call and a structured answer with langchain-openai; arguments: URL MODEL."""

import sys
from typing import Annotated

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    name: str = Field(max_length=12)
    is_capital: bool


@tool
def get_weather(city: Annotated[str, Field(max_length=12)]) -> str:
    """Weather of a city."""
    return f"Sunny in {city}"


def main(url: str, model: str) -> None:
    chat = ChatOpenAI(
        base_url=f"{url}/v1", api_key="-", model=model, temperature=0, max_tokens=150, max_retries=0
    )
    answer = chat.bind_tools([get_weather], tool_choice="required").invoke("Weather in Paris?")
    [call, *_] = answer.tool_calls
    result = get_weather.invoke(call)
    assert call["name"] == "get_weather" and "Sunny" in result.content
    city = chat.with_structured_output(City, method="json_schema").invoke("Describe Paris.")
    assert isinstance(city, City)
    text = "".join(str(piece.content) for piece in chat.stream("What is the capital of France?"))
    assert "Paris" in text
    print("langchain-openai:", call["args"], repr(city), text)


if __name__ == "__main__":
    main(*sys.argv[1:])
