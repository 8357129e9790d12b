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

from tests.integrations import two_plain, two_trl

SECTIONS = (two_trl, two_plain)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, found = distributed.get_rank(), {}
    try:
        for section in SECTIONS:
            for case, result in section.results(folder):
                found[case] = result
    except Exception:
        found["error"] = {"after": list(found)[-1:], "error": traceback.format_exc()}
        raise
    finally:
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
