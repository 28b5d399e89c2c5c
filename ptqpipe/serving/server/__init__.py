"""An OpenAI-compatible HTTP server over the engine.

    schema.py           the bodies of requests, and which of their fields the engine supports
    error_responses.py  errors in OpenAI's shape
    requests.py         one HTTP request through the engine's service; a client that disconnects cancels it
    endpoints.py        /v1/completions and /v1/chat/completions
    logprobs.py         log probabilities in both shapes
    metrics.py          /metrics, under vLLM's names where they mean the same
    guards.py           what happens before a route: size of the body, API key, request id
    app.py              the routes
    uvicorn_server.py   uvicorn: start, drain on SIGTERM, end
    pages.py            the chat at /, Swagger UI at /docs, and what their scripts may do
    page/               the chat's files, which become one

Must not know how a model is loaded or computed: it is given a service and a tokenizer.
"""
