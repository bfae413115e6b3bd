"""The HTTP frontend: OpenAI API, tokenizer, chat templates, server-sent events.

Runs in its own process under hypercorn (`python -m cearx.frontend`), talks to the core only.
"""
