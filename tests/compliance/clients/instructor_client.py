"""A tool call and a structured answer with instructor; arguments: URL MODEL."""

import sys

import instructor
import openai
from pydantic import BaseModel, Field


class City(BaseModel):
    name: str = Field(max_length=12)
    is_capital: bool


def main(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
    found = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        city = instructor.from_openai(client, mode=mode).chat.completions.create(
            model=model,
            response_model=City,
            messages=[{"role": "user", "content": "Describe Paris."}],
            temperature=0,
            max_tokens=150,
            max_retries=1,
        )
        assert isinstance(city, City)
        found.append(city)
    print("instructor:", *map(repr, found))


if __name__ == "__main__":
    main(*sys.argv[1:])
