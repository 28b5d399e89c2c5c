"""What the tests of tune run it with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptqpipe.pipeline import demo
from ptqpipe.pipeline.tune.options import TuneOptions
from ptqpipe.run.machine import Machine

DEMO = Path(demo.__file__).resolve().parent.parent / "demo_model"
OPTIONS = TuneOptions(samples=16, seqlen=32)
ONE = Machine(workers=1)


def of_method(method: str, **more: Any) -> TuneOptions:
    return replace(OPTIONS, method=method, **more)


def content_of(codes: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((codes / "rounding.json").read_text())
    return content
