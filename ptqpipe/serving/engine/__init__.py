"""A small serving engine over transformers' model code: paged KV cache, continuous batching, chunked prefill.

    sequence.py       the parameters of a request, and the state of one sequence
    block_manager.py  which pages of the cache each sequence has; shared prefixes
    scheduler.py      which tokens are computed next
    attention.py      transformers' attention over our pages
    batch.py          one step as numbers, the same on every rank
    prompt_images.py  images in a prompt and in a step
    model_runner.py   the model: a batch in, logits out
    states.py         states of linear attention and state-space layers, beside the pages
    sampler.py        logits in, one token per sequence out
    detokenizer.py    tokens in, text out, as it is generated; stop strings
    speculative.py    drafts of the next tokens
    engine.py         the loop over all of these, one step at a time
    service.py        the loop in its own thread, for a server

Must not know HTTP, files or formats: it is given a model and a tokenizer.
"""

from ptqpipe.serving.engine.engine import ContextTooLong, Counters, Engine, EngineOptions, Request, TokenOutput
from ptqpipe.serving.engine.prompt_images import Images
from ptqpipe.serving.engine.sequence import Finish, SamplingParams, TokenLogprob
from ptqpipe.serving.engine.service import Overloaded, Service, State, Unavailable
