"""The README's chart shows the numbers of benchmarks/quality.jsonl, and the pictures are those of the script."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
THEMES = ("light", "dark")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("images")
    subprocess.run([sys.executable, ROOT / "scripts" / "readme_pictures.py", "--out", out], check=True)
    return out


def texts(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", picture.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{of}-{theme}.svg" for of in ("pipeline", "kl", "cost") for theme in THEMES])
def test_the_committed_pictures_say_what_the_script_draws(pictures: Path, name: str) -> None:
    drawn = texts(pictures / name)
    assert len(drawn) >= 10
    assert texts(ROOT / "docs" / "images" / name) == drawn


@pytest.mark.slow
def test_each_tool_stands_with_the_lowest_of_its_measured_methods(pictures: Path) -> None:
    rows = re.findall(r"^\| (\S+) .*?\| (yes|no) \| ([^|]*) \|", best_model(), re.MULTILINE)
    lowest: dict[tuple[str, str], float] = {}
    for tool, data, cell in rows:
        number = re.match(r"[*_]*(\d+\.\d+)", cell.strip())
        if number:
            lowest[data, tool] = min(lowest.get((data, tool), 1e9), float(number[1]))
    shown = [text for text in texts(pictures / "kl-light.svg") if re.fullmatch(r"\d+(\.\d+)?", text)]
    assert sorted(shown) == sorted(f"{number:.3g}" for number in lowest.values())
    assert len(shown) == 8


def best_model() -> str:
    """The table of the published model in benchmarks/quality.md, whose first column of numbers is NVFP4."""
    page = (ROOT / "benchmarks" / "quality.md").read_text(encoding="utf-8")
    return page.split("| smollm2-135m, mean KL")[1].split("\n\n")[0]
