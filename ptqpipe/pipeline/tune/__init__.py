"""Finding codes (quantized values) with data: GPTQ in the order of the model, and gradient descent.

options.py       the options of tune besides model, recipe and data; `METHODS`, the look-up of its methods
command.py       tune itself: checks, then layer_loop.py, one decoder layer after the other, by layer_codes.py
tuned_layer.py   a decoder layer, quantized on the outputs of the quantized ones before it; start_codes.py
in_order.py      GPTQ in the order in which its matrices run: feedback.py of one unit, expert_feedback.py of stacks
backwards.py     gradients of the model, for the metric kl
kl/              gradient descent on the KL divergence of the whole model
codes_folder.py  the folder of codes
"""
