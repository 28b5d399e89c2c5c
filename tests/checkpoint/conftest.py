"""These tests are about what the disk has."""

from collections.abc import Iterator

import pytest

from tests import quick_disk


@pytest.fixture(autouse=True)
def _waits_for_the_disk() -> Iterator[None]:
    with quick_disk.waiting():
        yield
