"""Claims about ``ptqpipe formats``: it lists what is there, in 80 columns, and does not wait for torch."""

import json
import subprocess
import sys

from click.testing import CliRunner

from ptqpipe.checkpoint.layouts import container_names, get_container
from ptqpipe.cli import main
from ptqpipe.models.folding import ROTATIONS
from ptqpipe.models.reader_facts import READERS
from ptqpipe.numerics.schemes import SCHEMES
from ptqpipe.numerics.search import SEARCHES
from ptqpipe.quantization.transforms import SCALINGS
from ptqpipe.recipe import formats_table as formats


def test_everything_that_can_be_named_is_listed_with_a_purpose() -> None:
    found = formats.to_json()
    assert [one["name"] for one in found["formats"]] == list(SCHEMES)
    assert [one["name"] for one in found["containers"]] == container_names()
    assert [one["name"] for one in found["searches"]] == sorted(SEARCHES)
    assert {one["name"] for one in found["transforms"]} == {*SCALINGS, *ROTATIONS}
    for kind in ("containers", "searches", "transforms"):
        assert all(len(one["purpose"].split()) > 3 for one in found[kind])


def test_a_container_that_is_only_read_says_so() -> None:
    scheme = SCHEMES["mxfp4"]
    for one in formats.to_json()["containers"]:
        never = "read only" in (get_container(one["name"]).supports(scheme) or "")
        assert one["written"] is not never, one


def test_facts_of_formats_that_are_known_otherwise() -> None:
    rows = {one["name"]: one for one in formats.to_json()["formats"]}
    assert (rows["nvfp4"]["bits_per_weight"], rows["mxfp4"]["bits_per_weight"]) == (4.5, 4.25)
    assert (rows["nvfp4"]["native"], rows["nvfp4_w4a4"]["native"]) == ("", "Blackwell")
    for name, row in rows.items():
        capabilities = get_container(row["container"]).CAPABILITIES
        assert set(row["readers"]) <= set(READERS)
        assert bool(row["readers"]) is not capabilities.own_reader, name
        assert ("transformers" in row["readers"]) is (capabilities.transformers != "never"), name


def test_the_tables_fit_80_columns_and_the_json_is_the_same() -> None:
    text = CliRunner().invoke(main, ["formats"]).output
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"\n{name} " in text for name in SCHEMES)
    assert json.loads(CliRunner().invoke(main, ["formats", "--json"]).output) == formats.to_json()


def test_the_list_is_printed_without_torch() -> None:
    script = "import sys; from ptqpipe.cli import main; main(['formats'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240)
    assert "nvfp4_w4a4" in done.stdout
    assert {"torch", "numpy", "transformers"} & set(done.stdout.splitlines()[-1].split()) == set()
