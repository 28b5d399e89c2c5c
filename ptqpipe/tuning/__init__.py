"""Codes found on data: GPTQ in the order of the model, and gradient descent.

    options.py     what tune can be told besides model, recipe and data
    block.py       one decoder layer after the other: its units quantized on what earlier layers left
    backwards.py   gradients of the model for its metric
    end_to_end.py  descent on the KL divergence of the whole model; kept.py: on tensors that stay floats
    codes.py       the folder of codes

Knows no command line. ``stages/tune`` runs it.
"""
