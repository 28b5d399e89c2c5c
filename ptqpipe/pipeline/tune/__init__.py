"""Finding codes (quantized values) with data: GPTQ in the order of the model, and gradient descent.

    options.py     the options of tune besides model, recipe and data; `METHODS`, the look-up of its methods
    command.py     one decoder layer after the other
    block.py       a decoder layer, quantized on the outputs of the quantized ones before it
    in_order.py    GPTQ in the order in which its matrices run: feedback.py of one unit, experts.py of stacks
    backwards.py   gradients of the model, for --metric kl
    kl/            gradient descent on the KL divergence of the whole model
    codes.py       the folder of codes

``command.py`` runs it.
"""
