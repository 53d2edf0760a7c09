"""Write the pictures of the explorer's pages that the README shows: ``make screenshots``."""

import shutil
from pathlib import Path

from browsing import ROOT, browser, served, tab
from kvsim_explorer.pages import PAGES
from PIL import Image

FOLDER = ROOT / "apps" / "screenshots"
NEEDLE = "traces/samples/smollm2-needle-512"
PARAMETERS: dict[str, dict[str, str]] = {
    "trace": {},
    "text": {"step": "20"},
    "map": {},
    "compare": {"others": "cumulative\nsingle\ntova"},
    "alpha": {},
    "heads": {"policy": "adakv:snapkv,window_size=16"},
    "scorers": {},
    "oracle": {"others": "cumulative\nsingle\nrandom:7"},
}
"""What the shared URL of each picture says beside the recording."""

COLOURS = 128


def write(folder: Path = FOLDER) -> None:
    """Take every page at 1280 and 800 pixels, light and dark."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with served() as address, browser() as running:
        for width in (1280, 800):
            for scheme in ("light", "dark"):
                for name in PAGES:
                    file = folder / f"{name}-{width}-{scheme}.png"
                    with tab(running, address, width=width, scheme=scheme) as screen:
                        screen.go(name, trace=NEEDLE, **PARAMETERS[name])
                        screen.page.wait_for_timeout(1200)
                        screen.settle()
                        screen.page.screenshot(path=file)
                        assert screen.complaints == [], (file.name, screen.complaints)
                    # A palette makes the file a third as large.
                    Image.open(file).convert("RGB").quantize(COLOURS).save(file, optimize=True)
                    print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    write()
