"""Lays every quantized checkpoint of a folder out in every container, there and back, and looks for a wrong verdict.

    python -m tests.fuzz.attack_relayout path/to/checkpoints --work /tmp/attack
    python -m tests.fuzz.attack_relayout path/to/checkpoints --work /tmp/attack --only mo-fp8   # those of this name

Prints one JSON line for each checkpoint and container, then the counts; exits with 1 where there was a wrong verdict:

- a copy whose weights decode otherwise than the original's (rounding that relayout told of aside: 5 x 2^-24);
- a copy that `relayout` takes back to other bytes than it came from and does not say so;
- a copy that `verify`, alone or beside the checkpoint it was made of, calls wrong though the original is sound;
- a copy with one flipped bit, a lost tensor, a changed config.json or a changed record that `verify` calls sound.

Needs no network and no GPU.
"""

import argparse
import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import ptqpipe
from ptqpipe.check.verify.command import verify
from ptqpipe.checkpoint.layouts import container_names, quantization_config
from ptqpipe.conversion.job import WriteResult
from ptqpipe.conversion.relayout.command import relayout
from ptqpipe.errors import FormatError, PtqError, UsageError
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.run.machine import Machine

ROUNDED = 5.001 * 2.0**-24  # the reciprocal, the two scales and the two products are rounded once each
RECORD = "ptqpipe.json"


def attack(ckpt: Path, container: str, work: Path) -> dict[str, Any]:
    """One checkpoint in one container: what came of it, and under "wrong" what should not have."""
    line: dict[str, Any] = {"checkpoint": ckpt.name, "container": container, "wrong": []}
    shutil.rmtree(work, ignore_errors=True)
    try:
        done = _relayout(ckpt, work / "there", container)
    except UsageError as error:
        return line | {"outcome": "its own layout", "reason": str(error)}
    except PtqError as error:
        return line | {"outcome": "refused", "reason": str(error)}
    rounded = len(done.record["decode_rounds_differently"])
    line |= {"outcome": "written", "weights": len(done.record["weights"]), "rounded": rounded}
    line["wrong"] += list(_unlike_decodes(ckpt, done))
    line["wrong"] += list(_verdicts(ckpt, done.out, "there"))
    line["wrong"] += list(_damage(done.out, work / "damaged", seed=f"{ckpt.name} {container}"))
    line |= _back(ckpt, done, work, line["wrong"])
    return line


def _relayout(ckpt: Path, out: Path, container: str) -> WriteResult:
    done = relayout(ckpt, out, container=container, machine=Machine(workers=1))
    assert done is not None  # there is one rank
    return done


def _unlike_decodes(ckpt: Path, done: WriteResult) -> Iterator[str]:
    """Weights that do not decode to what they did; those of a stack that was split have other names."""
    with ptqpipe.load_tensors(ckpt) as before, ptqpipe.load_tensors(done.out) as after:
        for name in after:
            new = after[name]
            if not isinstance(new, QTensor) or name not in before:
                continue
            old = before[name]
            if not isinstance(old, QTensor):
                yield f"{name} was not quantized before"
                continue
            was, now = old.dequantize(), new.dequantize()
            near = bool(((was - now).abs() <= was.abs() * ROUNDED).all())
            if not near or (name not in done.record["decode_rounds_differently"] and not torch.equal(was, now)):
                yield f"{name} decodes otherwise"


def _verdicts(ckpt: Path, out: Path, which: str) -> Iterator[str]:
    """What verify says of a copy that it does not say of the original."""
    for source in (None, ckpt):
        beside = "alone" if source is None else "beside its original"
        known = {fault.where for fault in verify(ckpt, source=source, workers=1).faults}
        for fault in verify(out, source=source, workers=1).faults:
            if fault.where not in known:
                yield f"{which}, {beside}: [{fault.check}] {fault.where}: {fault.message}"


def _damage(out: Path, folder: Path, *, seed: str) -> Iterator[str]:
    """Damages that verify alone does not see."""
    dice = random.Random(seed)
    for name, damage in DAMAGES.items():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(out, folder)
        damage(folder, dice)
        if verify(folder, workers=1).ok:
            yield f"damaged ({name}), and called sound"


