"""What `ptqpipe calibrate` prints: a header, then a table by role, what no sample reached, the digest."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ptqpipe.calibration.data import HELD_SHARE, Samples
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.calibration.pairs import most_tokens, nbytes as pairs_bytes
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.checkpoint import Finished
from ptqpipe.checkpoint.tensor_names import name_pattern, role_of
from ptqpipe.errors import arg
from ptqpipe.run.quantities import counted, disk_size, memory_size, number, table
from ptqpipe.runtime.skeleton import Skeleton

MOST_NAMES = 8  # of what no sample reached


def described(
    samples: Samples, skeleton: Skeleton, kinds: Sequence[str], sums: Sequence[int], *, seed: int, dtype: str
) -> str:
    """The header: which samples, how much there is to run, and what statistics take. Moments are stored in float32.

    kinds  of moments
    sums   bytes of the sums of each layer
    """
    (count, seqlen), held_out = samples.windows.shape, len(samples.held_out)
    blocks = skeleton.blocks if "pairs" in kinds else ()
    most = most_tokens(blocks, skeleton.origins)
    pairs = [pairs_bytes(name, module, skeleton.origins, most) for name, module in blocks]
    return (
        f"{counted(count, 'sample')} of {counted(seqlen, 'token')}, {held_out} more held out (of "
        f"{counted(samples.candidates, 'window')}{samples.thinned}, seed {seed})\n"
        f"{(count + held_out) * seqlen:,} tokens through {counted(len(skeleton.blocks), 'layer')} in {dtype}\n"
        f"moments {', '.join(kinds)}: at most {disk_size(sum(sums) / 2 + sum(pairs))} on disk, "
        f"{memory_size(max([*sums, *pairs]))} in memory"
    )


def to_json(done: Finished) -> dict[str, Any]:
    content = done.content
    return {
        "out": str(done.out),
        "digest": content["digest"],
        "data": content["data"],
        "settings": content["settings"],
        "roles": by_role(done),
        "stand_ins": stand_ins(content),
        "unused": content["unused"],
        "seconds": done.seconds,
        "peak_rss_bytes": done.peak_rss_bytes,
    }


def by_role(done: Finished) -> list[dict[str, Any]]:
    """Modules by the last part of their names: how many, tokens, the largest input, the middle of the 99.9 % ones."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in done.content["modules"]:
        groups[role_of(name)].append(name)
    rows = []
    with Statistics.open(done.out) as statistics:
        for role, names in groups.items():
            statistics_of_role = [statistics.of(name) for name in names]
            quantiles = sorted(one.quantiles[0.999] for one in statistics_of_role)
            rows.append(
                {
                    "role": role,
                    "modules": len(names),
                    "columns": statistics_of_role[0].amax.numel(),
                    "tokens": min(one.tokens for one in statistics_of_role),
                    "stand_ins": sum(not one.measured for one in statistics_of_role),
                    "amax": max(float(one.amax.max()) for one in statistics_of_role),
                    "quantile_999": quantiles[len(quantiles) // 2],
                    "rms": max(float(one.second_moment.mean().sqrt()) for one in statistics_of_role),
                }
            )
    return rows


def stand_ins(content: Mapping[str, Any]) -> dict[str, int]:
    """Experts that saw too few tokens for statistics of their own, with the tokens that they saw."""
    return {name: entry["tokens"] for name, entry in content["modules"].items() if not entry["measured"]}


def render(done: Finished) -> str:
    content = done.content
    rows = [
        [
            row["role"],
            str(row["modules"]),
            str(row["columns"]),
            str(row["tokens"]),
            number(row["amax"]),
            number(row["quantile_999"]),
            number(row["rms"]),
        ]
        for row in by_role(done)
    ]
    head = ["role", "modules", "columns", "tokens", "amax", "99.9 %", "rms"]
    lines = [table(head, rows), *done.notes]
    if content["attention"]:
        entries = content["attention"].values()
        lines.append(
            f"keys and values of {len(entries)} attention modules: amax "
            f"{number(max(e['k_amax'] for e in entries))} and {number(max(e['v_amax'] for e in entries))}"
        )
    lines += _short("experts that saw too few tokens; their group's statistics are used", list(stand_ins(content)))
    lines += _short("modules that no sample reached; they have no statistics", content["unused"])
    unused = sorted({name_pattern(name) for name in content["unplaced"]})
    lines += _short("tensors of the checkpoint that no text passes in transformers' model", unused)
    lines.append(
        f"Done: {done.out}: {len(content['modules'])} modules in {done.seconds:.1f} s, peak "
        f"{memory_size(done.peak_rss_bytes)}; digest {content['digest'][:16]}"
    )
    return "\n".join(lines)


def _short(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return [f"{len(names)} {what}: {', '.join(names[:MOST_NAMES])}{more}"]


def no_held_out(samples: Samples, options: CalibrateOptions) -> str:
    """Why no window is held out, and what helps."""
    why = f"the data have {counted(samples.candidates, 'window')} for {counted(options.samples, 'sample')}"
    remedy = f"give more data, or {arg('holdout')} with fewer {arg('samples')}"
    if options.samples < HELD_SHARE:
        why = f"{arg('samples', options.samples)} is below {HELD_SHARE}"
        remedy = f"give {arg('samples', HELD_SHARE)}, or {arg('holdout')}"
    return (
        f"no window is held out, since {why}: convert will judge its choices on the data that it makes them on; "
        f"{remedy}"
    )
