# Trainer: DeepSpeed, for CUDA or for CPUs.
#   docker build -f docker/trainer.Dockerfile --build-arg VARIANT=cuda -t grpo-trainer:0.2.0-cuda .
#   docker build -f docker/trainer.Dockerfile --build-arg VARIANT=cpu  -t grpo-trainer:0.2.0-cpu .
ARG PYTHON=3.11.14-slim-bookworm
ARG VARIANT=cuda

# DeepSpeed compiles the operations that a configuration needs (e.g. offloading), so the image keeps a compiler.
FROM docker.io/library/python:${PYTHON} AS base
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

FROM base AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv --without-pip /opt/grpo
WORKDIR /src
COPY pyproject.toml ./
RUN mkdir services && touch services/__init__.py README.md

# Weights go to generators over NCCL, with vLLM's communicator and packing.
FROM build AS build-cuda
RUN --mount=type=bind,source=docker/constraints/cuda.txt,target=/constraints.txt \
    python -m pip --python /opt/grpo/bin/python install --no-compile --constraint /constraints.txt '.[trainer,tracing,bucket]' 'flash-attn-4>=4.0.0b36,<5' vllm==0.32.0

FROM build AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Only torch comes from its own index, whose other packages have different versions.
RUN --mount=type=bind,source=docker/constraints/cpu.txt,target=/constraints.txt \
    python -m pip --python /opt/grpo/bin/python install --no-compile --no-deps torch==2.13.0 --index-url "${TORCH_INDEX}" \
    && python -m pip --python /opt/grpo/bin/python install --no-compile --constraint /constraints.txt '.[trainer,tracing,bucket]'

# hadolint ignore=DL3006
FROM build-${VARIANT} AS built
COPY services /src/services
RUN python -m pip --python /opt/grpo/bin/python install --no-deps --force-reinstall --no-compile .
# A pod's root is read-only, so without this every start would compile everything again. Some packages carry templates that are not valid Python.
RUN /opt/grpo/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/grpo/lib || true

FROM base
ARG VERSION=0.2.0
ARG VARIANT
LABEL org.opencontainers.image.title="grpo-trainer" \
      org.opencontainers.image.description="DeepSpeed trainer of asynchronous GRPO (${VARIANT})" \
      org.opencontainers.image.version="${VERSION}"
RUN groupadd --gid 10001 grpo && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp grpo \
    && { python -m compileall -q -j 0 --invalidation-mode unchecked-hash /usr/local/lib/python3.11 || true; }
COPY --from=built /opt/grpo /opt/grpo
ENV PATH=/opt/grpo/bin:$PATH PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
COPY --chmod=0555 docker/health.py /opt/grpo/bin/grpo-health
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m --retries=3 CMD ["grpo-health"]
CMD ["python", "-m", "services.trainer.node"]
