"""What a report says, as plain numbers and names: gathered by ``command.py``, rendered by this package.

Every number is one that was measured or recorded; what is not known is
None, and the renderers say so instead of leaving a gap. Names come from files and are untrusted text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptqpipe.conversion.output_error import TunedBlock, can_be_proven, mean_known
from ptqpipe.recipe.options import PROPAGATED
from ptqpipe.run.quantities import decibels


@dataclass(frozen=True, slots=True)
class Codes:
    """Counts of a weight's codes and scales at the ends of their ranges.

    elements, largest, zero   weights; those at the largest code (of either sign); those at the code of zero
    blocks                    block scales
    saturated                 scales at the largest code of the scale format
    subnormal, smallest       scales below the scale format's normal range; those at its least positive code
    zero_scales               scales that are zero
    The counts of scales stay None where scales are plain floats, which neither saturate nor underflow here.
    """

    elements: int
    largest: int
    zero: int
    blocks: int
    saturated: int | None
    subnormal: int | None
    smallest: int | None
    zero_scales: int | None


@dataclass(frozen=True, slots=True)
class ScaleChoice:
    """Squared error of a scale search relative to abs-max scales (1.0)."""

    name: str
    versus_absmax: float


@dataclass(frozen=True, slots=True)
class ReportedWeight:
    """One quantized weight, or one expert of a stack.

    layer, expert        None where the name has no such number
    squared_error        sum (decode - w)^2, ``energy`` sum w^2; None where neither source nor record tells
    choices              in the order of the report's ``choice_names``; those that do not apply are left out
    versus_plain_global  squared error relative to that at the abs-max global scale, as recorded
    algorithm, weighting  how codes were chosen and what the block scales minimize; "" where nothing says so
    versus_rtn           output error relative to that of plain rounding, by the statistics of the inputs
    reverted             whether it keeps plain rounding, since calibration did not help on held-out samples
    """

    name: str
    role: str
    layer: int | None
    expert: int | None
    format: str
    scheme: str
    search: str
    proven: bool | None
    shape: tuple[int, int]
    nbytes: int
    global_scale: float | None
    codes: Codes
    squared_error: float | None = None
    energy: float | None = None
    choices: tuple[ScaleChoice, ...] = ()
    versus_plain_global: float | None = None
    algorithm: str = ""
    weighting: str = ""
    versus_rtn: float | None = None
    reverted: bool = False

    @property
    def propagated(self) -> bool:
        """Whether the columns' weights in the search of its scales follow from the source's weights."""
        return self.algorithm in ("", "rtn") and self.weighting == PROPAGATED

    @property
    def plain(self) -> bool:
        """Whether its codes are the nearest ones and its scales minimize the unweighted error, as far as is known."""
        return self.reverted or (self.algorithm in ("", "rtn") and self.weighting in ("", "none"))

    @property
    def provable(self) -> bool:
        """Whether it means anything that its scales are, or are not, proven optimal."""
        return self.proven is True or can_be_proven(self.algorithm, self.weighting)

    @property
    def elements(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def relative_mse(self) -> float | None:
        if self.squared_error is None or self.energy is None:
            return None
        return self.squared_error / self.energy if self.energy else 0.0

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantization noise ratio; None where it is unknown or the weight is exact."""
        return decibels(self.relative_mse)


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that is not quantized; ``reason`` is "" where nobody recorded it."""

    name: str
    role: str
    layer: int | None
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Histogram:
    """Histogram of scale codes over the weights of one format.

    codec    "e4m3", "e8m0", or "float" for scales that are plain floats: then codes count quarters of an octave
    values   the number that each code stands for
    """

    format: str
    codec: str
    role: str
    counts: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class WorstBlock:
    """A block whose error is large compared with the mean of its weight.

    row, column    its first element in the weight; ``size`` how many elements share the scale
    ratio          its squared error beside the mean one of the weight's blocks
    relative       its squared error beside its energy
    offsets        which elements are shown, (row, column) in the weight; ``source`` and ``decoded`` are theirs
    """

    weight: str
    format: str
    row: int
    column: int
    size: int
    ratio: float
    relative: float
    scale: float
    offsets: tuple[tuple[int, int], ...]
    source: tuple[float, ...]
    decoded: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of the brute-force check that scales are optimal.

    claimed    weights whose record says so; None without a record
    checked    blocks that brute force scored for this report; 0 without a source
    worse      those of them whose stored scale is not the best one (or not the smallest of the best)
    weights    weights that those blocks are of
    """

    claimed: int | None
    checked: int = 0
    worse: int = 0
    weights: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """All of it.

    headline       the formats in words, one line each
    before_bytes   of the source's tensors; of the same numbers in bfloat16 where ``before_measured`` is False
    errors_from    "source" (recomputed here), "record" (ptqpipe.json) or ""
    choice_names   the ways of choosing scales that were compared, abs-max first
    choice_sample  which rows they were compared on; "" for the record's numbers
    evaluation     an eval file as ``check/evaluate/eval_file.py`` reads it
    verdict        (word, the numbers behind it, by which thresholds) of what eval measured; None where it did not
    faults         what `ptqpipe verify` finds wrong with the bytes; None where it was not run
    judged         the samples that output errors are of, in words; "" where nothing was calibrated
    method         of `ptqpipe tune`, "" where it did not find the codes
    blocks         decoder layers with learned codes; in words: ``blocks_from`` is what tune started from,
                   ``blocks_judged`` the samples that their errors are of
    notes          what a reader should know, one line each
    rules          of the recipe, as they resolved: (match, scheme, how)
    provenance     (what, value)
    files          of weights: (name, bytes, tensors)
    """

    name: str
    version: str
    producer: str
    container: str
    headline: tuple[str, ...]
    before_bytes: int
    before_measured: bool
    after_bytes: int
    params: int
    weights: tuple[ReportedWeight, ...]
    kept: tuple[KeptTensor, ...]
    histograms: tuple[Histogram, ...]
    worst: tuple[WorstBlock, ...]
    proof: Proof
    errors_from: str
    choice_names: tuple[str, ...] = ()
    choice_sample: str = ""
    evaluation: Mapping[str, Any] | None = None
    verdict: tuple[str, str, str] | None = None
    faults: int | None = None
    judged: str = ""
    method: str = ""
    blocks: tuple[TunedBlock, ...] = ()
    blocks_from: str = ""
    blocks_judged: str = ""
    notes: tuple[str, ...] = ()
    rules: tuple[tuple[str, str, str], ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, int, int], ...] = ()

    @property
    def quantized_params(self) -> int:
        return sum(weight.elements for weight in self.weights)

    @property
    def versus_rtn(self) -> float | None:
        """Output error relative to plain rounding's, mean over the calibrated weights; None where there are none."""
        return mean_known(weight.versus_rtn for weight in self.weights)

    @property
    def by_data(self) -> bool:
        """Whether data chose scales or codes: the error of the weights then says nothing of the quality."""
        learned = any(weight.algorithm == "learned" for weight in self.weights)
        return self.versus_rtn is not None or bool(self.blocks) or learned

    @property
    def provable(self) -> int:
        """Weights of which it means anything whether their scales are proven optimal."""
        return sum(weight.provable for weight in self.weights)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of a quantized weight, scales and all."""
        return 8 * sum(weight.nbytes for weight in self.weights) / max(1, self.quantized_params)

    @property
    def bits_overall(self) -> float:
        """Stored bits of a number of the model, kept tensors included."""
        return 8 * self.after_bytes / max(1, self.params)


def pooled_mse(weights: Sequence[ReportedWeight]) -> float | None:
    """Relative MSE of several weights together; None where one of them is unknown."""
    if not weights or any(w.squared_error is None or w.energy is None for w in weights):
        return None
    energy = sum(w.energy or 0.0 for w in weights)
    return sum(w.squared_error or 0.0 for w in weights) / energy if energy else 0.0
