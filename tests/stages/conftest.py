"""What tests of commands share."""

from tests.hub import hub as hub  # the fixture
