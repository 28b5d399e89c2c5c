"""The bytes of checkpoints are those that were recorded: a change of structure changes no number."""

import json
from pathlib import Path

import pytest

from tests.conversion import same_bytes


@pytest.mark.slow
def test_every_format_and_container_has_the_recorded_bytes(tmp_path: Path) -> None:
    recorded = json.loads(same_bytes.RECORDED.read_text())
    found = {name: same_bytes.digest(made) for name, made in same_bytes.conversions(tmp_path)}
    assert found.keys() == recorded.keys()
    assert {name for name in found if found[name] != recorded[name]} == set()
