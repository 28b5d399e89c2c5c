"""What tests of commands share."""

from tests.hub import (
    hub as hub,  # the fixtures
    no_waiting as no_waiting,
)
