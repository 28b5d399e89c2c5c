"""Claims about the place of a rank that the first one starts: what ``--rank-of`` says, and what it must not say."""

import pytest

from ptqpipe.errors import UsageError
from ptqpipe.serving.rank_processes import RankInfo, parse_place


@pytest.mark.parametrize(
    ("text", "size", "place"),
    [
        ("/tmp/a/store/1", 2, RankInfo(1, 2, 2, 1, store="/tmp/a/store")),
        ("/a b/7", 8, RankInfo(7, 8, 8, 7, store="/a b")),
        ("/a/2/1", 4, RankInfo(1, 4, 4, 1, store="/a/2")),
    ],
)
def test_a_place_is_where_the_first_rank_listens_and_a_number(text: str, size: int, place: RankInfo) -> None:
    assert parse_place(text, size) == place


WRONG = ["", "1", "/", "/1", "file/1", "./file/1", "/file", "/file/", "/file/0", "/file/4", "/file/-1", "/file/1.0"]
WRONG += ["/file/ 1", "/file/1/", "/file/01", "/file/\u0661"]


@pytest.mark.parametrize("text", WRONG)
def test_anything_else_is_one_line_with_what_was_expected(text: str) -> None:
    with pytest.raises(UsageError, match="is not FILE/RANK with an absolute path and a rank below 4") as error:
        parse_place(text, 4)
    assert "\n" not in str(error.value)
    assert text in str(error.value)
