# syntax=docker/dockerfile:1
# The kit and the environment of uv.lock. docs/docker.md has the commands.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS environment
COPY --from=ghcr.io/astral-sh/uv:0.13.9 /uv /usr/local/bin/uv
ENV UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never
WORKDIR /kit
# "deepspeed" for ZeRO.
ARG EXTRA=""
# Without the kit itself, so that this layer changes with the lock alone.
RUN --mount=type=cache,target=/var/cache/uv \
    --mount=type=bind,source=uv.lock,target=uv.lock \
    --mount=type=bind,source=pyproject.toml,target=pyproject.toml \
    uv sync --locked --no-dev --no-install-project ${EXTRA:+--extra "$EXTRA"}

FROM python:${PYTHON}-slim-bookworm
# Triton compiles its launchers with a C compiler; node.sh asks `ip` for the interface that leads to the master.
# hadolint ignore=DL3008
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt,sharing=locked \
    rm -f /etc/apt/apt.conf.d/docker-clean && \
    apt-get update && \
    apt-get install -y --no-install-recommends g++ iproute2 && \
    useradd --create-home --uid 1000 kit && \
    install -d -o kit -g kit /kit /kit/outputs /checkpoints /home/kit/.cache/huggingface
WORKDIR /kit
COPY --from=environment /kit/.venv /kit/.venv
COPY --chown=kit:kit . /kit
# The driver's libraries are mounted where these say so; images of CUDA set the same.
ENV PATH=/kit/.venv/bin:$PATH PYTHONPATH=/kit PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
# The demo.
CMD ["accelerate", "launch", "train_ddp.py"]
