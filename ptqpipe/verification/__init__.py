"""The checks of `verify`, each a function that adds to `Findings`.

    findings.py   faults and notes
    config.py     what the config files say, and what readers make of it
    structure.py  which tensors there are, beside the source's
    groups.py     what must be alike: fused weights, experts, scales
    weights.py    one weight: legal numbers, errors, proofs
    claims.py     what the record says; repeat.py: by quantizing again

Knows no command line. ``stages/verify`` decides which checks run.
"""
