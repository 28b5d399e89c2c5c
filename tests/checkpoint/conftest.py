"""These tests are about what the disk has."""

from collections.abc import Iterator

import pytest

from tests import quick_disk
from tests.hub import (
    hub as hub,  # the fixtures
    no_waiting as no_waiting,
)


@pytest.fixture(autouse=True)
def _waits_for_the_disk(request: pytest.FixtureRequest) -> Iterator[None]:
    if "layouts" in request.path.parts:
        yield
        return
    with quick_disk.waiting():
        yield
