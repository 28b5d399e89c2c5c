"""Images that messages name: what is read, and what is refused in one line."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ptqpipe.calibration.rows import Messages, row_tokens
from ptqpipe.errors import UsageError
from ptqpipe.models.images import decode_images, digest_of, read_image, split_content
from tests.processors import data_uri, picture, png

PNG = png(picture(1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of images, and beside it a file that is not in it."""
    (tmp_path / "allowed" / "more").mkdir(parents=True)
    (tmp_path / "allowed" / "more" / "a b.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "allowed" / "link.png").symlink_to(tmp_path / "secret.png")
    return tmp_path / "allowed"


def test_data_uris_and_files_of_the_folder_are_read(folder: Path) -> None:
    places = (data_uri(PNG), "more/a b.png", str(folder / "more" / "a b.png"), f"file://{folder}/more/a%20b.png")
    assert [read_image(place, folder, remedy="-") for place in places] == [PNG] * 4
    assert read_image("../secret.png", folder, remedy="-", within=False) == PNG


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("http://127.0.0.1/a.png", "never done; send it as a data URI"),
        ("https://example.com/a.png", "never done"),
        ("ftp://example.com/a.png", "never done"),
        ("file://elsewhere/a.png", "never done"),
        ("data:image/png,abc", "is no data URI in base64"),
        ("data:image/png;base64,a*b", "is no base64"),
        ("../secret.png", "outside of the allowed folder; ask"),
        ("link.png", "outside of the allowed folder; ask"),
        ("/etc/passwd", "outside of the allowed folder; ask"),
        ("absent.png", "cannot be read: No such file or directory; check the path"),
        ("more", "cannot be read: it is a folder, expected a file"),
        ("a\0b.png", "cannot be read"),
        ("http://[::1", "is no URL: Invalid IPv6 URL; send it as a data URI"),
    ],
)
def test_other_places_are_one_line(folder: Path, place: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_image(place, folder, remedy="ask")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_image_that_is_too_large_is_not_at_a_wrong_path(folder: Path) -> None:
    with open(folder / "large.png", "wb") as file:
        file.truncate((1 << 26) + 1)
    with pytest.raises(UsageError, match="it has more than 67108864 bytes; make it smaller"):
        read_image("large.png", folder, remedy="ask")


def test_without_a_folder_no_file_is_read(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"is a file; start it with a folder"):
        read_image(str(folder / "more" / "a b.png"), None, remedy="start it with a folder")


def test_images_are_decoded_upright_in_rgb() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter to the left
    gray = picture(2, 30, 10).convert("L")
    held = io.BytesIO()
    picture(1, 40, 20).save(held, "JPEG", exif=turned)
    found = decode_images([held.getvalue(), png(gray)], "the request")
    assert [(image.mode, image.size) for image in found] == [("RGB", (20, 40)), ("RGB", (30, 10))]
    assert digest_of(PNG) != digest_of(png(gray))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ([PNG, b"no image"], "image 2 of the request is none that can be decoded; expected PNG, JPEG"),
        ([b""], "image 1 of the request is none that can be decoded"),
        ([PNG[: len(PNG) // 2]], "image 1 of the request does not decode"),
        ([b"%!PS-Adobe-3.0 EPSF-3.0\n"], "none that can be decoded"),
        ([PNG, png(Image.new("1", (6000, 6000)))], "up to number 2, small ones counted with sides of 256"),
        ([png(Image.new("1", (8, 8)))] * 513, "have 33619968 pixels up to number 513, small ones counted"),
        ([png(Image.new("1", (20000, 20000)))], "image 1 of the request has far more pixels than 33554432; make"),
        ([png(Image.new("1", (9600, 9400)))], "have 90240000 pixels up to number 1"),
        ([png(Image.new("1", (2, 60000)))], "have 1966080000 pixels up to number 1, small ones counted"),
    ],
)
def test_what_is_no_image_or_too_large_is_one_line(raw: list[bytes], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        decode_images(raw, "the request")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parts_of_messages() -> None:
    uri = f"data:image/png;base64,{base64.b64encode(b'x').decode()}"
    content = [
        {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": uri}},
        {"type": "image_url", "image_url": "b.png"}, {"type": "image", "image": "c.png"},
    ]  # fmt: skip
    image = {"type": "image"}
    assert split_content(content, "row 1") == ([content[0], image, image, image], [uri, "b.png", "c.png"])
    assert split_content("a", "row 1") == ([content[0]], [])
    assert split_content(None, "row 1") == ([{"type": "text", "text": ""}], [])


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url"}, "row 1 has an image without a place"),
        ({"type": "image_url", "image_url": {"url": 3}}, "row 1 has an image without a place"),
        (
            {"type": "input_audio", "input_audio": {}},
            "row 1 has a part of type 'input_audio', expected text, image_url",
        ),
        ({"type": "text"}, "row 1 has a part of type 'text'"),
        ("a", "row 1 has a part of type None"),
    ],
)
def test_other_parts_are_one_line(part: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        split_content([part], "row 1")


def test_rows_of_data_with_images_are_not_read_as_text_alone() -> None:
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "a"}]
    messages = Messages([{"role": "user", "content": content}])
    with pytest.raises(UsageError, match=r"line 1 has an image, which only calibrate and tune take"):
        list(row_tokens(lambda: None, messages, "a.jsonl, line 1"))
