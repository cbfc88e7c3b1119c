"""Programs of the pages run as they stand, on two virtual devices: with a tiny model in the place of the one they name.

The blocks of a page are one program, from the first to the last, as in a notebook. It runs in a process of its own, in
a folder with the file that it reads.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.docs.pages import python_of
from tests.support.forks import Forks
from tests.support.huggingface import write_checkpoint

# What a program is told in the place of what it says: another model, and smaller numbers.
SMALLER = {
    "README.md": {},
    "docs/tutorial/quickstart.md": {},
    "docs/tutorial/lora.md": {},
    "docs/tutorial/full-fine-tuning.md": {"LENGTH, ROWS": "16, 4"},
    "docs/tutorial/long-sequences.md": {"LENGTH, PIECE": "32, 8"},
    "docs/how-to/checkpoints.md": {},
    "docs/how-to/memory.md": {},
    "docs/how-to/packing.md": {},
    "docs/how-to/whole-batch-losses.md": {},
}
WRITES = {
    "README.md": ["adapter/adapter_model.safetensors"],
    "docs/tutorial/lora.md": ["adapter/adapter_model.safetensors", "merged/model.safetensors"],
    "docs/tutorial/full-fine-tuning.md": ["checkpoints/last.ckpt", "tuned/model.safetensors"],
    "docs/how-to/checkpoints.md": ["full/last.ckpt", "adapters/last.ckpt", "merged/model.safetensors"],
}
PRINTS = {
    "docs/tutorial/quickstart.md": [r"fused", r"device 1"],
    "docs/how-to/checkpoints.md": [
        rf"Restored all states from the checkpoint at \S*/{name}/last" for name in ("full", "adapters")
    ],
    "docs/how-to/memory.md": [r"\(\d+, \d+\)"],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(str(folder))
    return folder


def told(program: str, values: dict[str, str]) -> str:
    """The program with other values of its constants, and on two virtual devices where it takes what there is."""
    for name, value in values.items():
        program, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", program, flags=re.MULTILINE)
        assert count == 1, name
    devices = 'accelerator="cpu", devices=2, logger=False'
    return re.sub(r"L\.Trainer\((?![^()]*accelerator=)", rf"L.Trainer({devices}, ", program)


@pytest.mark.parametrize("page", SMALLER)
def test_the_program_of_a_page_runs(page: str, checkpoint: Path, forks: Forks, tmp_path: Path) -> None:
    program = "\n\n".join(python_of(page))
    values = {"MODEL": repr(str(checkpoint)), **SMALLER[page]} if "MODEL = " in program else SMALLER[page]
    script = tmp_path / "program.py"
    script.write_text(told(program, values), encoding="utf-8")
    (tmp_path / "notes.txt").write_text("\n\n".join(f"Water and {'salt ' * (n % 5)}" for n in range(16)))
    printed = forks.run(script, folder=tmp_path, needs=["peft"])
    for expected in PRINTS.get(page, []):
        assert re.search(expected, printed), printed
    for name in WRITES.get(page, []):
        assert (tmp_path / name).stat().st_size, name
    shutil.rmtree(tmp_path)  # checkpoints
