"""Claims about ``ptqpipe demo``: a row is printed when its format is finished, and the table fits a terminal."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from ptqpipe.pipeline import demo
from ptqpipe.run.machine import Machine

ROWS = [
    demo.DemoRow("bf16", 2_890_000, None, 17.122, "Return the value.", "the source"),
    demo.DemoRow("mxfp4a16", 1_160_000, 19.0, 177.25, "Return it.", "verified and proven"),
]


def test_every_line_of_the_table_fits_80_columns() -> None:
    lines = [*demo.header_text(12324).splitlines(), *(demo.row_text(row, ROWS[0]) for row in ROWS)]
    assert max(map(len, lines)) <= 80
    assert [line.split()[-1] for line in lines[-2:]] == ["source", "proven"]
    assert "+935.22 %" in lines[-1]


@pytest.mark.slow
def test_a_format_is_shown_when_it_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands between the model and the table is real; the model's own runs are not."""
    events: list[str] = []
    monkeypatch.setattr(demo, "SCHEMES", ("fp8", "mxfp4a16"))
    monkeypatch.setattr(demo, "load_model", lambda _: SimpleNamespace())
    monkeypatch.setattr(demo, "load_tokenizer", lambda _: lambda *_, **__: SimpleNamespace(input_ids=ROWS_OF_TOKENS))
    monkeypatch.setattr(demo, "score", lambda *_, **__: None)
    monkeypatch.setattr(demo, "perplexity", lambda _: SimpleNamespace(value=17.0))
    monkeypatch.setattr(demo, "_sentence", lambda *_: "Return it.")
    monkeypatch.setattr(demo, "load_decoded", lambda _, ckpt: events.append(f"decoded {ckpt.name}"))
    machine = Machine(workers=1, device=demo.torch.device("cpu"), memory_bytes=2 << 30, progress=False)
    rows = demo.run_demo(tmp_path, machine=machine, show=lambda text: events.append(text.split()[0]))
    assert [row.name for row in rows] == ["bf16", "fp8", "mxfp4a16"]
    assert events == ["Perplexity", "bf16", "decoded fp8", "fp8", "decoded mxfp4a16", "mxfp4a16", "How"]
    assert (tmp_path / "fp8" / "config.json").is_file()


ROWS_OF_TOKENS = demo.torch.zeros(1, 8, dtype=demo.torch.int64)
