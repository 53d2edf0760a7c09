"""Run the notebooks and write their outputs back, without times, paths or anything else that changes from run to run.

usage: python notebooks/rerun.py [NAMES...]
"""

import base64
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from pictures import packed

HERE = Path(__file__).parent


def run(path: Path) -> nbformat.NotebookNode:
    """Execute a notebook in a kernel of its own and give it back as it is checked in."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=600,
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
    ).execute(stderr=subprocess.DEVNULL)
    return cleaned(notebook)


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Take out what depends on the machine; text that was computed is its own plain form, and pictures are packed."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/markdown" in data:
                data["text/plain"] = data["text/markdown"]
            if "image/png" in data:
                data["image/png"] = base64.b64encode(packed(base64.b64decode(data["image/png"]))).decode()
    return notebook


def compact(text: str) -> str:
    """Put every object of JSON text that holds nothing but numbers and words on one line, as a chart's rows are."""
    return re.sub(r"\{\n[^{}\[\]]*\}", lambda found: re.sub(r"\n\s*", " ", found[0]), text)


def main(names: list[str]) -> None:
    """Execute the notebooks whose names begin so, or all of them, in place."""
    for path in sorted(HERE.glob("*.ipynb")):
        if not names or any(path.name.startswith(name) for name in names):
            start = time.perf_counter()
            path.write_text(compact(nbformat.writes(run(path))) + "\n")
            print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
