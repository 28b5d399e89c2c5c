"""The plan: what happens to every tensor of a checkpoint, decided from names, dtypes, shapes and config alone.

Every tensor ends either in exactly one *unit* (tensors quantized together, since they share one global scale) or among
the *kept* ones, with the reason. No weight is read. The plan must not know how a weight is stored on disk
(containers) nor how its scales are found (search).

    types.py   what a plan is made of
    groups.py  tensors that are treated alike: fused siblings, stacks
    make.py    which tensors could be quantized (matrices, experts of stacks, Conv1D), with the rules of a recipe
"""

from ptqpipe.checkpoint.dtypes import FLOAT_DTYPES
from ptqpipe.models.slices import Member, Slice
from ptqpipe.recipe.plan.make import (
    check_ignored,
    conv1d_leaves,
    is_matrix,
    make_plan,
    pattern_hint,
    unmatched_patterns,
)
from ptqpipe.recipe.plan.types import Kept, Plan, Unit
