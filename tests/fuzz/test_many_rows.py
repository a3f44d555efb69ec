"""Very many short rows: reading and tokenizing them takes little more memory than their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL
from tests.peak_memory import most_memory
from tests.ranks import run_ranks

MEBIBYTE = 1 << 20
# 312 MiB were measured, much of it the files of examples and tokens mapped into memory; as Python objects the rows
# would take over a kilobyte each.
BOUND = 384 * MEBIBYTE


def prepare(path: str, count: int) -> None:
    """Read and tokenize the rows as a run does; prints the memory that it took beyond that of the imports."""
    import tempfile

    from transformers import AutoTokenizer

    from tests.runtimes import cpu_runtime
    from unsloth_ddp.config.options import Settings
    from unsloth_ddp.data.dataset import tokenize_examples
    from unsloth_ddp.data.order.batch_plan import RowOrder
    from unsloth_ddp.data.sources.examples import read_examples
    from unsloth_ddp.data.sources.identity import same_everywhere

    runtime = cpu_runtime()
    settings = Settings(dataset=[path])
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    folder = Path(tempfile.mkdtemp(dir=Path(path).parent))
    before = most_memory()
    read_examples(settings, runtime, folder)
    rows, _ = tokenize_examples(settings, runtime, folder, tokenizer)
    same_everywhere(rows, runtime, "training")
    assert sum(RowOrder(count, 8, seed=1)) == count * (count - 1) // 2
    print(json.dumps({"rows": rows.counts.rows, "bytes": most_memory() - before}))


def write_rows(path: Path, count: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            file.write(f'{{"prompt": "{number}? ", "completion": "yes"}}\n')


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_short_rows_take_bounded_memory(tmp_path: Path) -> None:
    count = 400_000
    write_rows(tmp_path / "a.jsonl", count)
    done = run_ranks(1, prepare, str(tmp_path / "a.jsonl"), count, folder=tmp_path / "out", timeout=840).check()
    found = json.loads(done.output.splitlines()[-1])
    assert found["rows"] == count
    assert found["bytes"] < BOUND, f"{found['bytes'] / MEBIBYTE:.0f} MiB"
