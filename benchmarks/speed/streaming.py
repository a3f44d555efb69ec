"""Measure the cost of streamed rows on this machine's CPU: tokenizing, skipping, sending to ranks.

    python -m benchmarks.speed.streaming --json benchmarks/results/speed/streaming.json

tokenized: rows a second of one reading process, for chats of 24 and of about 300 tokens. skipped: rows a second that a
resumed run reads and drops. Both count CPU time, so that other work on the machine does not matter. handed out:
milliseconds to send each rank its rows of a step, 16 rows of 300 tokens per rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.runs import REPO, torchrun

DEMO = REPO / "demo"
WINDOWS = 60
SKIPPED = 150_000


def write_sources(folder: Path) -> dict[str, Path]:
    """Write short and long chats as JSONL, and the short ones as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    short = [json.loads(line) for line in (DEMO / "train.jsonl").read_text().splitlines()]
    long = [{"messages": [m for row in short[n : n + 12] for m in row["messages"]]} for n in range(0, len(short), 12)]
    copies = 1 + (SKIPPED + 1000) // len(short)
    sources = {"short": folder / "short.jsonl", "long": folder / "long.jsonl", "parquet": folder / "short.parquet"}
    for name, rows in (("short", short), ("long", long)):
        sources[name].write_text("".join(json.dumps(row) + "\n" for row in rows) * copies)
    pq.write_table(pa.Table.from_pylist(short * copies), sources["parquet"])
    return sources


def make_windows(source: Path, buffer: int) -> Any:
    """Return the windows of a run over these rows with the demo's tokenizer."""
    from transformers import AutoTokenizer

    from unsloth_ddp.config.options import Settings
    from unsloth_ddp.data.order.stream_windows import streamed_windows

    settings = Settings(dataset=[str(source)], streaming=True, shuffle_buffer=buffer)
    return streamed_windows(settings, None, AutoTokenizer.from_pretrained(DEMO / "model"), seed=1)


def tokenized(source: Path) -> dict[str, float]:
    """Return rows and tokens a second of a reading process."""
    windows = iter(make_windows(source, 0))
    next(windows)
    began = time.process_time()
    lengths = [len(row["input_ids"]) for window in itertools.islice(windows, WINDOWS) for row in window.rows]
    seconds = time.process_time() - began
    return {"rows": len(lengths) / seconds, "tokens": sum(lengths) / seconds}


def skipped(source: Path, buffer: int) -> float:
    """Return the rows a second that are read and dropped."""
    from unsloth_ddp.data.order.stream_order import StreamPosition

    windows = make_windows(source, buffer)
    windows.start = StreamPosition(0, SKIPPED)
    began = time.process_time()
    next(iter(windows))
    return SKIPPED / (time.process_time() - began)


def hand_out() -> None:
    """Run as one of torchrun's ranks; the main one prints the median in milliseconds."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from unsloth_ddp.distributed.ranks import ranks_from_environment
    from unsloth_ddp.distributed.runtime import Runtime

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    runtime = Runtime(ranks_from_environment(), "transformers", "cpu", "fp32", "CPU", control_group=dist.new_group())
    row = {name: np.arange(300, dtype=np.int32) for name in ("input_ids", "labels")}
    shares = [[[row.copy() for _ in range(4)] for _ in range(4)] for _ in range(runtime.ranks.world_size)]
    seconds = []
    for _ in range(200):
        runtime.barrier()
        began = time.perf_counter()
        runtime.scatter_from_main(lambda: shares)
        seconds.append(time.perf_counter() - began)
    if runtime.ranks.is_main:
        print(statistics.median(seconds) * 1000)
    dist.destroy_process_group()


def handed_out(ranks: int) -> float:
    """Return the milliseconds to send a step to this many ranks."""
    command = [*torchrun(ranks), "-m", "benchmarks.speed.streaming", "--hand_out"]
    process = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    return float(process.stdout.splitlines()[-1])


def main() -> None:
    """Measure everything and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    path = parser.parse_args().json
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = write_sources(folder)
        measured: dict[str, Any] = {
            "cores": os.cpu_count(),
            "load_before": os.getloadavg()[0],
            "tokenized_a_second": {kind: tokenized(sources[kind]) for kind in ("short", "long")},
            "skipped_rows_a_second": {
                f"{kind}, buffer {buffer}": skipped(sources[kind], buffer)
                for kind in ("short", "parquet")
                for buffer in (0, 10_000)
            },
            "handed_out_ms": {f"{ranks} ranks": handed_out(ranks) for ranks in (2, 4)},
        }
    path.write_text(json.dumps(measured, indent=2) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    if "--hand_out" in sys.argv:
        hand_out()
    else:
        main()
