# The commands people type. `make ci` is what CI runs.
.PHONY: setup demo lint test ci

setup:
	uv sync --locked
	git config --get core.hooksPath >/dev/null || uvx pre-commit install

demo:
	uv run accelerate launch --config_file accelerate_configs/cpu.yaml train_ddp.py --use_cpu --run_name demo --overwrite

lint:
	uv run ruff check .
	uv run ruff format --check .
	uv run mypy
	if command -v shellcheck >/dev/null; then shellcheck cluster/*.sh cluster/*.sbatch .ci/run .ci/versions; else echo "shellcheck is not installed: skipped"; fi

test:
	uv run pytest -n 2

ci:
	bash .ci/run
