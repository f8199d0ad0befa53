# Dataprep, and everything else that needs no torch: scaler, console, preload, `grpo`.   docker build -f docker/dataprep.Dockerfile -t grpo-dataprep .
ARG PYTHON=3.11.14-slim-bookworm

FROM docker.io/library/python:${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Some packages have no wheel and are compiled. lean.py strips libraries.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && python -m venv --without-pip /opt/grpo
WORKDIR /src
# Dependencies first, so that this layer is cached until pyproject.toml changes.
COPY pyproject.toml docker/lean.py ./
RUN --mount=type=bind,source=docker/constraints/lean.txt,target=/constraints.txt \
    mkdir services && touch services/__init__.py README.md \
    && python -m pip --python /opt/grpo/bin/python install --no-compile --constraint /constraints.txt '.[cluster,dataprep,tracing]' \
    && python lean.py /opt/grpo
COPY services /src/services
RUN python -m pip --python /opt/grpo/bin/python install --no-deps --force-reinstall --no-compile .

# The base image without its installer and without files that Python can regenerate, in one layer.
FROM docker.io/library/python:${PYTHON} AS root
RUN groupadd --gid 10001 grpo && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp grpo \
    && rm -rf /usr/local/lib/python3.11/site-packages/* /usr/local/lib/python3.11/ensurepip /usr/local/lib/python3.11/idlelib \
        /usr/local/lib/python3.11/test /usr/local/bin/pip* /usr/local/bin/idle* /usr/share/doc /usr/share/man \
    && find /usr/local/lib -name __pycache__ -prune -exec rm -rf {} +
COPY --from=build /opt/grpo /opt/grpo
COPY --chmod=0555 docker/health.py /opt/grpo/bin/grpo-health
COPY docker/bytecode.py /tmp/bytecode.py
RUN /opt/grpo/bin/python /tmp/bytecode.py services.console.commands.__main__ services.console.release_check services.dataprep.__main__ \
        services.dataprep.loop services.dataprep.prompts.catalogue services.environment.pod services.scaler.__main__ \
        services.web.__main__ services.web.serving \
    && rm /tmp/bytecode.py

FROM scratch
ARG VERSION=0.2.0
LABEL org.opencontainers.image.title="grpo-dataprep" \
      org.opencontainers.image.description="Data service of asynchronous GRPO" \
      org.opencontainers.image.version="${VERSION}"
# hadolint ignore=DL3067
COPY --from=root / /
ENV PATH=/opt/grpo/bin:/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
HEALTHCHECK --interval=10s --timeout=10s --start-period=30m --retries=3 CMD ["grpo-health"]
CMD ["python", "-m", "services.dataprep"]
