# Tracker: TensorBoard's files and W&B.   docker build -f docker/tracker.Dockerfile -t grpo-tracker .
ARG PYTHON=3.11.14-slim-bookworm

FROM docker.io/library/python:${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# lean.py strips libraries.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends binutils && rm -rf /var/lib/apt/lists/* \
    && python -m venv --without-pip /opt/grpo
WORKDIR /src
COPY pyproject.toml docker/lean.py ./
RUN --mount=type=bind,source=docker/constraints/lean.txt,target=/constraints.txt \
    mkdir services && touch services/__init__.py README.md \
    && python -m pip --python /opt/grpo/bin/python install --no-compile --constraint /constraints.txt '.[tracking,tracing]' \
    && python lean.py /opt/grpo
COPY services /src/services
RUN python -m pip --python /opt/grpo/bin/python install --no-deps --force-reinstall --no-compile .
# A pod's root is read-only, so without this every start would compile everything again. Some packages carry templates that are not valid Python.
RUN /opt/grpo/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/grpo/lib || true

FROM docker.io/library/python:${PYTHON}
ARG VERSION=0.2.0
LABEL org.opencontainers.image.title="grpo-tracker" \
      org.opencontainers.image.description="Experiment trackers of asynchronous GRPO" \
      org.opencontainers.image.version="${VERSION}"
RUN groupadd --gid 10001 grpo && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp grpo \
    && { python -m compileall -q -j 0 --invalidation-mode unchecked-hash /usr/local/lib/python3.11 || true; }
COPY --from=build /opt/grpo /opt/grpo
ENV PATH=/opt/grpo/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
COPY --chmod=0555 docker/health.py /opt/grpo/bin/grpo-health
HEALTHCHECK --interval=10s --timeout=10s --start-period=2m --retries=3 CMD ["grpo-health"]
CMD ["python", "-m", "services.tracker"]
