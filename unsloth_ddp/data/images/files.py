"""Find, check and open the images of rows; what an image may need of memory is bounded before it is decoded."""

from __future__ import annotations

import base64
import hashlib
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unsloth_ddp.config.task_options import ImageSettings
from unsloth_ddp.data.images.downloads import downloaded
from unsloth_ddp.data.images.values import DATA, image_value, is_web_address, without_query
from unsloth_ddp.data.sources.json_text import LFS_POINTER
from unsloth_ddp.utils.errors import UserError, one_line, os_reason

# Limits of one image. 64 million pixels need 192 MB when they are decoded.
MOST_BYTES, MOST_PIXELS = 100_000_000, 64_000_000
MOST_OF_16_BITS = 2**16 - 1
# A longer image is a line, which processors refuse (Qwen's) or squeeze into a square.
LONGEST_SIDE = 200
THUMBNAIL, THUMBNAIL_START = 160, "data:image/jpeg;base64,"
# Formats whose decoders are part of Pillow; others run programs (EPS) or are drawings.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")


@dataclass
class ImageFiles:
    """Resolve and check the images that rows name; an image that several rows name is checked once.

    Args:
        folders: in which relative paths are looked up, in this order.
        download: whether images that are http(s) addresses are downloaded.
        decode: whether images are downloaded and decoded, or files only looked up.
    """

    folders: Sequence[Path]
    download: bool = False
    decode: bool = True
    _checked: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: ImageSettings, sources: Sequence[str], *, decode: bool = True) -> ImageFiles:
        """Return those of a run: in --image_folder, or else beside the rows' files and in the working folder.

        Args:
            sources: files with rows.

        Raises:
            UserError: an --image_folder is no folder.
        """
        named_folders = [Path(folder).expanduser() for folder in settings.image_folder]
        if missing := next((folder for folder in named_folders if not folder.is_dir()), None):
            raise UserError(f"image_folder {missing} is no folder; give one that holds images.")
        beside = dict.fromkeys([*(Path(folder).expanduser().parent for folder in sources), Path()])
        return cls(named_folders or list(beside), settings.download_images, decode)

    def checked(self, value: str) -> str:
        """Return an image as an absolute path, or a data URI, after decoding it once.

        Raises:
            UserError: there is no such file, it cannot be downloaded or decoded, or it exceeds a limit.
        """
        if value not in self._checked:
            if value.startswith(DATA):
                return self._decoded(value)
            self._checked[value] = (
                self._downloaded(value) if is_web_address(value) else self._decoded(self._find(value))
            )
        return self._checked[value]

    def _decoded(self, image: str) -> str:
        if self.decode:
            open_image(image).close()
        return image

    def _downloaded(self, address: str) -> str:
        name = without_query(address)
        if not self.download:
            raise UserError(
                f"the image {name} is an address, and download_images is off; set --download_images, or download it "
                "and give its path."
            )
        if not self.decode:
            return address
        path = downloaded(address, MOST_BYTES)
        try:
            return self._decoded(str(path))
        except UserError as error:
            # A page that says what is wrong with the address.
            path.unlink(missing_ok=True)
            raise UserError(str(error).replace(str(path), name)) from None

    def _find(self, value: str) -> str:
        try:
            path = Path(value).expanduser()
            # An absolute path stays as it is.
            places = [folder / path for folder in self.folders]
            file = next((place for place in places if place.is_file()), None)
            other = next((place for place in places if place.exists()), None)
        except OSError as error:
            raise UserError(f"image {value[:200]} cannot be looked up: {os_reason(error)}; check the path.") from None
        except (ValueError, RuntimeError):
            raise UserError(f"image {value[:200]!r} is not a path; check it.") from None
        if file is not None:
            return str(file.resolve())
        if other is not None:
            raise UserError(f"image {value[:200]} is not a file ({other}); give the path of an image.")
        looked = f" in {' or '.join(str(place) for place in self.folders)}" if not path.is_absolute() else ""
        raise UserError(
            f"image {value[:200]}: there is no such file{looked}; check the path, or give its folder as --image_folder."
        )


