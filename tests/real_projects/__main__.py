"""Real projects that use Lightning, plain and with RoundPipe: ``make test-projects ARGS='chemprop darts'``.

Each runs in an environment of its own, with several cases in several variants, and what has passed is not run again.
The page docs/reference/projects.md is written from all results.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.real_projects import page
from tests.real_projects.environments import REQUIREMENTS, ROOT
from tests.real_projects.suite import Processes, Suite

PROJECTS = sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def main() -> int:
    """Returns 0 if no row fails."""
    parser = argparse.ArgumentParser(prog="make test-projects ARGS=...", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="PROJECT", help=f"of {', '.join(PROJECTS)}; all by default")
    parser.add_argument("--again", action="store_true", help="run what has passed, too")
    parser.add_argument("--case", default="", help="this one alone")
    parser.add_argument("--install-limit", type=float, default=600, metavar="SECONDS", help="of an environment")
    parser.add_argument("--run-limit", type=float, default=300, metavar="SECONDS", help="of a variant")
    parser.add_argument("--folder", type=Path, default=ROOT / ".projects", help="of environments and results")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in PROJECTS]:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(PROJECTS)}")
    names = given.names or PROJECTS
    suite = Suite(given.folder, Processes(given.folder, given.install_limit, given.run_limit), given.again)
    suite.run(names, given.case)
    results = page.keep({name: suite.results(name) for name in PROJECTS})
    failing = [row for row in page.failing(results) if row.split()[0] in names]
    print("\n".join(["", *failing, f"{len(failing)} rows fail"]))
    return int(bool(failing))


if __name__ == "__main__":
    sys.exit(main())
