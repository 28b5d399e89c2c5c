"""Images that messages name: found in their parts, read from data URIs or from one folder, and decoded.

Nothing is fetched from a network. An image's size is read from its first bytes, before it is decoded, so a small file
cannot become more pixels than `MOST_PIXELS`.
"""

import base64
import binascii
import errno
import io
import warnings
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ptqpipe.checkpoint.regular_file import read_regular
from ptqpipe.errors import UsageError, missing_package, one_line

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 1 << 25
"""Limit for all images of one request, or one row of data, together: 5792 x 5792, which decodes to 96 MiB."""
_LEAST_SIDE = 256  # that images are counted at, since processors enlarge small ones until both sides have a size
_MOST_BYTES = 1 << 26
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_KINDS = ("image_url", "image")


def has_image(content: Any) -> bool:
    """Whether a message's content has a part that is an image."""
    parts = content if isinstance(content, list) else ()
    return any(isinstance(part, Mapping) and part.get("type") in _KINDS for part in parts)


def split_content(content: Any, where: str) -> tuple[list[dict[str, Any]], list[str]]:
    """(parts for a chat template, where its images are) of a message's content: a text, or a list of parts
    {"type": "text", "text": ...}, {"type": "image_url", "image_url": {"url": ...}} and {"type": "image", "image": ...}.

    Of an image a part {"type": "image"} stays, which templates know. UsageError for other parts.
    """
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}], []
    parts: list[dict[str, Any]] = []
    places: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in _KINDS:
            place = next((part[name] for name in ("image_url", "image", "url", "path") if name in part), None)
            place = place.get("url") if isinstance(place, Mapping) else place
            if not isinstance(place, str):
                raise UsageError(
                    f'{where} has an image without a place, expected {{"url": "data:image/png;base64,..."}}'
                )
            parts.append({"type": "image"})
            places.append(place)
        else:
            raise UsageError(f"{where} has a part of type {kind!r}, expected text, image_url or image")
    return parts, places


def read_image(place: str, folder: Path | None, *, remedy: str, within: bool = True) -> bytes:
    """The bytes of an image: of a data URI, or of a file, as a path or a file:// URL.

    folder  that paths are relative to; None allows no files
    remedy  what to do where files are not allowed
    within  whether a file must lie in the folder, wherever links lead

    UsageError for other URLs, for what is no base64, and for files that cannot be read or are not allowed.
    """
    shown = one_line(place, limit=80)
    if place.startswith("data:"):
        head, _, data = place.partition(",")
        if not head.endswith(";base64"):
            raise UsageError(f"image {shown!r} is no data URI in base64; expected data:image/png;base64,...")
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise UsageError(f"the data URI of image {shown!r} is no base64; encode the file again") from None
    try:
        parts = urlsplit(place)
    except ValueError as error:
        raise UsageError(f"image {shown!r} is no URL: {error}; send it as a data URI") from None
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        raise UsageError(f"image {shown!r} would be fetched from a network, which is never done; send it as a data URI")
    if folder is None:
        raise UsageError(f"image {shown!r} is a file; {remedy}")
    try:
        path = (folder / (unquote(parts.path) if parts.scheme else place)).resolve()
        if within and not path.is_relative_to(folder.resolve()):
            raise UsageError(f"image {shown!r} lies outside of the allowed folder; {remedy}")
        return read_regular(path, limit=_MOST_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        remedies = {errno.EFBIG: "make it smaller", errno.EACCES: "make it readable for you"}
        fits = remedies.get(getattr(error, "errno", None) or 0, "check the path")
        raise UsageError(f"image {shown!r} cannot be read: {reason}; {fits}") from None


def decode_images(raw: Sequence[bytes], where: str) -> "list[Image]":
    """The images in RGB, upright. UsageError for one that does not decode, and for more pixels than
    `MOST_PIXELS`, also when a processor will have enlarged them."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise missing_package("a model that is given images", "Pillow", "ptqpipe[images]") from None
    opened, pixels = [], 0
    for number, data in enumerate(raw, 1):
        try:
            with warnings.catch_warnings():  # of many pixels, which are counted below
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                image = Image.open(io.BytesIO(data), formats=_FORMATS)
        except Image.DecompressionBombError:
            raise UsageError(
                f"image {number} of {where} has far more pixels than {MOST_PIXELS}; make it smaller"
            ) from None
        except Exception:  # of what kind depends on the format's code
            formats = ", ".join(_FORMATS)
            raise UsageError(f"image {number} of {where} is none that can be decoded; expected {formats}") from None
        short, long = sorted(max(1, side) for side in image.size)
        pixels += short * long if short >= _LEAST_SIDE else _LEAST_SIDE**2 * long // short
        if pixels > MOST_PIXELS:
            raise UsageError(
                f"the images of {where} have {pixels} pixels up to number {number}, small ones counted with sides of "
                f"{_LEAST_SIDE}, expected at most {MOST_PIXELS} together; send fewer, or make them smaller"
            )
        opened.append(image)
    upright = []
    for number, image in enumerate(opened, 1):
        try:
            upright.append(ImageOps.exif_transpose(image).convert("RGB"))
        except Exception as error:
            reason = one_line(str(error), limit=100)
            raise UsageError(f"image {number} of {where} does not decode: {reason}; save it again") from None
    return upright


def digest_of(raw: bytes) -> bytes:
    return blake2b(raw, digest_size=16).digest()
