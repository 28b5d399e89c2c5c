"""Claims about verify and what a config lists as kept: no fault of a consistent checkpoint, whatever form a vendor's
list has, and one that names the module for each inconsistent one."""

from pathlib import Path

import pytest

from ptqpipe.check.verify.command import verify
from tests.check.verify.checks import found
from tests.check.verify.vendors import all_cases

CASES = all_cases()
# Of the many of each layout, form and part some; of what one layout alone has, all.
QUICK = [name for at, name in enumerate(CASES) if at % (29 if " by " in name else 3) == 0]


def check(name: str, folder: Path) -> None:
    """The verdict on one case."""
    make, wrong = CASES[name]
    report = verify(make(folder), workers=1)
    if not wrong:
        assert report.ok, found(report)
    else:
        assert any(m in f"{f.where} {f.message}" for m in wrong for f in report.faults), (wrong, found(report))


@pytest.mark.parametrize("name", QUICK)
def test_a_list_that_fits_is_sound_and_one_that_does_not_is_a_fault(name: str, tmp_path: Path) -> None:
    check(name, tmp_path / "made")


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted({name.partition(":")[0] for name in CASES}))
def test_every_form_of_list_of_a_layout(layout: str, tmp_path: Path) -> None:
    for at, name in enumerate(name for name in CASES if name.partition(":")[0] == layout):
        check(name, tmp_path / str(at))