def open_image(value: str, most_pixels: int | None = None) -> Any:
    """Return a decoded RGB image, upright as its EXIF data say; of an animation the first frame.

    Args:
        value: a path or a data URI.
        most_pixels: a larger image is scaled down to about so many.

    Raises:
        UserError: it cannot be read, is no image, is broken, or exceeds a limit.
    """
    from PIL import Image, ImageOps

    name = "in the row" if value.startswith(DATA) else value[:200]
    with _refusing_broken(name):
        with Image.open(_content(value, name), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > MOST_PIXELS:
                raise UserError(
                    f"image {name} has {width:,} x {height:,} pixels, over the limit of {MOST_PIXELS:,}; scale it down."
                )
            if max(width, height) > LONGEST_SIDE * min(width, height):
                raise UserError(
                    f"image {name} has {width:,} x {height:,} pixels, so one side is over {LONGEST_SIDE} times the "
                    "other; crop it."
                )
            if most_pixels is not None and width * height > most_pixels:
                opened.draft("RGB", _scaled(width, height, most_pixels))
            image = _in_rgb(ImageOps.exif_transpose(opened), name)
        if most_pixels is not None and image.width * image.height > most_pixels:
            image = image.resize(_scaled(image.width, image.height, most_pixels), Image.Resampling.BICUBIC)
    return image


def _in_rgb(image: Any, name: str) -> Any:
    """Return an image in RGB: on white if it is transparent, and with 16 bits, which Pillow clips, divided by 256."""
    from PIL import Image

    if image.has_transparency_data:
        ground = Image.new("RGBA", image.size, "white")
        ground.alpha_composite(image.convert("RGBA"))
        image = ground
    elif image.mode[0] in "IF":
        low, high = image.getextrema()
        if image.mode == "F" or low < 0 or high > MOST_OF_16_BITS:
            raise UserError(
                f"image {name} has numbers of 32 bits, whose white is not known; write it with 8 or 16 bits."
            )
        numbers = np.asarray(image)
        image = Image.fromarray((numbers if high <= 255 else numbers // 256).astype(np.uint8))
    return image.convert("RGB")


def thumbnail(value: str) -> str:
    """Return an image of at most THUMBNAIL pixels a side as the data URI of a JPEG, which has at most some 50 kB.

    Raises:
        UserError: see open_image.
    """
    image = open_image(value, 16 * THUMBNAIL**2)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    written = io.BytesIO()
    image.save(written, "JPEG", quality=80)
    return f"{THUMBNAIL_START}{base64.b64encode(written.getvalue()).decode()}"


def plain_image(width: int, height: int, grey: int = 127) -> str:
    """Return an image in one grey as a data URI."""
    from PIL import Image

    return image_value(Image.new("RGB", (width, height), (grey,) * 3))


def _scaled(width: int, height: int, most_pixels: int) -> tuple[int, int]:
    factor = (most_pixels / (width * height)) ** 0.5
    return max(1, int(width * factor)), max(1, int(height * factor))


def _content(value: str, name: str) -> io.BytesIO:
    if value.startswith(DATA):
        content = base64.b64decode(value.partition(",")[2])
    else:
        size = Path(value).stat().st_size
        content = Path(value).read_bytes() if size <= MOST_BYTES else b""
        if size > MOST_BYTES:
            raise UserError(f"image {name} has {size:,} bytes, over the limit of {MOST_BYTES:,}; write it smaller.")
    if not content:
        raise UserError(f"image {name} is empty; fix it or remove the row.")
    if content.startswith(LFS_POINTER):
        raise UserError(f"image {name} is a pointer of Git LFS, not the image; run git lfs pull in its repository.")
    return io.BytesIO(content)


@contextmanager
def _refusing_broken(name: str) -> Iterator[None]:
    """Turn the errors of Pillow, which have many classes, into a UserError."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except UserError:
        raise
    except MemoryError:
        raise UserError(f"image {name} does not fit into memory; scale it down.") from None
    except Image.DecompressionBombError:
        raise UserError(f"image {name} has far more pixels than the limit of {MOST_PIXELS:,}; scale it down.") from None
    except UnidentifiedImageError:
        raise UserError(
            f"image {name} is not an image in a known format ({', '.join(FORMATS)}); write it as PNG or JPEG."
        ) from None
    except Exception as error:
        cause = os_reason(error) if isinstance(error, OSError) and error.errno else one_line(error, 100).rstrip(".")
        raise UserError(f"image {name} cannot be decoded: {cause}; write it again, or remove the row.") from None


def stored(value: str, folder: Path) -> str:
    """Return the path of an image; bytes are written to a file in `folder` first, once for all rows that have them."""
    if not value.startswith(DATA):
        return value
    content = base64.b64decode(value.partition(",")[2])
    path = folder / hashlib.sha256(content).hexdigest()
    if not path.exists():
        folder.mkdir(exist_ok=True)
        path.write_bytes(content)
    return str(path)
