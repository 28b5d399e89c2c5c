"""Finding codes (quantized values) with data: GPTQ in the order of the model, and gradient descent.

    tune_options.py  the options of tune besides model, recipe and data
    block.py         one decoder layer after the other, quantized on the outputs of the quantized ones before it
    backwards.py     gradients of the model, for --metric kl
    end_to_end.py    gradient descent on the KL divergence of the whole model; kept.py: for tensors that stay floats
    codes.py         the folder of codes

``command.py`` runs it.
"""
