"""The HTTP frontend: OpenAI API, tokenizer, chat templates, server-sent events.

Runs in its own process under hypercorn (`python -m cearx.frontend`), talks to the core only.

The life of a request: `generation_route` reads the body; `request_fields` makes it a typed request
(`openai_types`) or an error (`errors`); the route (`chat_route`, `completions_route`) renders,
tokenises and hashes the prompt in a thread (`chat_template`, `prompts`) and completes the sampling
parameters (`sampling`); `engine_client` hands it to the core and brings back outputs; `choice`
makes them text, with `detokenizer` and `stop_strings`; `respond` sends them, in the shape of
`answer_format`; `disconnect` ends all of it when the client is gone.
"""
