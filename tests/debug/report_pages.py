"""Reads a report back: the elements of the page, its data block as tables, and what a browser makes of it."""
from __future__ import annotations

import json
import shutil
import struct
import subprocess
import zlib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
TEXTS = {"id", "name", "buffer", "dtype", "kind", "stage", "basis", "function"}
TEXT_LISTS = {"nodes", "inputs", "outputs", "scratch"}
SHAPES = {"shape", "grid", "block"}


@dataclass
class Page(HTMLParser):
    """Elements with their attributes, and the text inside each script and style."""

    elements: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    raw: list[tuple[str, dict[str, str], str]] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)  # text inside each element that has an id
    _open: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.elements.append((tag, found))
        if tag in ("script", "style"):
            self.raw.append((tag, found, ""))
        if tag not in ("meta", "br", "input", "link", "img", "hr"):
            self._open.append((tag, found.get("id", "")))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1][0] in ("script", "style"):
            tag, attrs, text = self.raw[-1]
            self.raw[-1] = (tag, attrs, text + data)
        for _, name in self._open:
            if name:
                self.ids[name] = self.ids.get(name, "") + data


def read_page(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    return page


def read_data(text: str) -> dict[str, Any]:
    """The data block with its tables as lists of objects, every number into a shared list replaced by what it names."""
    blocks = [body for tag, attrs, body in read_page(text).raw if tag == "script" and attrs.get("id") == "report-data"]
    assert len(blocks) == 1
    data = json.loads(blocks[0])

    def cell(column: str, value: Any) -> Any:
        if column in TEXTS:
            return data["strings"][value]
        if column in TEXT_LISTS:
            return [data["strings"][n] for n in value]
        return data["shapes"][value] if column in SHAPES else value

    for name, columns in data["columns"].items():
        data[name] = [{c: cell(c, v) for c, v in zip(columns, row, strict=True)} for row in data[name]]
    return data


def browser() -> str | None:
    """A Chromium or Chrome on the path."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def browse(page: Path, out: Path, *, launch: str = "", dark: bool = False, width: int = 1280, height: int = 1600
           ) -> tuple[bytes, Page, list[str]]:
    """Opens a page without a network; returns the screenshot, the page after its scripts ran, and console lines."""
    program = browser()
    assert program is not None
    command = [
        program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--enable-logging=stderr",
        f"--user-data-dir={out / 'profile'}", f"--window-size={width},{height}", "--virtual-time-budget=5000",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
    ]
    address = page.as_uri() + (f"#{launch}" if launch else "")
    shot = out / "page.png"
    done = [subprocess.run([*command, wanted, address], capture_output=True, text=True, timeout=120, check=True)
            for wanted in (f"--screenshot={shot}", "--dump-dom")]
    console = [line for run in done for line in run.stderr.splitlines() if "CONSOLE" in line]
    return shot.read_bytes(), read_page(done[1].stdout), console


def look(png: bytes) -> tuple[int, int, tuple[int, ...], int]:
    """Width, height, the colour of the first pixel, and how many rows of an 8-bit PNG differ as they are stored.

    Rows are stored as differences from their neighbours, so those of a blank page are all alike; the first pixel has
    no neighbour and is stored as it is.
    """
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    at, chunks = 8, {}
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at: at + 8])
        chunks[kind] = chunks.get(kind, b"") + png[at + 8: at + 8 + length]
        at += 12 + length
    width, height, depth, colours, _, _, interlace = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, interlace) == (8, 0)
    wide = {2: 3, 6: 4}[colours]
    body, step = zlib.decompress(chunks[b"IDAT"]), width * wide + 1
    rows = {body[y * step: (y + 1) * step] for y in range(height)}
    return width, height, tuple(body[1:4]), len(rows)
