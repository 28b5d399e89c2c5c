"""``method="kl"`` of tune: behind GPTQ, gradient descent on the KL divergence of the whole model, all layers in memory.

end_to_end.py  from the codes of GPTQ to those that are written, and what a stopped run goes on from
learn_codes.py  loads the model and learns; judging_text.py
descent.py     the steps, and what judges them
choice.py      the two codes that each weight may have
floats.py      ``train``: norms, a head, global scales, ... which descent changes after the codes
model_divergence.py  both models at once: the divergence and its gradient
"""

from ptqpipe.pipeline.tune.kl.end_to_end import check, improve, with_rate

__all__ = ["check", "improve", "with_rate"]
