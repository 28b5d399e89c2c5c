"""Calibration: runs a float model one decoder layer at a time and collects statistics of its linear inputs.

The only package that runs a model to learn about it. A statistic's way:

    rows/, data.py           files become windows of tokens; own_text.py, generate.py: the model's own text
    runner.py                runs the model layer by layer; activations.py: hidden states between layers
    collect.py, moments.py   observe and sum one layer's inputs; experts.py: of stacked experts; kv.py: keys, values
    backward.py, gradients.py, outputs.py, pairs.py   gradients of the output distribution, and what is kept of them
    store.py, statistics.py  one layer on disk; the folder, and the look-up of a weight's moments
    inputs.py                moments in memory, as algorithms read them
    run_layers.py, command.py   calibrate: all of this; merge.py: over ranks and devices; likeness.py, summary.py: text
    cross_moments.py, expert_inputs.py, assembly.py   what tune observes beside: two runs of a layer, fused parameters
"""
