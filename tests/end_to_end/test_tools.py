"""Forced tool calls of the real model: whatever it knows of tools, its call fits the schema."""

import json
from typing import Any

import pytest
from server_process import Server

pytestmark = pytest.mark.model

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forced_call_fits_its_schema(server: Server, choice: Any, temperature: float) -> None:
    """Name and arguments, at temperature 0 and 1."""
    answer = server.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[TOOL],
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=temperature,
        seed=5,
        max_tokens=100,
    ).json()
    [call] = answer["choices"][0]["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "get_weather"
    assert arguments.keys() == {"city", "unit"}
    assert arguments["unit"] in ("C", "F") and len(arguments["city"]) <= 12
