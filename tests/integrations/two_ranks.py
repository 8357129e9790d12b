"""Other people's trainers over two processes: what torchrun starts, once for all cases.

    torchrun --standalone --nproc-per-node 2 -m tests.integrations.two_ranks FOLDER

Each rank writes FOLDER/rank<r>.json: case → result, and what went wrong last.
"""

from __future__ import annotations

import datetime
import json
import sys
import traceback
from pathlib import Path

import torch
from torch import distributed

from tests.integrations import two_openrlhf, two_plain, two_trl, two_verl

# One that is not installed has no results. Lightning is the last: once it is imported, verl takes
# every module for an abstract class.
SECTIONS = (two_trl, two_verl, two_openrlhf, two_plain)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, found = distributed.get_rank(), {}
    try:
        for section in SECTIONS:
            try:
                found.update(section.results(folder))
            except ModuleNotFoundError as error:
                if "make trainers" not in str(error):
                    raise
                found["missing"] = [*found.get("missing", []), str(error)]
    except Exception:
        found["error"] = {"after": list(found)[-1:], "error": traceback.format_exc()}
        raise
    finally:
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