def _flip_a_bit(folder: Path, dice: random.Random) -> None:
    path = dice.choice(sorted(folder.glob("*.safetensors")))
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    data[dice.randrange(begin, len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def _change_json(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path, random.Random], None]:
    def damage(folder: Path, _: random.Random) -> None:
        content = json.loads((folder / name).read_bytes())
        change(content)
        (folder / name).write_text(json.dumps(content, indent=2))

    return damage


def _quantization(content: dict[str, Any]) -> dict[str, Any]:
    found = quantization_config(content)
    assert isinstance(found, dict)  # a part of the content, which is changed in place
    return found


def _first(content: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(content[kind].values()))
    return found


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "a bit of the weights": _flip_a_bit,
    "another number of heads": _change_json("config.json", lambda c: c.update(num_attention_heads=3)),
    "a group that targets no module": _change_json(
        "config.json", lambda c: _quantization(c).update(config_groups={"group_0": {"targets": ["NoSuch"]}})
    ),
    "another hash": _change_json(RECORD, lambda c: _first(c, "weights")["sha256"].update(data="0" * 64)),
    "another shape": _change_json(RECORD, lambda c: _first(c, "weights").update(shape=[1, 2])),
    "more bits": _change_json(RECORD, lambda c: _first(c, "weights").update(bits_per_weight=3.5)),
    "a proof of another tool's scales": _change_json(RECORD, lambda c: _first(c, "weights").update(proven=True)),
    "a kept tensor less": _change_json(RECORD, lambda c: c["kept"].popitem()),
}


def _back(ckpt: Path, there: WriteResult, work: Path, wrong: list[str]) -> dict[str, Any]:
    """The way back to the layout that it came from."""
    try:
        back = _relayout(there.out, work / "back", there.source_container)
    except FormatError as error:
        return {"back": "refused", "reason_back": str(error)}
    wrong += _verdicts(ckpt, back.out, "back")
    before, after = _tensors(ckpt), _tensors(back.out)
    if before.keys() != after.keys():
        return {"back": "other names"}  # a stack that was split
    unlike = [name for name in before if not _same(before[name], after[name])]
    if len(unlike) > len(there.record["reciprocal_is_not_exact"]) + len(back.record["reciprocal_is_not_exact"]):
        wrong.append(f"back: {len(unlike)} tensors are not as they were, the first: {unlike[0]}")
    return {"back": "byte for byte" if not unlike else f"{len(unlike)} scalars by one rounding"}


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same numbers: a float scale may come back in another dtype that holds it."""
    if a.dtype.is_floating_point and b.dtype.is_floating_point and a.dtype != b.dtype:
        return torch.equal(a.float().flatten(), b.float().flatten())
    raw_a, raw_b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and torch.equal(raw_a, raw_b)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Attacks relayout and verify with every checkpoint of a folder.")
    parser.add_argument("checkpoints", type=Path, help="a folder of checkpoint folders")
    parser.add_argument("--work", type=Path, required=True, help="a scratch folder; what lies in it may be lost")
    parser.add_argument("--only", default="", help="checkpoints whose name contains this")
    args = parser.parse_args()
    folders = sorted(path.parent for path in args.checkpoints.glob("*/config.json") if args.only in path.parent.name)
    quantized = [path for path in folders if quantization_config(json.loads((path / "config.json").read_bytes()))]
    counts: Counter[str] = Counter()
    for ckpt in quantized:
        for container in container_names():
            line = attack(ckpt, container, args.work / "copy")
            counts.update(
                [line["outcome"], *([f"back {line['back'].lstrip('0123456789 ')}"] if "back" in line else [])]
            )
            counts["wrong"] += len(line["wrong"])
            print(json.dumps(line), flush=True)
    shutil.rmtree(args.work / "copy", ignore_errors=True)
    print(json.dumps({"checkpoints": len(quantized), **counts}), flush=True)
    return 1 if counts["wrong"] or not quantized else 0


if __name__ == "__main__":
    sys.exit(main())
