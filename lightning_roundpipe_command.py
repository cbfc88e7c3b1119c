"""The console script ``roundpipe``, which starts without PyTorch.

Importing ``lightning_roundpipe`` registers strategy and accelerator with Lightning, and so imports Lightning and
PyTorch, which takes seconds. The command needs neither. This module therefore stands beside the package: it makes the
package known to Python without running its ``__init__``, and only then imports the command out of it.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec

_PACKAGE = "lightning_roundpipe"


def main() -> int:
    """Run the command with the arguments of the process, in a process of its own; return its exit status.

    Afterwards the process knows the package by its submodules alone, without its public names, unless it had been
    imported before. Programs call ``lightning_roundpipe.cli.main`` instead.

    Raises:
        SystemExit: As ``lightning_roundpipe.cli.main``.
    """
    if _PACKAGE not in sys.modules:
        spec = find_spec(_PACKAGE)
        assert spec is not None, f"{_PACKAGE} is not installed beside this module"
        sys.modules[_PACKAGE] = module_from_spec(spec)
    from lightning_roundpipe.cli import main as run_command

    return run_command()
