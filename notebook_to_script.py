#!/usr/bin/env python3
"""Turn an Unsloth notebook into a script that trains under DDP.

python notebook_to_script.py notebook.ipynb script.py
accelerate launch script.py
"""

from unsloth_ddp.notebook.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
