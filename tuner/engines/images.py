"""Images in prompts: how they are read, and the ids that stand for their tokens.

The tokens of an image all have one id, the model's placeholder. Whatever compares prompts (prefix
caches, token trees, conversations) must not take two images for one, so inside this process each
token of each image has a distinct id:

    recorded    1 5 5 5 2    with the image a94a8f... at 1, 3 tokens long
    compared    1 x x+1 x+2 2      x from `IMAGE_IDS` on, another for each image
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import io
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import numpy as np
from numpy.typing import NDArray

from tuner.errors import MissingDependencyError, TunerError, pip_install

if TYPE_CHECKING:
    from PIL.Image import Image

Ints = NDArray[np.int64]

IMAGE_IDS = 1 << 24
"""The first id of an image's token; no vocabulary has as many."""
_LAST = (1 << 32) - 1  # trees sort ids of 4 bytes
REFERENCE = "sha256:"
"""Begins the URL of an image whose bytes are kept elsewhere."""

_FETCH_SECONDS = 60
# Not asyncio's default threads, all of which agents may block.
_DECODING = ThreadPoolExecutor(1, "tuner-images")
_SUFFIXES = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp", "GIF": "gif"}
FORMATS = tuple(_SUFFIXES)


class ImageError(TunerError, ValueError):
    """An image that cannot be used; the message continues a sentence that begins with it."""


@dataclass(frozen=True)
class ImageSpan:
    """A stretch of a prompt that holds tokens of an image.

    Attributes:
        start: Its first token in `prompt_ids`.
        length: Number of tokens.
        sha256: Of the image's bytes, as they were sent.
        offset: Number of the image's tokens before these: some models put text between them.
    """

    start: int
    length: int
    sha256: str
    offset: int = 0


@dataclass(frozen=True)
class ImageLimits:
    """Limits of a request's images.

    Attributes:
        count: Images of one request.
        content: Bytes of one image.
        pixels: Pixels of one image.
        folder: Files in it may be named; None for none.
        hosts: Names of the hosts from which images are fetched.
    """

    count: int = 32
    content: int = 20 << 20
    pixels: int = 1 << 25
    folder: Path | None = None
    hosts: frozenset[str] = frozenset()


def on_the_web(url: str) -> bool:
    """Whether an image must be fetched before it can be received."""
    return url[:8].lower().startswith(("http://", "https://"))


