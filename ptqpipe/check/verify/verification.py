"""A verification while it runs: what its checks read, and what they found."""

from dataclasses import dataclass, field

from ptqpipe.calibration.statistics import Statistics
from ptqpipe.check.verify.findings import Findings
from ptqpipe.check.verify.weight_checks import WeightReport
from ptqpipe.conversion.planned_outputs import Outputs
from ptqpipe.conversion.record import Record
from ptqpipe.models.source import Source
from ptqpipe.recipe.weight_map import WeightMap


@dataclass(slots=True)
class Verification:
    ckpt: Source
    source: Source | None
    findings: Findings
    optimal: bool
    sample_blocks: int | None
    origins: WeightMap | None = None
    record: Record | None = None
    planned: Outputs | None = None
    statistics: Statistics | None = None
    weights: list[WeightReport] = field(default_factory=list)
