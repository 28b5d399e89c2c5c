"""The checks of `verify`, each a function that adds to `Findings`.

    findings.py       faults and notes
    config.py         what the config files say, and how readers interpret it
    side_files.py     the other files: as they were written, and as the source's
    tensor_fates.py   which tensors there are, compared with the source's
    shared_scales.py  what must be alike: fused weights, experts, scales
    weight_checks.py  one weight: legal numbers, errors, proofs
    claims.py         what the record claims; repeat.py: checked by quantizing again

``command.py`` decides which checks run.
"""