def content_of(url: str, limits: ImageLimits) -> bytes:
    """The bytes of an image that a URL names or holds.

    Raises:
        ImageError: It has none, or too many.
    """
    head, _, data = url.partition(",")
    scheme = urlsplit(head).scheme.lower() if head[:16].isascii() else ""
    if scheme == "data":
        if not head.lower().endswith(";base64"):
            raise ImageError("is a data URL without ;base64: encode the image in base64")
        if len(data) > 4 * (limits.content // 3 + 1):
            raise _too_large(len(data) * 3 // 4, limits)
        try:
            content = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ImageError(f"is not valid base64: {error}") from error
    elif scheme == "file":
        content = _file(url, limits)
    elif on_the_web(url):
        raise ImageError("is on the web and was not fetched: send a data URL")
    else:
        raise ImageError("is no data URL: send data:image/png;base64,...")
    if len(content) > limits.content:
        raise _too_large(len(content), limits)
    return content


async def fetch(url: str, limits: ImageLimits) -> bytes:
    """The bytes of an image on the web; each redirect must lead to one of the hosts, too.

    Raises:
        ImageError: The host is not among the allowed ones, does not answer, or sends too much.
    """
    import httpx  # takes a tenth of a second, which requests without such images need not wait

    async def check_host(request: httpx.Request) -> None:
        if request.url.host not in limits.hosts:
            raise ImageError(
                f"is on the host {request.url.host!r}, from which nothing is fetched: send a data "
                "URL, or add the host to tuner.images.hosts"
            )

    content = bytearray()
    # As it is sent: a compressed answer could unpack to any size.
    headers = {"accept-encoding": "identity"}
    hooks = {"request": [check_host]}
    try:
        async with (
            asyncio.timeout(_FETCH_SECONDS),
            httpx.AsyncClient(headers=headers, event_hooks=hooks, follow_redirects=True) as client,
            client.stream("GET", url) as response,
        ):
            if response.status_code != 200:
                raise ImageError(f"cannot be fetched: its host answers {response.status_code}")
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > limits.content:
                    raise _too_large(len(content), limits)
    except TimeoutError as error:
        raise ImageError(f"was not fetched within {_FETCH_SECONDS} s") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ImageError(f"cannot be fetched ({type(error).__name__})") from error
    return bytes(content)


def _unknown(sha256: str) -> ImageError:
    return ImageError(f"image {sha256} is unknown: its trace was not read from a file")


def _too_large(size: int, limits: ImageLimits) -> ImageError:
    return ImageError(
        f"has {size} bytes: at most {limits.content} are accepted (tuner.images.max_bytes)"
    )


def _file(url: str, limits: ImageLimits) -> bytes:
    """The content of a file in the folder that the user allows."""
    parts = urlsplit(url)
    path = Path(url2pathname(unquote(parts.path)))
    if limits.folder is None:
        raise ImageError("is a file: set tuner.images.folder to a folder whose images may be read")
    try:
        inside = path.resolve().is_relative_to(limits.folder.resolve())
        if inside and parts.netloc in ("", "localhost"):
            with path.open("rb") as file:
                return file.read(limits.content + 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise ImageError("is a file that cannot be read") from error
    raise ImageError("is not in tuner.images.folder")


def opened(content: bytes, limits: ImageLimits) -> tuple[Image, str]:
    """An image in RGB as a viewer shows it, and the suffix of its files.

    Transparent pixels are white, and a camera's rotation is applied. Nothing is decoded before the
    header has shown the format and the number of pixels.

    Raises:
        ImageError: It is of another format, damaged, animated or too large.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingDependencyError(
            f"images need the library Pillow ({error}): {pip_install('vision')}"
        ) from error
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if width * height > limits.pixels:
                raise ImageError(
                    f"has {width} x {height} pixels: at most {limits.pixels} are accepted "
                    "(tuner.images.max_pixels)"
                )
            if getattr(image, "is_animated", False):
                raise ImageError("is animated: send one frame")
            suffix = _SUFFIXES[str(image.format)]
            image.load()
            return _rgb(ImageOps.exif_transpose(image)), suffix
    except ImageError:
        raise
    except Exception as error:  # a decoder of damaged data may fail in any way
        raise ImageError(
            f"is no image that can be read ({type(error).__name__}): send "
            f"{', '.join(FORMATS)}, and check that it is complete"
        ) from error


def _rgb(image: Any) -> Any:
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits of grey
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    if "transparency" in image.info or image.mode in ("LA", "PA", "RGBA", "La", "RGBa"):
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


@dataclass(frozen=True)
class _Numbered:
    """An image with the first of the ids of its tokens."""

    sha256: str
    tokens: int
    first: int


@dataclass
class _Content:
    """The bytes of an image, or the file that has them."""

    suffix: str
    content: bytes | None
    file: Path | None = None


@dataclass(frozen=True)
class ImageOrder:
    """Ids of images, renumbered by content: what is sorted must not depend on the order in which
    this process has received them.

    Attributes:
        first: First ids of some images, ascending.
        tokens: Number of tokens of each.
        numbers: The first id of each in the order of their content.
    """

    first: Ints
    tokens: Ints
    numbers: Ints

    def renumbered(self, ids: Ints) -> Ints:
        """`ids` [T], with other ones for the images."""
        image = np.searchsorted(self.first, ids, side="right") - 1
        inside = (image >= 0) & (ids - self.first[image] < self.tokens[image])
        return np.where(inside, ids + (self.numbers - self.first)[image], ids)

    @property
    def inverse(self) -> ImageOrder:
        order = np.argsort(self.numbers)
        return ImageOrder(self.numbers[order], self.tokens[order], self.first[order])


class Album:
    """The images of this process: their bytes, and the ids of their tokens.

    Bytes are dropped once a file has them: that of a trace (`keep`), or a temporary one.

    Args:
        memory: Maximum number of bytes in memory. Images of refused requests are never kept.
    """

    def __init__(self, memory: int = 1 << 28) -> None:
        self._lock = threading.RLock()
        self.memory = memory
        self._in_memory = 0
        self._spool: tempfile.TemporaryDirectory[str] | None = None
        self._numbers: dict[tuple[str, int], _Numbered] = {}
        self._first: list[int] = []
        self._numbered: list[_Numbered] = []
        self._next = IMAGE_IDS
        self._content: dict[str, _Content] = {}
        self._fetched: dict[tuple[str, ImageLimits], str] = {}

    # Bytes

    async def fetch(self, url: str, limits: ImageLimits) -> None:
        """Fetch an image from the web, once in this process and within these limits, so that it can
        be received.

        Raises:
            ImageError: It cannot be fetched, or not be used.
        """
        if (url, limits) not in self._fetched:
            content, loop = await fetch(url, limits), asyncio.get_running_loop()
            sha256 = await loop.run_in_executor(_DECODING, self.add, content, limits)
            self._fetched[url, limits] = sha256

    def add(self, content: bytes, limits: ImageLimits) -> str:
        """The SHA-256 of an image, which is read once.

        Raises:
            ImageError: It cannot be used.
        """
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 not in self._content:
            _, suffix = opened(content, limits)
            with self._lock:
                if sha256 not in self._content:
                    self._content[sha256] = _Content(suffix, content)
                    self._in_memory += len(content)
                if self._in_memory > self.memory:
                    self._spill()
        return sha256

    def _spill(self) -> None:
        """Write the images that are in memory to temporary files."""
        if self._spool is None:
            self._spool = tempfile.TemporaryDirectory(prefix="tuner-images-")
        for sha256 in [sha256 for sha256, known in self._content.items() if known.content]:
            self.keep(sha256, Path(self._spool.name))

    def received(self, url: str, limits: ImageLimits) -> str:
        """The SHA-256 of an image that a URL holds, or names: one sent before by `sha256:...`.

        Raises:
            ImageError: It cannot be used.
        """
        if url.startswith(REFERENCE):
            sha256 = url.removeprefix(REFERENCE)
            if sha256 not in self._content:
                raise ImageError("names an image that was not sent before: send a data URL")
            return sha256
        return self._fetched.get((url, limits)) or self.add(content_of(url, limits), limits)

    def open(self, sha256: str) -> Image:
        """The image in RGB.

        Raises:
            ImageError: Its file is missing or damaged.
        """
        content = self.content(sha256)
        return opened(content, ImageLimits(content=len(content), pixels=1 << 40))[0]

    def content(self, sha256: str) -> bytes:
        """An image's bytes, as they were sent."""
        known = self._content.get(sha256)
        if known is None:
            raise _unknown(sha256)
        if known.content is not None:
            return known.content
        assert known.file is not None
        try:
            content = known.file.read_bytes()
        except OSError as error:
            raise ImageError(f"{known.file} cannot be read: {error.strerror}") from error
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ImageError(f"{known.file} is damaged: its content has another SHA-256")
        return content

    def keep(self, sha256: str, folder: Path) -> None:
        """Write an image into a folder, once; from then on its bytes are read from there."""
        known = self._content.get(sha256)
        if known is None:
            raise _unknown(sha256)
        if known.file is not None and known.file.parent == folder and known.file.exists():
            return
        file, content = folder / f"{sha256}.{known.suffix}", self.content(sha256)
        folder.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.part")
        part.write_bytes(content)
        part.replace(file)
        with self._lock:
            self._in_memory -= len(known.content or b"")
            known.file, known.content = file, None

    def find(self, sha256: str, folder: Path) -> None:
        """Take an image of a recorded prompt from a folder; missing files are named when they are
        needed."""
        if sha256 not in self._content:
            names = [folder / f"{sha256}.{suffix}" for suffix in _SUFFIXES.values()]
            file = next(filter(Path.exists, names), names[0])
            self._content[sha256] = _Content(file.suffix[1:], None, file)

    # Ids

    def numbered(self, sha256: str, tokens: int) -> range:
        """The ids of an image's tokens."""
        known = self._numbers.get((sha256, tokens))
        if known is None:
            with self._lock:
                known = self._numbers.get((sha256, tokens))
                if known is None:
                    if self._next + tokens > _LAST:
                        raise ImageError("is one too many: start a new process")
                    known = _Numbered(sha256, tokens, self._next)
                    self._first.append(known.first)
                    self._numbered.append(known)
                    self._next += tokens + 1  # the ids of two images never follow each other
                    self._numbers[sha256, tokens] = known
        return range(known.first, known.first + tokens)

    def compared(self, prompt_ids: Sequence[int], images: Iterable[ImageSpan]) -> tuple[int, ...]:
        """A recorded prompt with the images' own ids."""
        ids = list(prompt_ids)
        spans = list(images)
        tokens: dict[str, int] = {}
        for span in spans:
            tokens[span.sha256] = max(tokens.get(span.sha256, 0), span.offset + span.length)
        for span in spans:
            own = self.numbered(span.sha256, tokens[span.sha256])
            ids[span.start : span.start + span.length] = own[span.offset :][: span.length]
        return tuple(ids)

    def recorded(
        self, ids: Sequence[int], placeholder: int
    ) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
        """Inverse of `compared`: the prompt as the model's processor writes it."""
        spans = tuple(self._spans(ids))
        if not spans:
            return tuple(ids), ()
        return tuple(placeholder if id_ >= IMAGE_IDS else id_ for id_ in ids), spans

    def _spans(self, ids: Sequence[int]) -> Iterator[ImageSpan]:
        seen = [place for place, id_ in enumerate(ids) if id_ >= IMAGE_IDS]
        for _, group in groupby(
            enumerate(seen), lambda one: (one[1] - one[0], ids[one[1]] - one[1])
        ):
            places = [place for _, place in group]
            image = self.image_at(ids[places[0]])
            offset = ids[places[0]] - image.first
            yield ImageSpan(places[0], len(places), image.sha256, offset)

    def image_at(self, id_: int) -> _Numbered:
        """The image that a token with this id belongs to."""
        return self._numbered[bisect_right(self._first, id_) - 1]

    def order(self, ids: Ints) -> ImageOrder | None:
        """The order of the images whose tokens are among these ids; None if there are none."""
        seen = ids[ids >= IMAGE_IDS]
        if not len(seen):
            return None
        places = np.unique(np.searchsorted(self._first, seen, side="right") - 1)
        images = [self._numbered[place] for place in places if place >= 0]
        numbers, start = {}, IMAGE_IDS
        for image in sorted(images, key=lambda one: (one.sha256, one.tokens)):
            numbers[image] = start
            start += image.tokens + 1
        columns = [(one.first, one.tokens, numbers[one]) for one in images]
        return ImageOrder(*np.array(columns).T) if columns else None

    @property
    def end(self) -> int:
        """The first id that no image has."""
        return self._next


ALBUM = Album()
"""Everything that reads a prompt in this process must give an image the same ids."""
