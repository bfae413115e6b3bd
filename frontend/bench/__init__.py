"""`cearx bench`: a benchmark client for any server that speaks OpenAI's API.

Never imports the server's side of the frontend beyond tokenizers and chat templates: what it
measures it measures through HTTP.

A run's way: `cli` reads the flags; `matrix` or `serve` decides which requests go out when
(`random_prompts`, `dataset`, `arrivals`); `fleet` hands them to client processes (`wire`), each of
which sends its share (`client_process`, `load_loop`, `http_stream`, `event_parser`); `metrics`
makes one row of figures of the records; `results` stores rows;
`compare` and `plot` read them again.
"""
