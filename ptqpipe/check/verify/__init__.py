"""The checks of `verify`, each a function that adds to `Findings`.

    findings.py   faults and notes
    config.py     what the config files say, and how readers interpret it
    files.py      the other files: as they were written, and as the source's
    structure.py  which tensors there are, compared with the source's
    groups.py     what must be alike: fused weights, experts, scales
    weights.py    one weight: legal numbers, errors, proofs
    claims.py     what the record claims; repeat.py: checked by quantizing again

Knows no command line. ``stages/verify`` decides which checks run.
"""
