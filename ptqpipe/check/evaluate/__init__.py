"""How good a model is: perplexity, KL divergence to another model's logits, lm-eval tasks; with intervals.

    scores = score(model, tokens, window=256, reference=baseline)      models or anything that gives logits
    divergence(scores).mean, perplexity(scores).value

Names resolve on first use: importing this package imports neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptqpipe.check.evaluate.measures import Divergence, Perplexity, divergence, perplexity
    from ptqpipe.check.evaluate.scores import Scores, Window, score, windows
    from ptqpipe.check.evaluate.tokenized_text import Text, read_text

_HOME = {
    "Divergence": "measures",
    "Perplexity": "measures",
    "Scores": "scores",
    "Text": "tokenized_text",
    "Window": "scores",
    "divergence": "measures",
    "perplexity": "measures",
    "read_text": "tokenized_text",
    "score": "scores",
    "windows": "scores",
}

__all__ = [
    "Divergence",
    "Perplexity",
    "Scores",
    "Text",
    "Window",
    "divergence",
    "perplexity",
    "read_text",
    "score",
    "windows",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ptqpipe.check.evaluate' has no attribute {name!r}")
    return getattr(import_module(f"ptqpipe.check.evaluate.{_HOME[name]}"), name)
