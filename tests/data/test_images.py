"""Images of rows: where they may stand, what is read of them, and the sentence for each that cannot be trained."""

from __future__ import annotations

import base64
import io
import json
import struct
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.conftest import write_jsonl
from tests.tiny_vision import draw
from unsloth_ddp.config.task_options import ImageSettings
from unsloth_ddp.data.images import downloads, files
from unsloth_ddp.data.images.files import ImageFiles, open_image, stored
from unsloth_ddp.data.sources.checked_rows import checked_rows
from unsloth_ddp.data.sources.formats import to_example
from unsloth_ddp.utils.errors import UserError

ANSWER = {"role": "assistant", "content": "A cat."}
ASK = {"role": "user", "content": "What is this?"}


def png(color: tuple[int, int, int] = (200, 30, 30), size: tuple[int, int] = (8, 6)) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", size, color).save(written, "PNG")
    return written.getvalue()


def asking(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


TEXT = {"type": "text", "text": "What is this?"}
URI = "data:image/png;base64," + base64.b64encode(png()).decode()


@pytest.mark.parametrize(
    ("row", "parts", "images"),
    [
        ({"messages": [asking({"type": "image", "image": "a.png"}, TEXT), ANSWER]}, {"0": [None, "What is this?"]},
            ["a.png"]),
        ({"messages": [asking(TEXT, {"type": "image", "path": "a.png"}), ANSWER]}, {"0": ["What is this?", None]},
            ["a.png"]),
        ({"messages": [asking({"type": "image", "url": "file:///a.png"}), ANSWER]}, {"0": [None]}, ["/a.png"]),
        ({"messages": [asking({"type": "image_url", "image_url": {"url": "a.png"}}), ANSWER]}, {"0": [None]},
            ["a.png"]),
        ({"messages": [asking({"type": "image", "text": None, "image": {"path": "a.png", "bytes": None}}), ANSWER]},
            {"0": [None]}, ["a.png"]),
        # A column beside parts, in order or by number.
        ({"messages": [asking({"type": "image"}, TEXT, {"type": "image"}), ANSWER], "images": ["a.png", "b.png"]},
         {"0": [None, "What is this?", None]}, ["a.png", "b.png"]),
        ({"messages": [asking({"type": "image", "index": 1}, {"type": "image", "index": 0}), ANSWER],
            "images": ["a.png", "b.png"]},
         {"0": [None, None]}, ["b.png", "a.png"]),
        ({"messages": [asking({"type": "image", "index": 1.0}, {"type": "image", "index": 0.0}), ANSWER],
            "images": ["a.png", "b.png"]},
         {"0": [None, None]}, ["b.png", "a.png"]),
        ({"messages": [asking({"image": "a.png"}, {"text": "What?"}), ANSWER]}, {"0": [None, "What?"]}, ["a.png"]),
        ({"messages": [asking({"type": "input_image", "image_url": "a.png"}, {"type": "input_text", "text": "What?"}),
            ANSWER]},
         {"0": [None, "What?"]}, ["a.png"]),
        # Markers of LLaVA and LLaMA-Factory, in several turns.
        ({"conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}],
            "image": "a.png"},
         {"0": [None, "\nWhat?"]}, ["a.png"]),
        ({"instruction": "Compare <image> and <image>.", "output": "Alike.", "images": '["a.png", "b.png"]'},
         {"0": ["Compare ", None, " and ", None, "."]}, ["a.png", "b.png"]),
        # Without a place they stand before the first question.
        ({"messages": [{"role": "system", "content": "Be brief."}, ASK, ANSWER], "images": ["a.png", "b.png"]},
         {"1": [None, None, "What is this?"]}, ["a.png", "b.png"]),
        ({"prompt": [ASK], "completion": [ANSWER], "image": "a.png"}, {"0": [None, "What is this?"]}, ["a.png"]),
        ({"messages": [{**ASK, "images": ["a.png"]}, ANSWER]}, {"0": [None, "What is this?"]}, ["a.png"]),
        ({"messages": [ASK, ANSWER, {**ASK, "image": "a.png"}, ANSWER]}, {"2": [None, "What is this?"]}, ["a.png"]),
        ({"conversations": [{"from": "human", "value": "See <image>.", "images": "a.png"}, {"from": "gpt", "value": "A "
            "cat."}]},
         {"0": ["See ", None, "."]}, ["a.png"]),
        # Rows of text among them.
        ({"messages": [ASK, ANSWER], "images": []}, {}, []),
        ({"messages": [ASK, ANSWER], "images": None}, {}, []),
    ],
)  # fmt: skip
def test_images_stand_where_the_row_has_them(row: dict[str, Any], parts: dict, images: list[str]) -> None:
    example = to_example(row)
    assert (example.parts, example.images) == (parts, images)
    assert example.unread == []


@pytest.mark.parametrize(
    "image",
    [
        png(), URI.upper()[:5] + URI[5:], {"bytes": URI.partition(",")[2]}, {"bytes": png(), "path": None},
            {"bytes": png(), "path": "x.png"}, URI, {"url": URI},
        {"type": "base64", "media_type": "image/png", "data": URI.partition(",")[2]}, Image.open(io.BytesIO(png())),
    ],
)  # fmt: skip
def test_bytes_in_any_form_are_the_same_image(image: Any, tmp_path: Path) -> None:
    example = to_example({"messages": [ASK, ANSWER], "images": [image]})
    found = open_image(ImageFiles([]).checked(example.images[0]))
    assert (found.mode, found.size, found.getpixel((3, 3))) == ("RGB", (8, 6), (200, 30, 30))
    path = stored(example.images[0], tmp_path / "images")
    assert open_image(path).tobytes() == found.tobytes()
    assert json.loads(json.dumps(example.images)) == example.images


def test_keys_of_image_parts_that_are_not_read_are_told() -> None:
    part = {"type": "image", "image": "a.png", "max_pixels": 9, "text": None, "index": None}
    assert to_example({"messages": [asking(part, TEXT), ANSWER]}).unread == ["max_pixels of image parts"]


def refusal(row: dict[str, Any], folder: Path) -> str:
    path = write_jsonl(folder / "rows.jsonl", [{"messages": [ASK, ANSWER]}, row])
    with pytest.raises(UserError) as refused:
        list(checked_rows(str(path), "train", task="sft"))
    message = str(refused.value)
    assert message.startswith(f"{path}:2: ") and "\n" not in message and len(message) < 700
    return message


def broken_png() -> bytes:
    return png(size=(64, 64))[:-40]


def pretending_png(side: int) -> bytes:
    """A file of some hundred bytes that says how many pixels it has on a side."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


SHOWN = {"messages": [asking({"type": "image"}, TEXT), ANSWER]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**SHOWN, "images": ["none.png"]}, "image none.png: there is no such file in "),
        ({**SHOWN, "images": ["/nowhere/none.png"]}, "image /nowhere/none.png: there is no such file; check the path"),
        ({**SHOWN, "images": ["text.png"]}, "text.png is not an image in a known format (PNG, JPEG, "),
        ({**SHOWN, "images": ["broken.png"]}, "broken.png cannot be decoded: "),
        ({**SHOWN, "images": ["cut.jpg"]}, "cut.jpg cannot be decoded: image file is truncated"),
        ({**SHOWN, "images": ["none.gif"]}, "none.gif is not an image in a known format"),
        ({**SHOWN, "images": ["large.png"]}, "large.png has 9,000 x 9,000 pixels, over the limit of 64,000,000; scale "
            "it down."),
        ({**SHOWN, "images": ["pointer.png"]}, "pointer.png is a pointer of Git LFS, not the image; run git lfs pull"),
        ({**SHOWN, "images": ["data:image/png,abc"]}, "an image in base64 cannot be decoded"),
        ({**SHOWN, "images": ["data:text/plain;base64,aGVsbG8="]},
            "image in the row is not an image in a known format"),
        ({**SHOWN, "images": '["good.png"'}, "images is text that is not JSON"),
        ({"messages": [asking({"type": "image", "file": "good.png"}), ANSWER]}, "the row has 0 images for 1 place"),
        ({"messages": [asking({"type": "image", "image": ["good.png"]}), ANSWER]}, "an image is a list, not a path or "
            "bytes"),
        ({**SHOWN, "images": ["empty.png"]}, "empty.png is empty; fix it or remove the row."),
        ({**SHOWN, "images": ["huge.png"]},
            "huge.png has far more pixels than the limit of 64,000,000; scale it down."),
        ({**SHOWN, "images": ["drawing.svg"]}, "drawing.svg is not an image in a known format"),
        ({**SHOWN, "images": ["page.eps"]}, "page.eps is not an image in a known format"),
        ({**SHOWN, "images": ["."]}, "image . is not a file ("),
        ({**SHOWN, "images": ["a\u0000b.png"]}, "there is no such file"),
        ({**SHOWN, "images": ["~nobody-has-this-name/a.png"]}, "image '~nobody-has-this-name/a.png' is not a path; "
            "check it."),
        ({**SHOWN, "images": ["line.png"]}, "line.png has 1 x 4,000 pixels, so one side is over 200 times the other; "
            "crop it."),
        ({**SHOWN, "images": ["float.tif"]}, "float.tif has numbers of 32 bits, whose white is not known"),
        ({**SHOWN, "images": [None]}, "an image is missing, not a path or bytes; give one of them"),
        ({**SHOWN, "images": None}, "the row has 0 images for 1 place"),
        ({"messages": [asking({"type": "image", "image": "good.png"}, {"type": "text", "text": "<image> What?"}),
            ANSWER]},
         "the row has 1 image part and as often <image> in its texts; keep one of the two."),
        ({**SHOWN, "images": ["https://example.com/a.png"]}, "the image https://example.com/a.png is an address, and "
            "download_images is off; set --download_images, or download it and give its path."),
        ({"messages": [asking({"type": "image_url", "image_url": {"url": "http://a/b.jpg"}}), ANSWER]},
            "http://a/b.jpg "
            "is an address, and download_images is off"),
        ({**SHOWN, "images": ["az://box/a.png"]}, "the image az://box/a.png is an address of another kind than "
            "http(s); download it"),
        ({**SHOWN, "images": ["/9j/" + "A" * 300 + "/AA"]}, "the image /9j/AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA... of "
            "307 characters is no path; put data:image/png;base64, before base64."),
        ({"messages": [asking({"type": "image", "index": "0"}), ANSWER], "images": ["good.png"]}, "the index of an "
            "image part is '0'"),
        ({"messages": [asking({"type": "image", "image": "good.png", "weight": 0}), ANSWER]}, "a content part has "
            "weight 0 or false"),
        ({**SHOWN, "images": ["data:image/png;base64,???"]}, "an image in base64 cannot be decoded; write it again, "
            "or give a path."),
        (SHOWN, "the row has 0 images for 1 place (image parts in its messages); give as many images as places, in "
            "image parts or the column images."),
        ({**SHOWN, "images": ["good.png", "good.png"]}, "the row has 2 images for 1 place (image parts in its "
            "messages)"),
        ({"messages": [{"role": "user", "content": "<image> and <image>"}, ANSWER], "images": ["good.png"]}, "the row "
            "has 1 image for 2 places (<image> outside its answers)"),
        ({"messages": [{"role": "user", "content": "<image>?"}, ANSWER], "images": []}, "the row has 0 images for 1 "
            "place (<image> outside its answers)"),
        ({"messages": [asking({"type": "image", "image": "good.png"}), ANSWER], "images": ["good.png"]}, "the content "
            "parts name their images, and the row has a column of images too"),
        ({**SHOWN, "images": "good.png", "image": "good.png"}, "the row has images and image; keep one of these "
            "columns."),
        ({**SHOWN, "images": 5}, "images is a number, not an image or a list of images."),
        ({**SHOWN, "images": [5]}, "an image is a number, not a path or bytes; give one of them"),
        ({**SHOWN, "images": [{"name": "a.png"}]}, "an image is an object with name; it needs bytes, or a path."),
        ({"messages": [asking({"type": "image", "image": "good.png", "url": "good.png"}), ANSWER]}, "an image part "
            "has image and url; keep one of them."),
        ({"messages": [asking({"type": "image", "index": 4}), ANSWER], "images": ["good.png"]}, "the image parts have "
            "the index [4] for 1 image; number them from 0."),
        ({"messages": [ANSWER], "images": ["good.png"]}, "the row has images and no user message to show them in"),
        ({"text": "A cat.", "images": ["good.png"]}, "the row has images beside plain text, which has no place for "
            "them; write it as messages."),
        ({**SHOWN, "videos": ["a.mp4"]}, "the row has a column videos; this kit trains on text and images only."),
        ({"messages": [asking({"type": "video", "video": "a.mp4"}), ANSWER]}, "a content part (of type 'video') that "
            "is neither"),
    ],
)  # fmt: skip
def test_a_bad_image_is_refused_in_one_sentence_with_its_line(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    written = io.BytesIO()
    Image.effect_noise((64, 64), 60).save(written, "JPEG")
    jpeg = written.getvalue()
    contents = {
        "good.png": png(), "text.png": b"This is text.", "broken.png": broken_png(), "empty.png": b"",
            "huge.png": pretending_png(30_000), "large.png": pretending_png(9000), "none.gif": b"GIF89a" + bytes(7),
                "line.png": png(size=(1, 4000)),
        "drawing.svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            "page.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "pointer.png": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "cut.jpg": jpeg[: len(jpeg) // 2],
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    Image.new("F", (9, 9)).save(tmp_path / "float.tif")
    assert said in refusal(row, tmp_path)


def test_an_image_file_over_the_limit_of_bytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(png())
    monkeypatch.setattr(files, "MOST_BYTES", 10)
    assert f"a.png has {len(png())} bytes, over the limit of 10; write it smaller." in refusal(
        {**SHOWN, "images": ["a.png"]}, tmp_path
    )


def test_images_lie_in_the_given_folder_or_beside_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, color in (("rows", "red"), ("given", "green"), ("here", "blue")):
        (tmp_path / place).mkdir()
        draw(tmp_path / place / f"{color}.png", color, "square")
    monkeypatch.chdir(tmp_path / "here")
    rows = str(tmp_path / "rows" / "rows.jsonl")
    beside, given = (ImageFiles.of(ImageSettings(image_folder=f), [rows]) for f in ([], [str(tmp_path / "given")]))
    assert beside.checked("red.png") == str(tmp_path / "rows" / "red.png")
    assert beside.checked("blue.png") == str(tmp_path / "here" / "blue.png")
    assert given.checked("green.png") == str(tmp_path / "given" / "green.png")
    with pytest.raises(
        UserError, match=r"no such file in .*given; check the path, or give its folder as --image_folder"
    ):
        given.checked("red.png")
    with pytest.raises(UserError, match=r"image_folder .*green.png is no folder; give one that holds images\."):
        ImageFiles.of(ImageSettings(image_folder=[str(tmp_path / "given" / "green.png")]), [rows])


def test_a_marker_without_a_column_of_images_stays_text_and_is_told() -> None:
    row = {"messages": [{"role": "user", "content": "<image>What is this?"}, ANSWER], "image_path": "a.png"}
    found = to_example(row)
    assert (found.messages[0]["content"], found.parts, found.images) == ("<image>What is this?", {}, [])
    assert found.unread == ["<image> in texts of rows without a column images", "image_path"]
    assert not to_example({"messages": [ASK, ANSWER]}).unread


def test_a_marker_in_an_answer_is_text_beside_images_too() -> None:
    feed = {"role": "assistant", "content": "<rss><image><url>x</url></image></rss>"}
    found = to_example({"messages": [ASK, feed], "images": ["a.png"]})
    assert (found.messages[1], found.parts, found.images) == (feed, {"0": [None, "What is this?"]}, ["a.png"])
    assert found.unread == ["<image> in answers, where it is text"]
    assert (
        to_example({"messages": [{"role": "user", "content": "<image> What?"}, feed], "images": ["a.png"]}).messages[1]
        == feed
    )
    assert to_example({"messages": [ASK, feed], "images": []}).messages[1] == feed
    with pytest.raises(UserError, match=r"2 images for 1 place \(<image> outside its answers\)"):
        to_example({"messages": [{"role": "user", "content": "<image> What?"}, feed], "images": ["a.png", "b.png"]})


def test_an_image_is_upright_in_rgb_and_at_most_as_large_as_asked(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 20), (255, 0, 0))
    exif = image.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    image.save(tmp_path / "turned.jpg", exif=exif)
    assert open_image(str(tmp_path / "turned.jpg")).size == (20, 40)
    for mode, kind in (("RGBA", "png"), ("L", "png"), ("P", "gif"), ("CMYK", "jpg")):
        Image.new(mode, (40, 20)).save(tmp_path / f"{mode}.{kind}")
        assert open_image(str(tmp_path / f"{mode}.{kind}")).mode == "RGB"
    small = open_image(str(tmp_path / "turned.jpg"), most_pixels=200)
    assert small.size == (10, 20)


@pytest.mark.parametrize(
    ("mode", "color", "name", "seen"),
    [
        # Half of the light, with 8, 16 and 32 bits.
        ("I;16", 128 * 256, "grey.png", (128, 128, 128)),
        ("I;16", 128 * 256, "grey.tif", (128, 128, 128)),
        ("I", 128 * 256, "grey.tif", (128, 128, 128)),
        ("I", 128, "grey.tif", (128, 128, 128)),
        ("LA", (128, 255), "grey.png", (128, 128, 128)),
        # What cannot be seen is white, and what is seen half is half white.
        ("RGBA", (0, 0, 0, 0), "clear.png", (255, 255, 255)),
        ("RGBA", (0, 0, 0, 128), "clear.png", (127, 127, 127)),
        ("LA", (0, 0), "clear.png", (255, 255, 255)),
        ("RGBA", (200, 30, 30, 255), "red.webp", (200, 30, 30)),
        ("1", 1, "white.png", (255, 255, 255)),
    ],
)
def test_colors_are_those_that_are_seen(mode: str, color: Any, name: str, seen: tuple, tmp_path: Path) -> None:
    Image.new(mode, (4, 4), color).save(tmp_path / name, **({"lossless": True} if name.endswith("webp") else {}))
    assert open_image(str(tmp_path / name)).getpixel((1, 1)) == seen


def test_a_transparent_color_of_a_palette_is_white_and_an_animation_is_its_first_frame(tmp_path: Path) -> None:
    first, second = (Image.new("P", (4, 4), number) for number in (0, 1))
    for one in (first, second):
        one.putpalette([10, 20, 30, 40, 50, 60])
    first.save(tmp_path / "clear.png", transparency=0)
    first.save(tmp_path / "moving.gif", save_all=True, append_images=[second])
    assert open_image(str(tmp_path / "clear.png")).getpixel((1, 1)) == (255, 255, 255)
    assert open_image(str(tmp_path / "moving.gif")).getpixel((1, 1)) == (10, 20, 30)


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve a folder with images, and keep what is downloaded in another."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    (tmp_path / "web").mkdir()
    for name, content in {"a.png": png(), "broken.png": broken_png(), "page": b"<html>Not found", "empty": b""}.items():
        (tmp_path / "web" / name).write_bytes(content)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path / "web")) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_image_that_is_an_address_is_downloaded_once(address: str, tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{**SHOWN, "images": [f"{address}/a.png?size=1"]}])

    def read(**options: Any) -> list[str]:
        asked = ImageSettings(download_images=True)
        return next(iter(checked_rows(str(rows), "train", task="sft", images=asked, **options)))[1].images

    assert read(decode_images=False) == [f"{address}/a.png?size=1"] and not (tmp_path / "home").exists()
    found = read()
    assert open_image(found[0]).getpixel((3, 3)) == (200, 30, 30)
    # A run that is resumed trains on what it was trained on.
    (tmp_path / "web" / "a.png").write_bytes(png((0, 0, 255)))
    assert read() == found and len(list(Path(found[0]).parent.iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.png", "image {}/none.png cannot be downloaded: the server answers 404 File not found; check it"),
        ("broken.png", "image {}/broken.png cannot be decoded: "),
        ("page?secret=7", "image {}/page is not an image in a known format"),
        ("empty", "image {}/empty is empty; fix it"),
        ("large.png", "image {}/large.png has over 20 bytes, the limit; write it smaller."),
        ("slow.png", "image {}/slow.png takes more than 0 seconds to download; download it first."),
    ],
)
def test_an_address_without_an_image_is_refused_in_one_sentence(
    name: str, said: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ("large.png", "slow.png"):
        (tmp_path / "web" / name).write_bytes(png())
        monkeypatch.setattr(*((files, "MOST_BYTES", 20) if name == "large.png" else (downloads, "SECONDS", 0)))
    with pytest.raises(UserError) as refused:
        ImageFiles([], download=True).checked(f"{address}/{name}")
    message = str(refused.value)
    assert said.format(address) in message and "secret" not in message and message.endswith(".")
    assert not [p for p in (tmp_path / "home").rglob("*") if p.is_file()]


def test_another_attempt_to_download_does_not_print_the_query(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    logger = logging.getLogger("huggingface_hub.utils._http")
    logger.addHandler(caplog.handler)
    monkeypatch.setattr(downloads, "RETRIES", 1)
    with pytest.raises(UserError, match="cannot be downloaded"):
        ImageFiles([], download=True).checked("http://127.0.0.1:1/a.png?signature=7")
    logger.removeHandler(caplog.handler)
    assert "http://127.0.0.1:1/a.png" in caplog.text and "signature" not in caplog.text


def test_images_of_datasets_in_parquet_are_read(tmp_path: Path) -> None:
    import datasets

    path = draw(tmp_path / "a.png", "red", "circle")
    rows = [{"messages": [ASK, ANSWER], "images": [str(path)]}, {"messages": [ASK, ANSWER], "images": []}]
    features = datasets.Features(
        {
            "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": datasets.List(datasets.Image()),
        }
    )
    table = datasets.Dataset.from_list(rows, features=features)
    table.to_parquet(tmp_path / "rows.parquet")
    found = [example for _, example in checked_rows(str(tmp_path / "rows.parquet"), "train", task="sft")]
    assert [len(example.images) for example in found] == [1, 0]
    assert open_image(found[0].images[0]).tobytes() == open_image(str(path)).tobytes()


def test_images_of_a_hub_set_are_checked_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    rows = [{"text": "x", "images": [{"bytes": content, "path": None}]} for content in (png(), broken_png())]
    table = datasets.Dataset.from_list(rows, features=features).map(
        lambda row: {"messages": [ASK, ANSWER]}, remove_columns="text"
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: table)
    read = checked_rows("owner/name", "train", task="sft")
    assert len(next(read)[1].images) == 1
    with pytest.raises(UserError, match="owner/name train row 2: image in the row cannot be decoded"):
        next(read)


def test_a_pair_with_images_is_refused(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", "red", "circle")
    asked = [asking({"type": "image", "image": "a.png"})]
    for row in ({"prompt": asked, "images": None}, {"prompt": "What?", "images": ["a.png"]}):
        path = write_jsonl(tmp_path / "rows.jsonl", [{**row, "chosen": [ANSWER], "rejected": [ANSWER]}])
        with pytest.raises(UserError, match=r"rows.jsonl:1: the row has images, which task dpo does not take; remove"):
            list(checked_rows(str(path), "train", task="dpo"))


def test_a_labelled_answer_with_images_is_refused(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", "red", "circle")
    asked = [asking({"type": "image", "image": "a.png"})]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": asked, "completion": [ANSWER], "label": True}])
    with pytest.raises(UserError, match=r"rows.jsonl:1: the row has images, which task kto does not take"):
        list(checked_rows(str(path), "train", task="kto"))
