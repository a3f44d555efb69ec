"""Take the picture of a run's report that docs/after-training.md shows.

    uv run accelerate launch --config_file accelerate_configs/cpu.yaml train_ddp.py --run_name demo --logging_steps 1
    uv run python -m benchmarks.pictures.report outputs/demo docs/images/report.png

It needs Chromium (on Debian: apt-get install chromium).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.pictures.browser import take_picture
from unsloth_ddp.run.documents.files import REPORT_FILE


def main() -> None:
    """Read the command line and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run with a report")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    parser.add_argument("--width", type=int, default=1180)
    parser.add_argument("--height", type=int, default=1190)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    take_picture(options.run / REPORT_FILE, options.picture, options.width, options.height, dark=options.dark)


if __name__ == "__main__":
    main()
